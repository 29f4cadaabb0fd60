// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
)

// realTPMs is how many machines of a crowd have a process of swtpm: the others' TPM is the model.
const realTPMs = 8

// enrolTimeLimit is more than any enrolment may take: what takes longer is given up, so that the table is printed.
const enrolTimeLimit = 3 * time.Minute

// crowd is machines that attest at once.
type crowd struct {
	machines []*fleet.Machine
	real     int
	cluster  fleet.Cluster

	mu sync.Mutex
	// hits is how often the leader was killed while a machine was at it, for those that are.
	hits map[*fleet.Machine]int
}

// newCrowd makes machines, of which the first few have a real swtpm.
func (b *bench) newCrowd(prefix string, count, real int, cluster fleet.Cluster) (*crowd, error) {
	c := &crowd{real: min(real, count), cluster: cluster, hits: map[*fleet.Machine]int{}}
	dir, err := b.folder(prefix)
	if err != nil {
		return nil, err
	}
	maker, err := swtpm.NewCA()
	if err != nil {
		return nil, err
	}
	c.machines, err = fleet.Make(count, func(i int) (*fleet.Machine, error) {
		name := fmt.Sprintf("%s-%04d", prefix, i)
		dir := filepath.Join(dir, name)
		if err := os.Mkdir(dir, 0o700); err != nil {
			return nil, err
		}
		if i < c.real {
			return fleet.NewSwtpm(name, dir, maker)
		}
		return fleet.NewModel(name, dir, maker)
	})
	return c, err
}

// stop switches all TPMs off.
func (c *crowd) stop() { fleet.Stop(c.machines...) }

// attest has all machines attest at once, with certificates where they have some. The times are theirs, in their order, and there after an error, too.
func (c *crowd) attest(ctx context.Context) ([]fleet.Times, error) {
	ctx, cancel := context.WithTimeout(ctx, enrolTimeLimit)
	defer cancel()
	times, failed := make([]fleet.Times, len(c.machines)), make([]error, len(c.machines))
	start := make(chan struct{})
	var wait sync.WaitGroup
	for i, m := range c.machines {
		wait.Go(func() {
			<-start
			c.enter(m)
			defer c.leave(m)
			times[i], failed[i] = m.Attest(ctx, c.cluster)
		})
	}
	close(start)
	wait.Wait()
	return times, errors.Join(failed...)
}

func (c *crowd) enter(m *fleet.Machine) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hits[m] = 0
}

func (c *crowd) leave(m *fleet.Machine) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.hits, m)
}

// hit notes that all who are at it have lost their leader.
func (c *crowd) hit() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for m := range c.hits {
		c.hits[m]++
	}
}

// atIt returns how many are at it, and how often the one was hit that was hit most.
func (c *crowd) atIt() (count, worst int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, n := range c.hits {
		worst = max(worst, n)
	}
	return len(c.hits), worst
}

// took are the times from the first hello to the certificate of those that got one.
func took(times []fleet.Times) (all []time.Duration) {
	for _, t := range times {
		if t.CertificateSeen > 0 {
			all = append(all, t.CertificateSeen)
		}
	}
	return all
}

// spanned returns how long it took from when the first set out to the last certificate.
func spanned(times []fleet.Times) time.Duration {
	var first, last time.Time
	for _, t := range times {
		if first.IsZero() || t.Began.Before(first) {
			first = t.Began
		}
		if end := t.Began.Add(t.CertificateSeen); end.After(last) {
			last = end
		}
	}
	return last.Sub(first)
}
