// SPDX-License-Identifier: Apache-2.0

package revocation

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// full are so many policies with as many certificates as a list has.
func full(count int32) lists {
	l := lists{}
	for number := range count {
		l[number+1] = others(revocation.SliceCapacity)
	}
	return l
}

// Beside 4,999 others, one more certificate is refused by each API server within two seconds, in
// each of the policies.
func TestInForceWithinTwoSeconds(t *testing.T) {
	const policies, rounds = 5, 10
	_, fine := newNode(t, "soon")
	filled, first := full(policies), nodeCertificate(t, "soon")
	filled[policies][0] = revoked(first)
	began := time.Now()
	took := inForceFor(t, filled, "soon", first)
	t.Logf("five policies of 1,000 at once: %s after the last of five updates, which took %s", took, time.Since(began)-max(took[0], took[1]))
	var times []time.Duration
	for round := range rounds {
		number, name := int32(round%policies+1), fmt.Sprintf("soon-%d", round)
		c, _ := newNode(t, name)
		for server := range shared.servers {
			if a := c.do(t.Context(), server, renewal(name)); a.code != 200 {
				t.Fatalf("before: %s", a)
			}
		}
		filled[number] = slices.Clone(filled[number])
		filled[number][1+round] = revoked(c)
		harness.Must(t, fill(t.Context(), lists{number: filled[number]}))
		took := awaitRefused(t, name, c)
		times = append(times, took[:]...)
	}
	slices.Sort(times)
	t.Logf("one more of 5,000, refused by an API server after: fastest %s, median %s, slowest %s", times[0], times[len(times)/2], times[len(times)-1])
	if median := times[len(times)/2]; median > inForce {
		t.Errorf("the median is %s", median)
	}
	for server := range shared.servers {
		if a := fine.do(t.Context(), server, renewal("soon")); a.code != 200 {
			t.Errorf("the node's new certificate: %s", a)
		}
	}
}

// An API server that starts accepts no request before it has the policies. Afterwards it refuses
// the certificates that were revoked before, and the one that was revoked while it was down. It
// refuses nobody else.
func TestAPIServerRestarts(t *testing.T) {
	const policies = 5
	ctx := t.Context()
	before, fine := newNode(t, "restart")
	filled := full(policies)
	filled[policies][0] = revoked(before)
	inForceFor(t, filled, "restart", before)
	admin := certificateOf(t, "somebody", "system:masters")
	server := shared.servers[1]
	harness.Must(t, server.Stop())
	meanwhile := nodeCertificate(t, "restart")
	filled[2] = slices.Clone(filled[2])
	filled[2][0] = revoked(meanwhile)
	harness.Must(t, fill(ctx, lists{2: filled[2]}))

	probing, stop := context.WithCancel(ctx)
	probes := map[string]*probe{
		"revoked before":    startProbe(probing, before, renewal("restart")),
		"revoked meanwhile": startProbe(probing, meanwhile, renewal("restart")),
		"node":              startProbe(probing, fine, renewal("restart")),
		"administrator":     startProbe(probing, admin, annotateNode("restart")),
	}
	began := time.Now()
	err := server.Start(ctx)
	ready := time.Since(began)
	time.Sleep(inForce) // the probes go on meanwhile
	stop()
	harness.Must(t, err)
	t.Logf("ready after %s", ready)
	for name, p := range probes {
		p.wait()
		t.Logf("%-17s %s", name, p.String())
		revoked := name == "revoked before" || name == "revoked meanwhile"
		if revoked && p.count[200] > 0 || p.count[422] > 0 {
			t.Errorf("%s: %s", name, p.String())
		}
		if revoked && p.refused == 0 || !revoked && (p.count[200] == 0 || p.refused > 0) {
			t.Errorf("%s, once it is ready: %s", name, p.String())
		}
	}
}

// probe sends a request again and again, several at a time, and counts the answers.
type probe struct {
	began time.Time
	group sync.WaitGroup

	mu      sync.Mutex
	count   map[int]int
	refused int
	// first is when the first answer of each kind came.
	first map[string]time.Duration
}

func startProbe(ctx context.Context, c *credential, what call) *probe {
	p := &probe{began: time.Now(), count: map[int]int{}, first: map[string]time.Duration{}}
	for range 3 {
		p.group.Go(func() {
			for ctx.Err() == nil {
				a := c.do(ctx, 1, what)
				if ctx.Err() != nil {
					return
				}
				p.add(a)
				if a.code == 0 {
					time.Sleep(5 * time.Millisecond) // nobody listens
				}
			}
		})
	}
	return p
}

func (p *probe) add(a answer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.count[a.code]++
	kind := fmt.Sprint(a.code)
	switch {
	case a.refused(attestation.MessageRevoked):
		p.refused++
		kind = "by policy"
	case a.code >= 400:
		kind = a.String()
	}
	if _, ok := p.first[kind]; !ok {
		p.first[kind] = time.Since(p.began)
	}
}

func (p *probe) wait() { p.group.Wait() }

func (p *probe) String() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return fmt.Sprintf("answers by code %v, %d refused by a policy; first of each after %v", p.count, p.refused, p.first)
}
