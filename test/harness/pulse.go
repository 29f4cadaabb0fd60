// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// pulseInterval is how often a pulse is taken.
const pulseInterval = 250 * time.Millisecond

// Pulse is a node's health as its cluster sees it, since it was watched.
type Pulse struct {
	// Stop ends the watch.
	Stop func()

	cluster kubernetes.Interface
	node    string

	mu       sync.Mutex
	renewals []time.Time // of the Lease
	notReady []string    // when the node was not, and why
}

// WatchNode watches a node, until the test ends or Stop is called.
func WatchNode(t testing.TB, cluster kubernetes.Interface, node string) *Pulse {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	p := &Pulse{cluster: cluster, node: node, Stop: func() { cancel(); <-ended }}
	go func() {
		defer close(ended)
		for ctx.Err() == nil {
			p.look(ctx)
			select {
			case <-ctx.Done():
			case <-time.After(pulseInterval):
			}
		}
	}()
	t.Cleanup(p.Stop)
	return p
}

// look ignores a failure of the API server, which is no failure of the node. The next look decides.
func (p *Pulse) look(ctx context.Context) {
	lease, err := p.cluster.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(ctx, p.node, metav1.GetOptions{})
	if err != nil || lease.Spec.RenewTime == nil {
		return
	}
	notReady, err := NotReady(ctx, p.cluster, p.node)
	if err != nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if at := lease.Spec.RenewTime.Time; len(p.renewals) == 0 || at.After(p.renewals[len(p.renewals)-1]) {
		p.renewals = append(p.renewals, at)
	}
	if notReady != "" {
		p.notReady = append(p.notReady, time.Now().Format(time.TimeOnly)+" "+notReady)
	}
}

// NotReady returns why a node is not ready, "" if it is ready.
func NotReady(ctx context.Context, cluster kubernetes.Interface, name string) (why string, err error) {
	node, err := cluster.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady {
			if c.Status == corev1.ConditionTrue {
				return "", nil
			}
			return fmt.Sprintf("%s: %s: %s", c.Status, c.Reason, c.Message), nil
		}
	}
	return "has no condition Ready", nil
}

// Count returns how many renewals were seen.
func (p *Pulse) Count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.renewals)
}

// FirstAfter returns the first renewal after a point in time, and whether there was one.
func (p *Pulse) FirstAfter(begin time.Time) (at time.Time, renewed bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, at := range p.renewals {
		if at.After(begin) {
			return at, true
		}
	}
	return time.Time{}, false
}

// Longest returns the longest time without a renewal, up to a point in time.
func (p *Pulse) Longest(until time.Time) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	var longest time.Duration
	for i, at := range p.renewals {
		next := until
		if i+1 < len(p.renewals) && p.renewals[i+1].Before(until) {
			next = p.renewals[i+1]
		}
		longest = max(longest, next.Sub(at))
	}
	return longest
}

// Steady checks that no two renewals of the Lease until then are further apart than maxGap, and
// that the node was ready at each look.
func (p *Pulse) Steady(t testing.TB, maxGap time.Duration, until time.Time) {
	t.Helper()
	longest := p.Longest(until)
	t.Logf("%d renewals of the Lease, %s between two at most", p.Count(), longest.Round(10*time.Millisecond))
	if longest > maxGap {
		t.Errorf("no renewal of the Lease for %s", longest)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.notReady) > 0 {
		t.Errorf("the node was not ready %d times, first: %s", len(p.notReady), p.notReady[0])
	}
}
