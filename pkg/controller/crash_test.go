// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"slices"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	csrstate "github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr/state"
)

// crashAfterWrite has a controller crash after its i-th write. It reports whether it got that far.
func (in *instance) crashAfterWrite(i int) (crashed func() bool) {
	n, dead := 0, false
	in.intercept = func(_ int, c call, run func() error) error {
		if dead {
			return errCrashed
		}
		err := run()
		if c.writes() {
			dead = n == i
			n++
		}
		if dead {
			return errCrashed
		}
		return err
	}
	return func() bool { return dead }
}

// eachCrash has a controller crash after each of its writes on some requests in turn, until it gets
// through. Then check goes on with the cluster that the controller left.
func eachCrash(t *testing.T, least int, file func(k *kit), check func(k *kit, w watching)) {
	t.Helper()
	for _, w := range consistencies {
		t.Run(w.String(), func(t *testing.T) {
			t.Parallel()
			for i, more := 0, true; more && !t.Failed(); i++ {
				inBubble(t, func(k *kit) {
					file(k)
					first := k.start(w)
					crashed := first.crashAfterWrite(i)
					for range 2 {
						for _, r := range k.server.requests() {
							_, _ = first.reconcile(r.Name) // it fails, or another one did
						}
					}
					more = crashed()
					first.stop()
					if w == stale {
						k.server.goOn()
					}
					if check(k, w); k.Failed() {
						k.Fatalf("crashed after write %d: %v", i, first.made())
					}
				})
				if !more && i < least {
					t.Errorf("%d writes only", i)
				}
			}
		})
	}
}

// A machine is suspended after a crash, or its record is deleted. Then a request that was approved,
// and was not published before, is never signed.
func TestCrashBeforeATurn(t *testing.T) {
	for name, turn := range map[string]func(k *kit, next *instance){
		"suspended": func(_ *kit, next *instance) { next.suspend("ek-1") },
		"record deleted": func(k *kit, _ *instance) {
			if err := k.server.Delete(k.ctx, k.record("worker-1")); err != nil {
				k.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			eachCrash(t, 5, func(k *kit) { k.pair("taken", "worker-1", "ek-1", asToken("worker-1")) }, func(k *kit, w watching) {
				before := k.get("taken")
				next := k.start(w)
				turn(k, next)
				next.settle()
				after := k.get("taken")
				switch {
				case csrstate.Of(before) == csrstate.Pending && name == "suspended":
					k.is("taken", "Denied/MachineSuspended")
				case csrstate.Of(before) == csrstate.Pending: // it starts over
				case string(after.Status.Certificate) != string(before.Status.Certificate), len(before.Status.Certificate) == 0 && !csrstate.Of(after).Finished():
					k.Errorf("%q, then %q, issued %t", reasonsOf(before), reasonsOf(after), len(after.Status.Certificate) > 0)
				}
			})
		})
	}
}

// After a crash, another proof of the same machine comes first. Never are both approved at a time:
// the kit's server checks that. In the end each has its certificate.
func TestCrashBetweenTwoProofs(t *testing.T) {
	eachCrash(t, 4, func(k *kit) {
		k.request("z", acmeSigner, "worker-1", asToken("worker-1"), document{Machine: "worker-1"})
	}, func(k *kit, w watching) {
		k.request("a", acmeSigner, "worker-1", asToken("worker-1"), document{Machine: "worker-1"})
		next := k.start(w)
		_, _ = next.reconcile("a")
		next.settle()
		if w == stale { // a request that waits believes the cache
			k.server.goOn()
			time.Sleep(time.Minute)
			next.settle()
		}
		for _, name := range []string{"a", "z"} {
			if len(k.is(name, "Approved/Attested").Status.Certificate) == 0 {
				k.Errorf("%s has no certificate", name)
			}
		}
	})
}

// Another signer issues. A crash while the certificate goes into the record, or before the hello is
// closed, leaves nothing undone, and the record has the certificate once.
func TestCrashAfterAnotherSignerIssued(t *testing.T) {
	eachCrash(t, 2, func(k *kit) {
		approveOnly(k)
		k.pair("theirs", "worker-1", "ek-1", asToken("worker-1"))
		k.start(unwatched).settle()
		k.issue("theirs", "system:node:worker-1")
	}, func(k *kit, w watching) {
		k.start(w).settle()
		k.is("theirs", "Approved/Attested")
		k.is("hello-theirs", "Denied/AttestationCompleted")
		if n := len(k.record("worker-1").Status.Certificates); n != 1 {
			k.Errorf("%d certificates are recorded", n)
		}
	})
}

// A rehearsal that a crash interrupts has its verdict in the end, and no condition.
func TestCrashDuringARehearsal(t *testing.T) {
	for _, audit := range []bool{false, true} {
		eachCrash(t, 2, func(k *kit) {
			k.config.Audit = audit
			k.request("a-hello", attestation.RehearsalHelloSignerName, "worker-1", asToken("worker-1"), document{EK: "ek-1"})
			k.request("proof", attestation.RehearsalSignerName, "worker-1", asToken("worker-1"), document{Hello: "a-hello"})
		}, func(k *kit, w watching) {
			next := k.start(w)
			next.once("a-hello")
			next.once("proof")
			k.is("a-hello", "")
			k.is("proof", "")
			if got := k.verdict("proof"); got.Reason != attestation.ReasonRehearsalPassed {
				k.Errorf("%v", got)
			}
		})
	}
}

// After a crash a controller starts in audit mode: it writes nothing.
func TestCrashBeforeAuditMode(t *testing.T) {
	eachCrash(t, 4, func(k *kit) { k.pair("audited", "worker-1", "ek-1", asToken("worker-1")) }, func(k *kit, w watching) {
		k.config.Audit = true
		next := k.start(w)
		next.settle()
		if slices.ContainsFunc(next.made(), call.writes) {
			k.Errorf("%v", next.made())
		}
	})
}

// The certificate is published, and the cache shows only the approval. This replica knows that, and
// awaits the event without a call. If the cache does not show the certificate a second later, it
// reads the request, as another replica does at once. Nothing is left to do, so the request does
// not come back then.
func TestApprovalIsSeenAfterThePublication(t *testing.T) {
	inBubble(t, func(k *kit) {
		in, other := k.start(inSync), k.start(inSync)
		name := k.pair("late", "worker-1", "ek-1", asToken("worker-1"))
		in.intercept = func(_ int, c call, run func() error) error {
			if c.String() == "patch "+requestsResource+"/status" {
				in.pin(name)
				other.pin(name)
			}
			return run()
		}
		in.once(name)
		published := k.get(name)
		if csrstate.Of(in.cached(name)) != csrstate.Approved || len(published.Status.Certificate) == 0 {
			k.Fatal("the cache does not lag")
		}
		in.counted()
		if result, calls := in.once(name), in.counted(); result.RequeueAfter != retryDelay || len(calls) > 0 {
			k.Errorf("it comes back after %s, and cost %v", result.RequeueAfter, calls)
		}
		for who, late := range map[string]*instance{"this replica": in, "another replica": other} {
			result, calls := late.once(name), late.counted()
			if result.RequeueAfter > 0 || calls["get "+requestsResource] == 0 {
				k.Errorf("%s: it comes back after %s, and cost %v", who, result.RequeueAfter, calls)
			}
		}
		if after := k.get(name); after.ResourceVersion != published.ResourceVersion {
			k.Errorf("it was changed: %+v", after.Status)
		}
	})
}
