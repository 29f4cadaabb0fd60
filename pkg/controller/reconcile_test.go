// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/act"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/records"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// scenario is a request that is decided on in one way.
type scenario struct {
	// configure changes the kit before the controller starts. Optional.
	configure func(k *kit)
	// file files the request, and returns its name.
	file func(k *kit) string
	// decided are the outcomes that are reported, without failures.
	decided string
	// stale are those where the cache of records is stale. Default: the same.
	stale string
	// conditions are those of the request in the end.
	conditions string
	// issued says that it has a certificate in the end, recorded that the record names it, and
	// challenged that it has a challenge.
	issued, recorded, challenged bool
	// waits is the reason that its annotation has in the end.
	waits verifier.Reason
	// untouched says that nothing is written.
	untouched bool
	// alike says that the calls are those of another scenario, so that they need not fail again.
	alike bool
}

func approveOnly(k *kit) { k.config.CA = nil }

// scenarios has each outcome of the rules.
var scenarios = map[string]scenario{
	"Ignore": {
		file: func(k *kit) string {
			return k.serving("ignored", servingSigner, "left-alone", asNode("left-alone")).Name
		},
		untouched: true,
	},
	"Ignore, approved for another signer": {
		configure: approveOnly,
		file: func(k *kit) string {
			name := k.pair("signed-elsewhere", "worker-1", "ek-1", asToken("worker-1"))
			k.condition(name, certificatesv1.CertificateApproved, string(act.ReasonApproved))
			record := k.attested("worker-1", "ek-1")
			records.SetGrant(record, verifier.Record{
				Cluster: testCluster, Provider: "tpm", NodeName: "worker-1", EK: "ek-1", ProofSHA256: "s", FirstProofUID: "f",
			}, k.get(name), nil, time.Now())
			if err := k.server.Update(k.ctx, record); err != nil {
				k.Fatal(err)
			}
			return name
		},
		conditions: "Approved/Attested", recorded: true, untouched: true,
	},
	"Wait": {
		file: func(k *kit) string {
			return k.request("waits", attestation.HelloSignerName, "worker-9", asToken("worker-9"), document{EK: "ek-9"}).Name
		},
		decided: "Wait", waits: verifier.ReasonMachineNotFound,
	},
	"Deny, of a hello": {
		file: func(k *kit) string {
			return k.request("contradicts", attestation.HelloSignerName, "worker-2", asToken("worker-1"), document{EK: "ek-1"}).Name
		},
		decided: "Deny", conditions: "Denied/NodeNameMismatch",
	},
	"Deny, of a proof": {
		file: func(k *kit) string {
			k.challenged(k.request("hello", attestation.HelloSignerName, "worker-1", asToken("worker-1"), document{EK: "ek-1"}))
			return k.request("false", tpmSigner, "worker-1", asToken("worker-1"), document{Hello: "hello", Refused: "AttestationQuoteMismatch"}).Name
		},
		decided: "Deny", conditions: "Denied/AttestationQuoteMismatch",
	},
	"Deny, of an unknown version": {
		file: func(k *kit) string {
			return k.request("versioned", attestation.HelloSignerName, "worker-1", asToken("worker-1"), document{EK: "ek-1", Refused: attestation.ReasonVersion}).Name
		},
		decided: "Deny", conditions: "Denied/" + attestation.ReasonVersion,
	},
	"Fail": {
		file: func(k *kit) string {
			name := k.pair("approved-by-hand", "worker-1", "ek-1", asToken("worker-1"))
			k.condition(name, certificatesv1.CertificateApproved, "KubectlApprove")
			return name
		},
		decided: "Fail", conditions: "Approved/KubectlApprove Failed/ApprovedWithoutAttestation",
	},
	"Challenge": {
		file: func(k *kit) string {
			return k.request("greets", attestation.HelloSignerName, "worker-1", asToken("worker-1"), document{EK: "ek-1"}).Name
		},
		decided: "Challenge", challenged: true,
	},
	"Approve": {
		configure: approveOnly, alike: true,
		file:    func(k *kit) string { return k.pair("approved", "worker-1", "ek-1", asToken("worker-1")) },
		decided: "Approve", conditions: "Approved/Attested", recorded: true,
	},
	"Sign, first": {
		file:    func(k *kit) string { return k.pair("first", "worker-1", "ek-1", asToken("worker-1")) },
		decided: "Approve Sign", conditions: "Approved/Attested", recorded: true, issued: true,
	},
	"Sign, again": {
		file: func(k *kit) string {
			k.attested("worker-1", "ek-1")
			k.node("worker-1")
			return k.pair("again", "worker-1", "ek-1", asToken("worker-1"))
		},
		alike: true, decided: "Approve Sign", conditions: "Approved/Attested", recorded: true, issued: true,
	},
	"Sign, renewal": {
		file: func(k *kit) string {
			k.attested("worker-1", "ek-1")
			k.node("worker-1")
			return k.pair("renewal", "worker-1", "ek-1", asNode("worker-1"))
		},
		decided: "Approve Sign", conditions: "Approved/Attested", recorded: true, issued: true,
	},
	"Sign, of one round": {
		file: func(k *kit) string {
			return k.request("one-round", acmeSigner, "worker-1", asToken("worker-1"), document{Machine: "worker-1"}).Name
		},
		alike: true, decided: "Approve Sign", conditions: "Approved/Attested", recorded: true, issued: true,
	},
	"ApproveServing": {
		configure: func(k *kit) { k.machines.list[0].Addresses = servingAddresses },
		file: func(k *kit) string {
			k.attested("worker-1", "ek-1")
			return k.serving("serves", servingSigner, "worker-1", asNode("worker-1")).Name
		},
		decided: "ApproveServing", conditions: "Approved/AddressesVerified",
	},
	"SignServing": {
		configure: func(k *kit) { k.machines.list[0].Addresses = servingAddresses },
		file: func(k *kit) string {
			k.attested("worker-1", "ek-1")
			return k.serving("serves-by-us", oursToServe, "worker-1", asNode("worker-1")).Name
		},
		decided: "ApproveServing SignServing", conditions: "Approved/AddressesVerified", issued: true,
	},
	"ApproveUnattested": {
		file:    func(k *kit) string { return k.plain("stock", kubeletSigner, "left-alone", asNode("left-alone")).Name },
		decided: "ApproveUnattested", conditions: "Approved/UnattestedNode",
	},
}

