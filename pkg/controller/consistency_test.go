// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// The API calls for a machine's certificate, with a cache in sync. They are counted for the hello,
// and for the proof until the hello is closed.
func TestCallsOfACertificate(t *testing.T) {
	want := map[string][]string{
		"first, hello": {"patch certificatesigningrequests"},
		"first, proof": {
			"create nodeattestations", "get nodes", "patch certificatesigningrequests/approval", "patch certificatesigningrequests/approval",
			"patch certificatesigningrequests/status", "update nodeattestations",
		},
		"renewal, hello": {"patch certificatesigningrequests"},
		"renewal, proof": {
			"patch certificatesigningrequests/approval", "patch certificatesigningrequests/approval",
			"patch certificatesigningrequests/status", "update nodeattestations", "update nodeattestations",
		},
	}
	for class, username := range map[string]string{"first": asToken("worker-1"), "renewal": asNode("worker-1")} {
		inBubble(t, func(k *kit) {
			in := k.start(inSync)
			if class == "renewal" {
				k.attested("worker-1", "ek-1")
				k.node("worker-1")
			}
			check := func(request string) {
				var got []string
				for _, c := range in.made() {
					got = append(got, c.String())
				}
				slices.Sort(got)
				if name := class + ", " + request; !slices.Equal(got, want[name]) {
					k.Errorf("%s:\n%s\nwant\n%s", name, strings.Join(got, "\n"), strings.Join(want[name], "\n"))
				}
				in.counted()
			}
			k.request("hello", attestation.HelloSignerName, "worker-1", username, document{EK: "ek-1"})
			in.settle()
			check("hello")
			proof := k.request("proof", tpmSigner, "worker-1", username, document{Hello: "hello"})
			in.settle()
			check("proof")
			if len(k.get(proof.Name).Status.Certificate) == 0 {
				k.Error("it is not issued")
			}
		})
	}
}

// A request that waits goes on waiting without a call, and without a look at its evidence for a
// minute. Once its machine is there, it is decided on at once.
func TestWaitingCostsNothing(t *testing.T) {
	inBubble(t, func(k *kit) {
		in := k.start(inSync)
		hello := k.request("hello", attestation.HelloSignerName, "late", asToken("late"), document{EK: "ek-late"}).Name
		in.once(hello)
		judgedOnce := k.tpm.count()
		in.counted()
		for range 30 {
			if result := in.once(hello); result.RequeueAfter <= 0 || result.RequeueAfter > 15*time.Second {
				k.Fatalf("%+v", result)
			}
			time.Sleep(time.Second)
		}
		if calls := in.counted(); len(calls) > 0 || k.tpm.count() != judgedOnce {
			k.Errorf("%v, %d looks at the evidence", calls, k.tpm.count()-judgedOnce)
		}
		time.Sleep(time.Minute) // what is remembered is too old
		in.once(hello)
		if k.tpm.count() != judgedOnce+1 {
			k.Errorf("%d looks at the evidence after a minute", k.tpm.count()-judgedOnce)
		}
		if lines := k.journal.linesWith("decided"); len(lines) != 1 {
			k.Errorf("reported %d times: %q", len(lines), lines)
		}
		k.machine(machineNamed("late", "ek-late"))
		in.once(hello)
		if k.get(hello).Annotations[attestation.AnnotationChallenge] == "" {
			k.Error("the machine is known, and the hello is not challenged")
		}
	})
}

// Remembered evidence does not count once what it was judged by has changed: the hello, and whether
// something names the EK.
func TestRememberedEvidenceIsOfTheSameQuestion(t *testing.T) {
	inBubble(t, func(k *kit) {
		k.tpm.vouched = true
		in := k.start(inSync)
		hello := k.request("hello", attestation.HelloSignerName, "late", asToken("late"), document{EK: "ek-late"})
		in.once(hello.Name) // nothing vouches for the EK
		before := k.tpm.count()
		k.machine(machineNamed("late", "ek-late"))
		in.once(hello.Name)
		if k.tpm.count() == before || k.get(hello.Name).Annotations[attestation.AnnotationChallenge] == "" {
			k.Error("the EK is named, and the old judgement counts")
		}
	})
	inBubble(t, func(k *kit) {
		in := k.start(inSync)
		proof := k.request("proof", tpmSigner, "worker-1", asToken("worker-1"), document{Hello: "hello"}).Name
		in.once(proof) // its hello is not there
		if got := k.journal.outcomes(); got != "Wait" {
			k.Fatal(got)
		}
		k.challenged(k.request("hello", attestation.HelloSignerName, "worker-1", asToken("worker-1"), document{EK: "ek-1"}))
		in.once(proof)
		if len(k.get(proof).Status.Certificate) == 0 {
			k.Errorf("the hello is there: %s", k.journal.outcomes())
		}
	})
}

// Evidence that could not be judged is judged again each time. The cause is in the log alone.
func TestUnavailableEvidenceIsNotRemembered(t *testing.T) {
	inBubble(t, func(k *kit) {
		in := k.start(unwatched)
		hello := k.request("hello", attestation.HelloSignerName, "worker-1", asToken("worker-1"), document{EK: "ek-1", Unavailable: true}).Name
		for i := range 3 {
			in.once(hello)
			if k.tpm.count() < i+1 {
				k.Errorf("%d looks at the evidence, after %d decisions", k.tpm.count(), i+1)
			}
		}
		cause := "a source of the evidence does not answer"
		if len(k.journal.linesWith(cause)) == 0 {
			k.Error("the cause is not in the log")
		}
		for _, event := range k.journal.eventsOf(string(verifier.ReasonAttestationUnavailable)) {
			if strings.Contains(event, cause) {
				k.Errorf("the node learns why: %s", event)
			}
		}
		k.is(hello, "")
	})
}

