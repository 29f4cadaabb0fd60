// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// maxGap is the longest time between two renewals of a node's Lease that counts as none missed: the kubelet renews it every 10 s, and
// one missed makes 20 s. A busy machine may be late.
const maxGap = 19 * time.Second

const pulseInterval = 250 * time.Millisecond

// pulse is a node's health as its cluster sees it, since it was watched.
type pulse struct {
	stop func()

	mu       sync.Mutex
	renewals []time.Time // of the Lease
	notReady []string    // when the node was not, and why
}

// watch watches a node that is ready, until the test ends or stop is called.
func (m *machine) watch(t *testing.T) *pulse {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	p := &pulse{stop: func() { cancel(); <-ended }}
	go func() {
		defer close(ended)
		for ctx.Err() == nil {
			p.look(ctx, m)
			select {
			case <-ctx.Done():
			case <-time.After(pulseInterval):
			}
		}
	}()
	t.Cleanup(p.stop)
	return p
}

// look takes a failure of the API server for none of the node's: the next look tells.
func (p *pulse) look(ctx context.Context, m *machine) {
	lease, err := m.Client().CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(ctx, m.name, metav1.GetOptions{})
	if err != nil || lease.Spec.RenewTime == nil {
		return
	}
	notReady, err := m.notReady(ctx)
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

// ready returns why the node is not ready, or why that is not known, and is empty if it is.
func (m *machine) ready(ctx context.Context) string {
	why, err := m.notReady(ctx)
	if err != nil {
		return err.Error()
	}
	return why
}

// notReady returns why the node is not ready, and is empty if it is.
func (m *machine) notReady(ctx context.Context) (why string, err error) {
	node, err := m.Client().CoreV1().Nodes().Get(ctx, m.name, metav1.GetOptions{})
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

// count returns how many renewals were seen.
func (p *pulse) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.renewals)
}

// longest returns the longest time without a renewal, up to a point in time.
func (p *pulse) longest(until time.Time) time.Duration {
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

// steady checks that no renewal of the Lease was missed until then, and that the node was ready each time somebody looked.
func (p *pulse) steady(t *testing.T, until time.Time) {
	t.Helper()
	longest := p.longest(until)
	t.Logf("%d renewals of the Lease, %s between two at most", p.count(), longest.Round(10*time.Millisecond))
	if longest > maxGap {
		t.Errorf("no renewal of the Lease for %s", longest)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.notReady) > 0 {
		t.Errorf("the node was not ready %d times, first: %s", len(p.notReady), p.notReady[0])
	}
}
