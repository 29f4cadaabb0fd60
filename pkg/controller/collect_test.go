// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/act"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/collect"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/records"
	csrstate "github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr/state"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// pin has the cache keep the version of a request that it has now.
func (in *instance) pin(name string) {
	in.k.Helper()
	in.cache.stale[name] = in.cached(name)
}

// dropped has the cache hold a request without its content, as its requester's budget is used up.
func (in *instance) dropped(name string) {
	in.k.Helper()
	requester := in.k.get(name).Spec.Username
	for size := 16 << 20; size > 0; size /= 2 {
		in.cache.requests.Budget.Reserve(requester, size)
	}
	in.pin(name)
	if !in.intake.IsDropped(in.cached(name)) {
		in.k.Fatal("the cache has its content")
	}
}

// A request of which the cache dropped the content is read again, if it is still the same and
// pending.
func TestDroppedRequestsAreReadAgain(t *testing.T) {
	file := func(k *kit) *certificatesv1.CertificateSigningRequest {
		return k.request("hello", attestation.HelloSignerName, "worker-1", asToken("worker-1"), document{EK: "ek-1"})
	}
	for name, c := range map[string]struct {
		meanwhile  func(k *kit, request *certificatesv1.CertificateSigningRequest)
		challenged bool
	}{
		// The event of that is dropped: see onlyAnnotated.
		"annotated meanwhile": {func(k *kit, _ *certificatesv1.CertificateSigningRequest) {
			k.annotate("hello", "example.com/note", "x")
		}, false},
		"the same": {func(*kit, *certificatesv1.CertificateSigningRequest) {}, true},
		"denied meanwhile": {func(k *kit, _ *certificatesv1.CertificateSigningRequest) {
			k.condition("hello", certificatesv1.CertificateDenied, "ByHand")
		}, false},
		"gone": {func(k *kit, request *certificatesv1.CertificateSigningRequest) {
			if err := k.server.Delete(k.ctx, request); err != nil {
				k.Fatal(err)
			}
		}, false},
		"another one of its name": {func(k *kit, request *certificatesv1.CertificateSigningRequest) {
			if err := k.server.Delete(k.ctx, request); err != nil {
				k.Fatal(err)
			}
			request.ResourceVersion, request.UID = "", "another"
			if err := k.server.Create(k.ctx, request); err != nil {
				k.Fatal(err)
			}
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(k *kit) {
				in := k.start(inSync)
				request := file(k)
				in.dropped("hello")
				c.meanwhile(k, request.DeepCopy())
				if result := in.once("hello"); result.RequeueAfter == 0 && !c.challenged {
					k.Errorf("nobody looks at it again: %+v", result)
				}
				after := &certificatesv1.CertificateSigningRequest{}
				err := k.server.Get(k.ctx, client.ObjectKey{Name: "hello"}, after)
				if (err == nil && after.Annotations[attestation.AnnotationChallenge] != "") != c.challenged {
					k.Errorf("%v, %v", after.Annotations, err)
				}
				if calls := in.counted(); calls["get certificatesigningrequests"] != 1 {
					k.Errorf("%v", calls)
				}
			})
		})
	}
}

// Where the request cannot be read again, that is an error, and it is decided on later.
func TestDroppedRequestThatCannotBeRead(t *testing.T) {
	inBubble(t, func(k *kit) {
		in := k.start(inSync)
		k.request("hello", attestation.HelloSignerName, "worker-1", asToken("worker-1"), document{EK: "ek-1"})
		in.dropped("hello")
		in.intercept = func(_ int, c call, _ func() error) error { return answers["timeout"](c) }
		if _, err := in.reconcile("hello"); err == nil {
			k.Error("no error")
		}
		k.is("hello", "")
	})
}

// A request that is gone, or never was ours, leaves nothing behind.
func TestRequestsThatAreGone(t *testing.T) {
	inBubble(t, func(k *kit) {
		in := k.start(inSync)
		hello := k.request("hello", attestation.HelloSignerName, "late", asToken("late"), document{EK: "ek-late"})
		in.once("hello")
		if in.retries.Len() != 1 {
			k.Fatal("it does not wait")
		}
		if err := k.server.Delete(k.ctx, hello); err != nil {
			k.Fatal(err)
		}
		in.once("hello")
		if in.retries.Len() != 0 {
			k.Error("what is gone is remembered")
		}
		k.plain("other", "example.com/other", "worker-1", asToken("worker-1"))
		in.once("other")
		k.is("other", "")
	})
}