var servingAddresses = verifier.Addresses{DNSNames: []string{"worker-1"}, IPs: []netip.Addr{netip.MustParseAddr("10.1.2.3")}}

// run starts a controller and has it settle the scenario. It returns the controller and the
// request.
func (s scenario) run(k *kit, w watching, intercept func(i int, c call, run func() error) error) (in *instance, name string) {
	k.Helper()
	if s.configure != nil {
		s.configure(k)
	}
	in = k.start(w)
	name = s.file(k)
	in.intercept = intercept
	in.settle()
	return in, name
}

// check checks what must hold in the end.
func (s scenario) check(k *kit, name string) {
	k.Helper()
	request := k.is(name, s.conditions)
	if (len(request.Status.Certificate) > 0) != s.issued {
		k.Errorf("issued: %t", !s.issued)
	}
	if (request.Annotations[attestation.AnnotationChallenge] != "") != s.challenged {
		k.Errorf("challenged: %t", !s.challenged)
	}
	if waiting, _ := attestation.ParseStatement(request.Annotations[attestation.AnnotationWaiting]); waiting.Reason != string(s.waits) {
		k.Errorf("the annotation says %q, want %q", waiting, s.waits)
	}
	named, err := k.server.recordsNaming(k.ctx, request.UID)
	if err != nil || (named == 1) != s.recorded || named > 1 {
		k.Errorf("%d records name it, %v", named, err)
	}
	if hello := "hello-" + name; s.issued && s.recorded && name != "one-round" {
		k.is(hello, "Denied/"+string(act.ReasonCompleted))
	}
	if versions := request.Annotations[attestation.AnnotationVersions]; strings.Contains(s.conditions, attestation.ReasonVersion) && versions != "tpm/v1" {
		k.Errorf("the node is offered %q", versions)
	}
}

var consistencies = []watching{inSync, stale, unwatched}

// Each outcome is carried out, for any content of the cache of records, and reported once.
func TestOutcomes(t *testing.T) {
	for name, s := range scenarios {
		for _, w := range consistencies {
			t.Run(fmt.Sprintf("%s/%s", name, w), func(t *testing.T) {
				t.Parallel()
				inBubble(t, func(k *kit) {
					in, request := s.run(k, w, nil)
					s.check(k, request)
					want := s.decided
					if w == stale {
						want = cmp.Or(s.stale, want)
					}
					if got := k.journal.outcomes(); got != want {
						t.Errorf("decided %q, want %q", got, want)
					}
					if writes := slices.ContainsFunc(in.made(), call.writes); writes == s.untouched {
						t.Errorf("%v", in.made())
					}
				})
			})
		}
	}
}

// answers are what the API server may say to a call. It has done nothing then.
var answers = map[string]func(c call) error{
	"conflict":       func(c call) error { return apierrors.NewConflict(groupResource(c), c.name, errors.New("injected")) },
	"not found":      func(c call) error { return apierrors.NewNotFound(groupResource(c), c.name) },
	"already exists": func(c call) error { return apierrors.NewAlreadyExists(groupResource(c), c.name) },
	"forbidden":      func(c call) error { return apierrors.NewForbidden(groupResource(c), c.name, errors.New("injected")) },
	"timeout":        func(c call) error { return apierrors.NewTimeoutError("injected", 1) },
}

// answersTo are those that are tried, by the consistency of the cache: as many as take no longer
// than a second or two.
var answersTo = map[watching][]string{
	inSync:    {"conflict", "not found", "already exists", "forbidden", "timeout"},
	stale:     {"conflict", "not found", "already exists", "timeout"},
	unwatched: {"conflict", "timeout"},
}