// A hello that contradicts is denied without a look at its evidence, unless it has been waiting or
// its time is over.
func TestContradictingHellosCostNoSignatures(t *testing.T) {
	contradicts := func(k *kit) string {
		return k.request("hello", attestation.HelloSignerName, "worker-2", asToken("worker-1"), document{EK: "ek-1"}).Name
	}
	for name, c := range map[string]struct {
		before func(k *kit, in *instance)
		w      watching
		judged int
	}{
		"at once":              {func(*kit, *instance) {}, inSync, 0},
		"the cache is missing": {func(*kit, *instance) {}, unwatched, 1},
		"overdue":              {func(*kit, *instance) { time.Sleep(verifier.DefaultWaitDeadline) }, inSync, 1},
		"waiting": {func(k *kit, in *instance) {
			k.machines.set()
			in.once("hello")
			k.machines.set(machineNamed("worker-1", "ek-1"), machineNamed("worker-2", "ek-2"))
		}, inSync, 2},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(k *kit) {
				in := k.start(c.w)
				hello := contradicts(k)
				c.before(k, in)
				in.once(hello)
				k.is(hello, "Denied/NodeNameMismatch")
				if got := k.tpm.count(); got != c.judged {
					k.Errorf("%d looks at the evidence, want %d", got, c.judged)
				}
			})
		})
	}
}

// lists counts the lists of records.
func (in *instance) lists() int { return in.counted()["list nodeattestations"] }

// What a cache that lacks a write is good for. A hello is denied by it, and its node asks again. A
// proof is not, and neither gets anything by what is no more.
func TestStaleCache(t *testing.T) {
	inBubble(t, func(k *kit) {
		in := k.start(inSync)
		other := k.attested("former", "ek-former")
		other.Spec.NodeName = "worker-1"
		if err := k.server.Delete(k.ctx, other); err != nil {
			k.Fatal(err)
		}
		other.UID, other.ResourceVersion = "", ""
		if err := k.server.Create(k.ctx, other); err != nil {
			k.Fatal(err)
		}
		in.once("none") // the cache has it
		k.server.hang()
		if err := k.server.Delete(k.ctx, other); err != nil {
			k.Fatal(err)
		}
		hello := k.request("hello-1", attestation.HelloSignerName, "worker-1", asToken("worker-1"), document{EK: "ek-1"}).Name
		in.once(hello)
		k.is(hello, "Denied/AmbiguousName")
		proof := k.pair("proof", "worker-1", "ek-1", asToken("worker-1"))
		in.counted()
		in.once(proof)
		if len(k.is(proof, "Approved/Attested").Status.Certificate) == 0 || in.lists() == 0 {
			k.Error("a proof was decided on by the cache")
		}
		k.server.goOn()
	})
	inBubble(t, func(k *kit) { // the other way round: the cache lacks the record of another machine
		in := k.start(stale)
		other := k.attested("other", "ek-other")
		if err := k.server.Delete(k.ctx, other); err != nil {
			k.Fatal(err)
		}
		other.Spec.NodeName, other.UID, other.ResourceVersion = "worker-1", "", ""
		if err := k.server.Create(k.ctx, other); err != nil {
			k.Fatal(err)
		}
		proof := k.pair("proof", "worker-1", "ek-1", asToken("worker-1"))
		in.settle()
		if got := reasonsOf(k.get(proof)); strings.Contains(got, "Approved") || got == "" {
			k.Errorf("it is %q", got)
		}
	})
}

// After an own write that the cache did not show in time, proofs are decided on live for ten
// seconds.
func TestCacheThatDoesNotKeepUp(t *testing.T) {
	inBubble(t, func(k *kit) {
		in := k.start(stale)
		for i, c := range []struct {
			after time.Duration
			live  bool
		}{{0, false}, {0, true}, {11 * time.Second, false}} {
			time.Sleep(c.after)
			machine := fmt.Sprintf("m-%d", i)
			k.machine(machineNamed(machine, "ek-"+machine))
			if i == 2 {
				k.server.goOn()
			}
			proof := k.pair("proof-"+machine, machine, "ek-"+machine, asToken(machine))
			calls := 0
			in.intercept = func(_ int, c call, run func() error) error {
				if c.String() == "list nodeattestations" {
					calls++
				}
				if c.verb == "create" && calls > 0 != (i == 1) {
					k.Errorf("%d: %d lists before the record is written", i, calls)
				}
				return run()
			}
			in.once(proof)
			if len(k.get(proof).Status.Certificate) == 0 {
				k.Errorf("%d: it is not issued", i)
			}
		}
	})
}

// In audit mode nothing is written, for any outcome, and each decision is reported.
func TestAuditWritesNothing(t *testing.T) {
	for name, s := range scenarios {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inBubble(t, func(k *kit) {
				k.config.Audit = true
				in, request := s.run(k, inSync, nil)
				if i := slices.IndexFunc(in.made(), call.writes); i >= 0 {
					k.Errorf("%s", in.made()[i])
				}
				first, _, _ := strings.Cut(s.decided, " ")
				got, _, _ := strings.Cut(k.journal.outcomes(), " ")
				if got != first {
					k.Errorf("decided %q on %s, want %q", got, request, first)
				}
			})
		})
	}
}