// The cache has an approved proof, whose name another signer's request has taken since.
func TestAnotherRequestTookTheName(t *testing.T) {
	inBubble(t, func(k *kit) {
		in := k.start(inSync)
		proof := k.pair("r", "worker-1", "ek-1", asToken("worker-1"))
		k.condition(proof, certificatesv1.CertificateApproved, "ByHand")
		in.pin(proof)
		if err := k.server.Delete(k.ctx, k.get(proof)); err != nil {
			k.Fatal(err)
		}
		k.plain("r", "example.com/other", "worker-1", asToken("worker-1"))
		k.condition("r", certificatesv1.CertificateApproved, "ByHand")
		if result := in.once("r"); result.RequeueAfter != 0 {
			k.Errorf("%+v", result)
		}
		k.is("r", "Approved/ByHand")
	})
}

// Each source that a decision needs fails: nothing is decided, and all is decided once it is back.
func TestSourcesThatFail(t *testing.T) {
	away := errors.New("away")
	for name, c := range map[string]struct {
		fail func(k *kit, err error)
		// waits says that the request waits, where it is an error otherwise.
		waits bool
	}{
		"machines": {func(k *kit, err error) { k.machines.fail(err) }, false},
		"the CA":   {func(k *kit, err error) { k.ca.leave(err) }, true},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(k *kit) {
				in := k.start(inSync)
				proof := k.pair("proof", "worker-1", "ek-1", asToken("worker-1"))
				c.fail(k, away)
				result, err := in.reconcile(proof)
				if c.waits != (err == nil && result.RequeueAfter > 0) || err != nil && !errors.Is(err, away) {
					k.Errorf("%+v, %v", result, err)
				}
				k.is(proof, "")
				c.fail(k, nil)
				in.once(proof)
				if len(k.is(proof, "Approved/Attested").Status.Certificate) == 0 {
					k.Error("it is not issued")
				}
			})
		})
	}
}

// The CA is gone between the decision and the signature: the request stays approved, and is signed
// later.
func TestCAIsGoneBeforeTheSignature(t *testing.T) {
	for name, file := range map[string]func(k *kit) string{
		"client":  func(k *kit) string { return k.pair("r", "worker-1", "ek-1", asToken("worker-1")) },
		"serving": func(k *kit) string { return k.serving("r", oursToServe, "worker-1", asNode("worker-1")).Name },
	} {
		inBubble(t, func(k *kit) {
			k.machines.list[0].Addresses = servingAddresses
			in := k.start(inSync)
			if name == "serving" {
				k.attested("worker-1", "ek-1")
			}
			request := file(k)
			in.intercept = func(_ int, c call, run func() error) error {
				err := run()
				if c.resource == requestsResource+"/approval" {
					k.ca.leave(errors.New("away"))
				}
				return err
			}
			_, _ = in.reconcile(request)
			in.intercept = nil
			if got := k.get(request); csrstate.Of(got) != csrstate.Approved {
				k.Errorf("%s: %q", name, reasonsOf(got))
			}
			k.ca.leave(nil)
			in.settle()
			if len(k.get(request).Status.Certificate) == 0 {
				k.Errorf("%s: it is not issued", name)
			}
		})
	}
}

// A proof waits while another one of its machine is approved and not issued. Once that one is gone
// or refused, it passes.
func TestProofWaitsForAnother(t *testing.T) {
	for name, end := range map[string]func(k *kit){
		"gone": func(k *kit) {
			if err := k.server.Delete(k.ctx, k.get("a")); err != nil {
				k.Fatal(err)
			}
		},
		"replaced by another of its name": func(k *kit) {
			if err := k.server.Delete(k.ctx, k.get("a")); err != nil {
				k.Fatal(err)
			}
			k.plain("a", "example.com/other", "worker-1", asToken("worker-1"))
			request := k.get("a")
			request.UID = "another"
			if err := k.server.Update(k.ctx, request); err != nil {
				k.Fatal(err)
			}
		},
		"failed": func(k *kit) { k.condition("a", certificatesv1.CertificateFailed, "ByHand") },
	} {
		inBubble(t, func(k *kit) {
			in := k.start(inSync)
			k.pair("a", "worker-1", "ek-1", asToken("worker-1"))
			k.pair("b", "worker-1", "ek-1", asToken("worker-1"))
			in.intercept = func(_ int, c call, run func() error) error {
				if c.verb == "update" { // the certificate cannot be recorded
					return answers["timeout"](c)
				}
				return run()
			}
			_, _ = in.reconcile("a")
			in.intercept = nil
			in.once("b")
			k.is("a", "Approved/Attested")
			k.is("b", "")
			if events := k.journal.eventsOf(string(verifier.ReasonRequestPending)); len(events) != 1 {
				k.Errorf("%s: %q", name, events)
			}
			end(k)
			in.once("b")
			if len(k.is("b", "Approved/Attested").Status.Certificate) == 0 {
				k.Errorf("%s: b is not issued", name)
			}
		})
	}
}