func groupResource(c call) schema.GroupResource { return schema.GroupResource{Resource: c.resource} }

// Each call fails once, with each answer that an API server may give: reads with a timeout, writes
// with each. The end is the same.
func TestEachCallFailsOnce(t *testing.T) {
	for name, s := range scenarios {
		for _, w := range consistencies {
			if s.alike {
				continue
			}
			t.Run(fmt.Sprintf("%s/%s", name, w), func(t *testing.T) {
				t.Parallel()
				for i, c := range callsOf(t, s, w) {
					for _, answer := range slices.Sorted(maps.Keys(answers)) {
						if !slices.Contains(answersTo[w], answer) || !c.writes() && answer != "timeout" {
							continue
						}
						inBubble(t, func(k *kit) {
							in, request := s.run(k, w, func(j int, c call, run func() error) error {
								if j == i {
									return answers[answer](c)
								}
								return run()
							})
							s.check(k, request)
							if k.Failed() {
								k.Fatalf("after %s at call %d, %s: %v", answer, i, c, in.made())
							}
						})
					}
				}
			})
		}
	}
}

// callsOf returns the calls of a scenario where none fails.
func callsOf(t *testing.T, s scenario, w watching) (calls []call) {
	t.Helper()
	inBubble(t, func(k *kit) {
		in, _ := s.run(k, w, nil)
		calls = in.made()
	})
	return calls
}

var errCrashed = errors.New("the controller crashed")

// A controller crashes after each write in turn: the server has done it, and the controller makes
// no other call. Another one goes on, with the same end.
func TestCrashAfterEachWrite(t *testing.T) {
	for name, s := range scenarios {
		for _, w := range consistencies {
			t.Run(fmt.Sprintf("%s/%s", name, w), func(t *testing.T) {
				t.Parallel()
				for i, c := range callsOf(t, s, w) {
					if !c.writes() {
						continue
					}
					inBubble(t, func(k *kit) {
						if s.configure != nil {
							s.configure(k)
						}
						first := k.start(w)
						request := s.file(k)
						first.intercept = func(j int, _ call, run func() error) error {
							if j > i {
								return errCrashed
							}
							if err := run(); err != nil || j < i {
								return err
							}
							return errCrashed
						}
						for _, r := range k.server.requests() {
							_, _ = first.reconcile(r.Name) // it fails, or another one did
						}
						first.stop()
						if w == stale {
							k.server.goOn()
						}
						second := k.start(w)
						second.settle()
						s.check(k, request)
						if k.Failed() {
							k.Fatalf("crashed after %s: %v, then %v", c, first.made(), second.made())
						}
					})
				}
			})
		}
	}
}

// The event of the certificate often arrives before that of the hello's denial. This replica knows
// that it has closed the hello. Another one looks, and leaves all as it is.
func TestClosedHelloIsNotClosedAgain(t *testing.T) {
	for _, shared := range []bool{false, true} { // the cache drops a denied hello that others may share
		inBubble(t, func(k *kit) {
			k.policy.SharedHello = shared
			in, other := k.start(inSync), k.start(inSync)
			proof := k.pair("a", "worker-1", "ek-1", asToken("worker-1"))
			in.pin("hello-a")
			other.pin("hello-a")
			in.once(proof)
			if issued := k.is(proof, "Approved/Attested"); len(issued.Status.Certificate) == 0 {
				k.Fatal("no certificate")
			}
			k.is("hello-a", "Denied/AttestationCompleted")
			in.counted()
			in.once(proof)
			if calls := in.counted(); len(calls) > 0 {
				k.Errorf("calls for a hello that this replica has closed: %v", calls)
			}
			other.counted()
			other.once(proof)
			if calls := other.counted(); calls["list nodeattestations"] == 0 {
				k.Errorf("another replica did not look: %v", calls)
			}
			k.is("hello-a", "Denied/AttestationCompleted")
			delete(in.cache.stale, "hello-a")
			in.once("hello-a")
			if in.actor.LastWrites.Closed(k.get("hello-a")) {
				k.Error("the closed hello is remembered, though the cache shows that it is closed")
			}
			in.once(proof)
			if calls := in.counted(); len(calls) > 0 {
				k.Errorf("calls for a hello of which the cache shows that it is closed: %v", calls)
			}
		})
	}
}

// A hello whose denial failed is closed by the next event of its proof.
func TestHelloThatCouldNotBeClosed(t *testing.T) {
	inBubble(t, func(k *kit) {
		in := k.start(inSync)
		proof := k.pair("a", "worker-1", "ek-1", asToken("worker-1"))
		in.intercept = func(_ int, c call, run func() error) error {
			if c.String() == "patch certificatesigningrequests/approval" && len(k.get(proof).Status.Certificate) > 0 {
				return errors.New("the API server is away")
			}
			return run()
		}
		if _, err := in.reconcile(proof); err == nil {
			k.Fatal("no error")
		}
		k.is("hello-a", "")
		in.intercept = nil
		in.once(proof)
		k.is("hello-a", "Denied/AttestationCompleted")
	})
}
