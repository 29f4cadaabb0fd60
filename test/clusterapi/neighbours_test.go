// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/reliability"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	// containerLimit is the limit on memory in packaging/cluster-api/management.
	containerLimit = 2 << 30
	// neighbours is how many machines of the honest tenant renew without end.
	neighbours = 4
	// patience is how long a machine waits for a certificate.
	patience = 30 * time.Second
)

// tenancy is a controller in a container of its own.
type tenancy struct {
	*controllerprocess.Controller
	group *testbed.MemoryGroup
	ended int
}

// startFor starts a controller for the namespaces of these worlds, within the manifest's limit.
func startFor(t *testing.T, worlds ...*world) *tenancy {
	t.Helper()
	harness.Must(t, shared.built())
	group, err := testbed.NewMemoryGroup(containerLimit)
	harness.Must(t, err)
	made, err := controllerprocess.New(controllerprocess.Options{
		ControlPlane: worlds[0].ControlPlane, Dir: t.TempDir(), Binary: shared.controller, Memory: group,
		Env: []string{fmt.Sprintf("GOMEMLIMIT=%d000000", containerLimit>>20)},
		Configure: func(c *config.Config) {
			c.ClusterUID, c.Signing, c.Inventory = "", config.Signing{Mode: config.Sign}, config.Inventory{}
			c.LeaderElection.Enabled = false // there is one Lease
		},
		Edit: func(file map[string]any) {
			var namespaces []any
			for _, w := range worlds {
				namespaces = append(namespaces, w.namespace)
			}
			file["clusterAPI"] = map[string]any{"namespaces": namespaces, "ekSources": []any{"Annotation"}}
			file["rates"] = map[string]any{"perMachine": map[string]any{"every": "1ms", "burst": 100_000}} // machines renew all the time
		},
	})
	harness.Must(t, err)
	c := &tenancy{Controller: made, group: group}
	t.Cleanup(func() {
		_ = c.Kill() // it may have ended
		harness.Must(t, group.Remove())
	})
	harness.Must(t, errors.Join(c.Start(t.Context()), c.Ready(t.Context())))
	return c
}

// supervise starts the controller again whenever it ends, as the kubelet does, until ctx ends.
func (c *tenancy) supervise(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.Process().Done():
		}
		c.ended++
		if !pause(ctx, time.Second) { // the kubelet's back-off grows to 5 minutes
			return
		}
		if err := c.Start(ctx); err != nil {
			return
		}
	}
}

// pause waits, and reports false if ctx ended.
func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// against has the server attack a controller, while machines of the other tenant renew.
func (h *hostileServer) against(t *testing.T, a attack, c *tenancy, machines []*machine, window time.Duration) (samples, string) {
	t.Helper()
	peak := func() int64 {
		n, err := c.group.Peak()
		harness.Must(t, err)
		return n >> 20
	}
	calm, sent := peak(), h.sent.Load()
	ctx, cancel := context.WithCancel(t.Context())
	var supervisor sync.WaitGroup
	supervisor.Go(func() { c.supervise(ctx) })
	h.set(a)
	s := renewAll(t.Context(), machines, window)
	h.set(0)
	if h.sent.Load() == sent {
		t.Errorf("%s: the attack reached nobody", a)
	}
	cancel()
	supervisor.Wait()
	killed, err := c.group.Killed()
	harness.Must(t, err)
	return s, fmt.Sprintf("%d MiB sent in %s, memory %d MiB before and %d MiB at most of %d, ended %d times, %d of them for want of memory",
		(h.sent.Load()-sent)>>20, window, calm, peak(), containerLimit>>20, c.ended, killed)
}

// samples are the times of certificates, the shortest first, and how many were not issued in time.
type samples struct {
	took   []time.Duration
	missed int
	gap    time.Duration // the longest time without a certificate of anybody's
}

func (s samples) quantile(q float64) time.Duration {
	if len(s.took) == 0 {
		return 0
	}
	return s.took[min(int(q*float64(len(s.took))), len(s.took)-1)]
}

