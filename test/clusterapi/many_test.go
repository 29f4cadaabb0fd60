// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// clusters is the number of clusters that one controller serves.
const clusters = 20

// attestAll attests machines, four at a time. It returns the time that each took, the shortest
// first.
func attestAll(t *testing.T, what string, machines []*machine) []time.Duration {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var (
		mu    sync.Mutex
		took  []time.Duration
		errs  error
		begun = time.Now()
		wait  sync.WaitGroup
	)
	next := make(chan *machine)
	for range 4 {
		wait.Go(func() {
			for m := range next {
				d, err := m.attest(ctx)
				if err != nil {
					err = fmt.Errorf("%s: %w", m.cluster, err)
				}
				mu.Lock()
				took, errs = append(took, d), errors.Join(errs, err)
				mu.Unlock()
			}
		})
	}
	for _, m := range machines {
		next <- m
	}
	close(next)
	wait.Wait()
	if errs != nil {
		t.Fatalf("%s: %v", what, errs)
	}
	slices.Sort(took)
	t.Logf("%s: %d in %s, median %s, longest %s", what, len(machines), time.Since(begun).Round(time.Millisecond),
		took[len(took)/2].Round(time.Millisecond), took[len(took)-1].Round(time.Millisecond))
	return took
}

// One controller serves twenty clusters. Then packets to one of them are dropped, which is worse
// than a refusal. The other clusters are not delayed, neither while the controller runs nor when it
// is started then. The test runs alone, since it measures.
func TestManyClustersAndABlackHole(t *testing.T) {
	begun := time.Now()
	if err := shared.workloads.fill(t.Context(), clusters); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d API servers: %s", clusters, time.Since(begun).Round(time.Second))
	w := newWorld(t, shared.management)
	var proxy *testbed.Proxy
	lost := w.newCluster(t, "lost", behindProxy(t, &proxy)).newMachine(t, "lost", nil)
	others := make([]*machine, clusters-1)
	for i := range others {
		name := fmt.Sprintf("other-%02d", i)
		others[i] = w.newCluster(t, name, nil).newMachine(t, name, nil)
	}
	c := w.start(t, nil)
	attestAll(t, "first certificates", append(slices.Clone(others), lost))
	set := func(mode testbed.Mode) {
		t.Helper()
		if err := proxy.SetMode(mode); err != nil {
			t.Fatal(err)
		}
	}
	notDelayed(t, func(away bool) []time.Duration {
		if !away {
			return attestAll(t, "renewals", others)
		}
		set(testbed.BlackHole)
		waiting := lost.begins(t)
		took := attestAll(t, "renewals, one is lost", others)
		time.Sleep(6 * time.Second) // a probe of the cluster's health fails in between
		took = slices.Sorted(slices.Values(append(took, attestAll(t, "renewals, one is lost, still", others)...)))
		waiting.waits(t, 0)
		since := time.Now()
		set(testbed.Pass)
		waiting.within(t, returns)
		t.Logf("the lost one is served again after %s", time.Since(since).Round(time.Millisecond))
		return took
	})
	notDelayed(t, func(away bool) []time.Duration {
		set(testbed.Pass)
		if away {
			set(testbed.BlackHole)
		}
		if err := errors.Join(c.Kill(), c.Start(t.Context())); err != nil {
			t.Fatal(err)
		}
		return attestAll(t, fmt.Sprintf("renewals after a restart, one is lost: %t", away), others)
	})
}

// notDelayed compares the time for certificates while all clusters are reachable, and while one is
// not. The computer may be busy at one time, so only a repeated delay counts.
func notDelayed(t *testing.T, measure func(away bool) []time.Duration) {
	t.Helper()
	for n := 1; ; n++ {
		before, during := measure(false), measure(true)
		median, longest := before[len(before)/2], before[len(before)-1]
		if during[len(during)/2] <= 3*median/2+slack/4 && during[len(during)-1] <= 3*longest/2+slack {
			return
		}
		if n == 3 {
			t.Errorf("while all are there: median %s, longest %s; while one is lost: median %s, longest %s",
				median, longest, during[len(during)/2], during[len(during)-1])
			return
		}
	}
}

// returns is how soon the controller serves a cluster again that was unreachable for long. It tries
// such a cluster every half minute, for ten seconds.
const returns = 45 * time.Second

// A cluster that is lost when the controller starts is found when it returns.
func TestLostAtStart(t *testing.T) {
	t.Parallel()
	w := newWorld(t, shared.management)
	var proxy *testbed.Proxy
	m := w.newCluster(t, "lost", behindProxy(t, &proxy)).newMachine(t, "m", nil)
	if err := proxy.SetMode(testbed.BlackHole); err != nil {
		t.Fatal(err)
	}
	w.start(t, nil)
	a := m.begins(t)
	a.waits(t, 15*time.Second)
	since := time.Now()
	if err := proxy.SetMode(testbed.Pass); err != nil {
		t.Fatal(err)
	}
	a.within(t, returns)
	t.Logf("served after %s", time.Since(since).Round(time.Millisecond))
}

// A cluster that is unreachable for longer than its probes allow is dropped, and served again
// later.
func TestLostForLong(t *testing.T) {
	t.Parallel()
	w := newWorld(t, shared.management)
	var proxy *testbed.Proxy
	c := w.newCluster(t, "lost", behindProxy(t, &proxy))
	process := w.start(t, nil)
	m := c.newMachine(t, "m", nil)
	m.attests(t)
	if err := proxy.SetMode(testbed.BlackHole); err != nil {
		t.Fatal(err)
	}
	a := m.begins(t)
	harness.Eventually(t, 2*time.Minute, "it is let go of", func() bool { return bytes.Contains(logOf(t, process), []byte("no longer served")) })
	a.waits(t, 0)
	since := time.Now()
	if err := proxy.SetMode(testbed.Pass); err != nil {
		t.Fatal(err)
	}
	a.within(t, returns)
	t.Logf("served again after %s", time.Since(since).Round(time.Millisecond))
	m.attests(t)
	m.remembered(t)
}