// The proof that came first is approved for another signer, which has issued: its certificate is to
// be noted before the next proof passes.
func TestProofWaitsForAnotherSigner(t *testing.T) {
	inBubble(t, func(k *kit) {
		approveOnly(k)
		in := k.start(inSync)
		k.pair("a", "worker-1", "ek-1", asToken("worker-1"))
		k.pair("b", "worker-1", "ek-1", asToken("worker-1"))
		in.once("a")
		k.issue("a", "system:node:worker-1")
		in.once("b")
		k.is("b", "")
		in.once("a") // notes it, and closes the hello
		k.is("hello-a", "Denied/"+string(act.ReasonCompleted))
		record := k.record("worker-1")
		if !records.HasCertificateFor(record, k.get("a").UID) {
			k.Errorf("%+v", record.Status)
		}
		in.counted()
		in.once("a")
		if calls := in.counted(); calls["update nodeattestations"] > 0 {
			k.Errorf("it is noted twice: %v", calls)
		}
		in.once("b")
		k.is("b", "Approved/Attested")
	})
}

// What another signer never issues fails at its deadline, and is looked at until then.
func TestApprovedRequestThatNobodyIssues(t *testing.T) {
	inBubble(t, func(k *kit) {
		approveOnly(k)
		in := k.start(inSync)
		proof := k.pair("a", "worker-1", "ek-1", asToken("worker-1"))
		in.once(proof)
		result := in.once(proof)
		if left := verifier.DefaultWaitDeadline; result.RequeueAfter > left || result.RequeueAfter < left-time.Minute {
			k.Errorf("it comes back after %s", result.RequeueAfter)
		}
		time.Sleep(result.RequeueAfter)
		in.once(proof)
		k.is(proof, "Approved/Attested Failed/"+string(verifier.ReasonSignerUnavailable))
	})
}

// A Machine may refer to the Node of another machine: that record counts, too. Without it the
// machine would seem to have had a Node.
func TestRecordOfTheNodeThatAMachineRefersTo(t *testing.T) {
	inBubble(t, func(k *kit) {
		k.policy.TrustOnFirstUse = true
		k.config.TrustUnnamed = true
		fresh := machineNamed("fresh")
		fresh.ProviderID, fresh.NodeRef = "acme://fresh", "worker-2"
		k.machine(fresh)
		in := k.start(unwatched)
		k.attested("worker-2", "ek-2")
		k.tpm.vouched = true
		k.providerIDs["fresh"] = "acme://fresh"
		proof := k.pair("proof", "fresh", "ek-fresh", asToken("fresh"))
		in.settle()
		if len(k.is(proof, "Approved/Attested").Status.Certificate) == 0 {
			k.Error("it is not issued")
		}
	})
}

// Without TrustUnnamed, or for a token that is not known, trust on first use vouches for no EK.
func TestTrustOnFirstUseVouches(t *testing.T) {
	for name, c := range map[string]struct {
		change func(k *kit)
		want   string
	}{
		"trusted":     {func(*kit) {}, "Challenge"},
		"not trusted": {func(k *kit) { k.config.TrustUnnamed = false }, "Wait"},
		"a token that is not known": {func(k *kit) {
			k.machines.tokens = map[string]verifier.Token{}
		}, "Wait"},
		"the machine has a record": {func(k *kit) { k.attested("fresh", "ek-other") }, "Deny"},
	} {
		inBubble(t, func(k *kit) {
			k.policy.TrustOnFirstUse = true
			k.config.TrustUnnamed = true
			k.tpm.vouched = true
			fresh := machineNamed("fresh")
			fresh.ProviderID = "acme://fresh"
			k.machine(fresh)
			c.change(k)
			in := k.start(unwatched)
			k.providerIDs["fresh"] = "acme://fresh"
			in.once(k.request("hello", attestation.HelloSignerName, "fresh", asToken("fresh"), document{EK: "ek-fresh"}).Name)
			if got := k.journal.outcomes(); got != c.want {
				k.Errorf("%s: %s", name, got)
			}
		})
	}
}

