// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
)

// realTPMs is how many machines of a crowd have a process of swtpm: the others' TPM is the model.
const realTPMs = 8

// enrolTimeLimit is more than any enrolment may take: what takes longer is given up, so that the
// table is printed.
const enrolTimeLimit = 3 * time.Minute

// crowd is machines that attest at once.
type crowd struct {
	machines []*fleet.Machine
	real     int
	cluster  fleet.Cluster
	// atIt is how many have no certificate yet.
	atIt atomic.Int64
}

// newCrowd makes machines, of which the first few have a real swtpm.
func (b *bench) newCrowd(prefix string, count, real int, cluster fleet.Cluster) (*crowd, error) {
	c := &crowd{real: min(real, count), cluster: cluster}
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

// attest has all machines attest at once, with certificates where they have some. The times are
// theirs, in their order, and there after an error, too.
func (c *crowd) attest(ctx context.Context) ([]fleet.Times, error) {
	ctx, cancel := context.WithTimeout(ctx, enrolTimeLimit)
	defer cancel()
	times, failed := make([]fleet.Times, len(c.machines)), make([]error, len(c.machines))
	start := make(chan struct{})
	var wait sync.WaitGroup
	c.atIt.Store(int64(len(c.machines)))
	for i, m := range c.machines {
		wait.Go(func() {
			<-start
			defer c.atIt.Add(-1)
			times[i], failed[i] = m.Attest(ctx, c.cluster)
		})
	}
	close(start)
	wait.Wait()
	return times, errors.Join(failed...)
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
