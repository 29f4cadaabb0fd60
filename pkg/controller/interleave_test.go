// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// choices enumerates the ways through a run that asks choose at each fork.
type choices struct {
	taken, of []int
	next      int
}

// choose returns which of n ways to take.
func (c *choices) choose(n int) int {
	if c.next == len(c.taken) {
		c.taken, c.of = append(c.taken, 0), append(c.of, n)
	}
	c.next++
	return c.taken[c.next-1]
}

// more moves on to the next run, and reports false after the last.
func (c *choices) more() bool {
	c.next = 0
	for i := len(c.taken) - 1; i >= 0; i-- {
		if c.taken[i]+1 < c.of[i] {
			c.taken, c.of = c.taken[:i+1], c.of[:i+1]
			c.taken[i]++
			return true
		}
	}
	return false
}

// proofActor is a controller that decides once on a request, a step at a time.
type proofActor struct {
	*instance
	request string
	begun   bool
	// steps has a value for each step that may be made, made one for each that was made. The last
	// is false.
	steps chan struct{}
	made  chan bool
}

// newProofActor returns one whose steps end before its writes, or after them. So what it reads is
// as old as possible, or as new.
func newProofActor(in *instance, request string, before bool) *proofActor {
	a := &proofActor{instance: in, request: request, steps: make(chan struct{}), made: make(chan bool)}
	pause := func() {
		a.made <- true
		<-a.steps
	}
	in.intercept = func(_ int, c call, run func() error) error {
		if !c.writes() {
			return run()
		}
		if before {
			pause()
			return run()
		}
		err := run()
		pause()
		return err
	}
	return a
}

// step makes the next step, and reports whether there is another.
func (a *proofActor) step() bool {
	if !a.begun {
		a.begun = true
		go func() {
			_, _ = a.reconcile(a.request) // where it failed, settle tries again
			a.made <- false
		}()
	} else {
		a.steps <- struct{}{}
	}
	return <-a.made
}

// interleave runs a test with each order of the steps of two actors that are alike: so the first
// step is always a's.
func interleave(t *testing.T, prepare func(k *kit) (a, b *proofActor), check func(k *kit, a, b *proofActor)) {
	t.Helper()
	runs := 0
	for c := (&choices{}); ; {
		runs++
		inBubble(t, func(k *kit) {
			a, b := prepare(k)
			running := []*proofActor{a, b}
			for len(running) > 0 {
				i := 0
				if len(running) > 1 && a.begun {
					i = c.choose(2)
				}
				if !running[i].step() {
					running = append(running[:i:i], running[i+1:]...)
				}
			}
			a.intercept, b.intercept = nil, nil
			check(k, a, b)
			if k.Failed() {
				k.Fatalf("in the order %v: %v, %v", c.taken, a.calls, b.calls)
			}
		})
		if t.Failed() || !c.more() {
			break
		}
	}
	if runs < 9 {
		t.Errorf("there were %d orders only", runs)
	}
}

// eachWay runs a test for each consistency of two controllers and each kind of steps.
func eachWay(t *testing.T, test func(t *testing.T, w watching, before bool)) {
	for _, w := range []watching{inSync, unwatched} {
		for _, before := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/steps end before writes %t", w, before), func(t *testing.T) {
				t.Parallel()
				test(t, w, before)
			})
		}
	}
}

// Two controllers decide on two proofs of one machine, in each order of their writes. Never are
// both approved at a time, nor one by a record that names the other: the kit's server checks that.
// In the end each has its certificate.
func TestTwoProofsOfOneMachine(t *testing.T) {
	for name, enrolled := range map[string]bool{"first": false, "again": true} {
		t.Run(name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, w watching, before bool) {
				interleave(t, func(k *kit) (a, b *proofActor) {
					first, second := k.start(w), k.start(w)
					if enrolled {
						k.attested("worker-1", "")
					}
					for _, request := range []string{"a", "b"} {
						k.request(request, acmeSigner, "worker-1", asToken("worker-1"), document{Machine: "worker-1"})
					}
					return newProofActor(first, "a", before), newProofActor(second, "b", before)
				}, func(k *kit, a, b *proofActor) {
					a.settle()
					b.settle()
					for _, name := range []string{"a", "b"} {
						if request := k.is(name, "Approved/Attested"); len(request.Status.Certificate) == 0 {
							k.Errorf("%s has no certificate", name)
						}
					}
					if n := len(k.record("worker-1").Status.Certificates); enrolled && n != 3 || !enrolled && n != 2 {
						k.Errorf("%d certificates are recorded", n)
					}
				})
			})
		})
	}
}

// The certificate of a proof is in the record, and its publication fails once. Another proof of the
// machine waits until it is published. Nothing fails.
func TestProofWaitsForAPublication(t *testing.T) {
	for _, w := range consistencies {
		inBubble(t, func(k *kit) {
			in := k.start(w)
			for _, request := range []string{"a", "b"} {
				k.request(request, acmeSigner, "worker-1", asToken("worker-1"), document{Machine: "worker-1"})
			}
			in.intercept = func(_ int, c call, run func() error) error {
				if c.String() == "patch certificatesigningrequests/status" {
					return apierrors.NewTimeoutError("injected", 1)
				}
				return run()
			}
			_, _ = in.reconcile("a")
			in.intercept = nil
			if len(k.record("worker-1").Status.Certificates) != 1 || len(k.get("a").Status.Certificate) > 0 {
				k.Fatal("the certificate is not in the record alone")
			}
			_, _ = in.reconcile("b")
			in.settle()
			for _, name := range []string{"a", "b"} {
				if request := k.is(name, "Approved/Attested"); len(request.Status.Certificate) == 0 {
					k.Errorf("%s has no certificate", name)
				}
			}
		})
	}
}

// Two controllers know different machines of one node name, as while an inventory changes. At most
// one of the machines gets a certificate for the name.
func TestTwoMachinesOfOneName(t *testing.T) {
	eachWay(t, func(t *testing.T, w watching, before bool) {
		interleave(t, func(k *kit) (a, b *proofActor) {
			known := func(name string) *instance {
				m := machineNamed(name)
				m.Names[0].Value = "worker-1"
				source := &machineList{tokens: k.machines.tokens}
				source.set(m)
				source.tokens[tokenFor(name)] = verifier.Token{Known: true, Machine: m.Ref}
				k.config.Machines = source
				k.request("of-"+name, acmeSigner, "worker-1", asToken(name), document{Machine: name})
				return k.start(w)
			}
			return newProofActor(known("old"), "of-old", before), newProofActor(known("new"), "of-new", before)
		}, func(k *kit, a, b *proofActor) {
			a.settle()
			b.settle()
			approvals := 0
			for _, name := range []string{"of-old", "of-new"} {
				for _, c := range k.get(name).Status.Conditions {
					if c.Type == certificatesv1.CertificateApproved {
						approvals++
					}
				}
			}
			if approvals > 1 {
				k.Errorf("both machines are worker-1: %q and %q", reasonsOf(k.get("of-old")), reasonsOf(k.get("of-new")))
			}
		})
	})
}