// Records of machines that are gone keep the next machine waiting, where machines own their
// records.
func TestRecordsOfMachinesThatAreGone(t *testing.T) {
	inBubble(t, func(k *kit) {
		k.config.Owned = &records.Owned{
			Source: "cluster-api", Cluster: testCluster, Labels: map[string]string{"l": "v"},
			Owner: func(m verifier.MachineRef) (metav1.OwnerReference, error) {
				return metav1.OwnerReference{APIVersion: "v1", Kind: "Machine", Name: m.Name, UID: "of-worker-1"}, nil
			},
		}
		in := k.start(inSync)
		former := k.attested("former", "ek-1")
		proof := k.pair("proof", "worker-1", "ek-1", asToken("worker-1"))
		in.once(proof)
		k.is(proof, "")
		if err := k.server.Delete(k.ctx, former); err != nil {
			k.Fatal(err)
		}
		in.once(proof)
		k.is(proof, "Approved/Attested")
		if record := k.record("worker-1"); len(record.OwnerReferences) != 1 || record.Labels["l"] != "v" || record.Spec.Machine.Source != "cluster-api" {
			k.Errorf("%+v", record)
		}
	})
}

// A record of that name that is another cluster's stays: the request is denied at its deadline, and
// not before.
func TestRecordOfAnotherCluster(t *testing.T) {
	inBubble(t, func(k *kit) {
		k.config.Owned = &records.Owned{
			Source: "cluster-api", Cluster: testCluster,
			Owner: func(m verifier.MachineRef) (metav1.OwnerReference, error) {
				return metav1.OwnerReference{APIVersion: "v1", Kind: "Machine", Name: m.Name, UID: "of-worker-1"}, nil
			},
		}
		in := k.start(unwatched)
		foreign := k.attested("other", "ek-other")
		foreign.Name, foreign.UID, foreign.ResourceVersion, foreign.Spec.Cluster = "worker-1", "", "", "another"
		if err := k.server.Create(k.ctx, foreign); err != nil {
			k.Fatal(err)
		}
		proof := k.pair("proof", "worker-1", "ek-1", asToken("worker-1"))
		if result := in.once(proof); result.RequeueAfter != retryDelay {
			k.Errorf("%+v", result)
		}
		k.is(proof, "")
		time.Sleep(verifier.DefaultWaitDeadline)
		in.once(proof)
		k.is(proof, "Denied/"+string(verifier.ReasonIdentityBound))
	})
}

// A machine over its rate waits, and is never denied for it. An approval that the server refused
// does not count.
func TestRateOfAMachine(t *testing.T) {
	inBubble(t, func(k *kit) {
		k.config.Rates = fairqueue.DefaultRates()
		k.config.Rates.Machine = fairqueue.Rate{Every: time.Hour, Burst: 1}
		in := k.start(inSync)
		first := k.pair("first", "worker-1", "ek-1", asToken("worker-1"))
		in.intercept = func(_ int, c call, run func() error) error {
			if c.resource == requestsResource+"/approval" {
				return answers["timeout"](c)
			}
			return run()
		}
		if _, err := in.reconcile(first); err == nil {
			k.Fatal("no error")
		}
		in.intercept = nil
		in.once(first)
		k.is(first, "Approved/Attested")
		second := k.pair("second", "worker-1", "ek-1", asToken("worker-1"))
		for range 3 {
			in.once(second)
			k.is(second, "")
			time.Sleep(verifier.DefaultWaitDeadline + time.Second)
		}
		in.once(second)
		k.is(second, "Approved/Attested")
		if events := k.journal.eventsOf(string(verifier.ReasonRateLimited)); len(events) != 1 || !strings.Contains(events[0], "second") {
			k.Errorf("%q", events)
		}
	})
}

// A certificate outlives neither the operator's limit nor that of a machine which is being deleted.
func TestLifetimes(t *testing.T) {
	inBubble(t, func(k *kit) {
		in := k.start(inSync)
		k.attested("worker-1", "ek-1")
		proof := k.pair("proof", "worker-1", "ek-1", asNode("worker-1"))
		k.machines.list[0].Deleted = time.Now()
		in.once(proof)
		certificates := k.record("worker-1").Status.Certificates
		if left := time.Until(certificates[len(certificates)-1].NotAfter.Time); left > time.Hour || left < time.Minute {
			k.Errorf("the certificate lives for %s", left)
		}
	})
}

// An outcome that the rules do not have, and a challenge by a provider of one round, are errors.
func TestMistakesOfTheProgram(t *testing.T) {
	inBubble(t, func(k *kit) {
		in := k.start(inSync)
		request := k.request("r", acmeSigner, "worker-1", asToken("worker-1"), document{})
		s := &collect.Inputs{Provider: in.providers["acme"], Input: verifier.Input{Request: request}}
		for _, outcome := range []verifier.Outcome{0, 99, verifier.Challenge} {
			if _, err := in.actor.CarryOut(k.ctx, s, verifier.Decision{Outcome: outcome}); err == nil {
				k.Errorf("%v is carried out", outcome)
			}
		}
		if len(in.made()) > 0 {
			k.Errorf("%v", in.made())
		}
	})
}