func (s samples) String() string {
	return fmt.Sprintf("%d certificates, %d missed, median %s, p99 %s, longest gap %s", len(s.took), s.missed,
		s.quantile(0.5).Round(time.Millisecond), s.quantile(0.99).Round(time.Millisecond), s.gap.Round(time.Millisecond))
}

// renewAll has machines renew without end, each for itself, for some time. The last renewal of each
// may take longer.
func renewAll(ctx context.Context, machines []*machine, window time.Duration) samples {
	var (
		mu   sync.Mutex
		s    samples
		wait sync.WaitGroup
		last = time.Now()
		end  = time.Now().Add(window)
	)
	for _, m := range machines {
		wait.Go(func() {
			for time.Now().Before(end) && ctx.Err() == nil {
				ctx, cancel := context.WithTimeout(ctx, patience)
				took, err := m.attest(ctx)
				cancel()
				mu.Lock()
				if err != nil {
					s.missed++
				} else {
					s.took = append(s.took, took)
					s.gap, last = max(s.gap, time.Since(last)), time.Now()
				}
				mu.Unlock()
				pause(ctx, 250*time.Millisecond)
			}
		})
	}
	wait.Wait()
	s.gap = max(s.gap, time.Since(last))
	slices.Sort(s.took)
	return s
}

// A management cluster has two tenants. One of them replaces its API server with a program that
// attacks every client that reads from it. Each tenant has a controller, with
// clusterAPI.namespaces. That of the other tenant goes on as before. In the long run one controller
// serves both for comparison: what it costs the other tenant is in docs/reliability.md.
//
// TestManyClustersAndABlackHole has an API server that does not answer. TestAttacks tries what is
// possible with an honest API server. TestAnswersAreBounded in internal/workload tests our own
// limits.
func TestHostileNeighbours(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("a limit on memory needs root")
	}
	type plan struct {
		window  time.Duration
		attacks []attack
		shared  bool
	}
	p := reliability.Size(t, "neighbours",
		plan{4 * time.Second, []attack{endlessBodies | endlessEvents}, false},
		plan{40 * time.Second, []attack{endlessBodies, endlessLists, endlessEvents, slowAnswers}, true})
	bad, good := newWorld(t, shared.management), newWorld(t, shared.management)
	var server *hostileServer
	hostile := bad.newCluster(t, "hostile", func(c *cluster) {
		server = newHostileServer(t, c.workload)
		c.server, c.kubeconfig = server.url, nil
	})
	hostile.kubeconfigOf(t, hostile.administratorOf(t), testbed.WithServerCA(server.ca))
	honest := good.newCluster(t, "honest", nil)
	var machines []*machine
	for i := range neighbours {
		machines = append(machines, honest.newMachine(t, fmt.Sprintf("neighbour-%d", i), nil))
	}
	before := hostile.newMachine(t, "before", nil)

	t.Run("a controller each", func(t *testing.T) {
		theirs := startFor(t, good)
		for _, m := range machines {
			m.attests(t)
		}
		for _, a := range p.attacks {
			attacked := startFor(t, bad)
			before.attests(t)
			base := renewAll(t.Context(), machines, p.window)
			during, cost := server.against(t, a, attacked, machines, p.window)
			t.Logf("%s: before: %s; during: %s; the attacked controller: %s", a, base, during, cost)
			_ = attacked.Kill() // it may have ended
			if during.missed > 0 || during.quantile(0.99) > 3*base.quantile(0.99)/2+slack || len(during.took) == 0 {
				t.Errorf("%s: the other tenant is disturbed", a)
			}
		}
		if killed, err := theirs.group.Killed(); err != nil || killed > 0 || theirs.ended > 0 {
			t.Errorf("the other tenant's controller ended %d times: %v", killed, err)
		}
	})
	if !p.shared {
		return
	}
	t.Run("one controller", func(t *testing.T) {
		for _, a := range p.attacks {
			both := startFor(t, bad, good)
			before.attests(t)
			base := renewAll(t.Context(), machines, p.window)
			during, cost := server.against(t, a, both, machines, p.window)
			t.Logf("%s: before: %s; during: %s; the controller: %s", a, base, during, cost)
			_ = both.Kill() // it may have ended
		}
	})
}
