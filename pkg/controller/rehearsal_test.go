// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/report"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// verdict returns the verdict in a request, the zero value if there is none.
func (k *kit) verdict(name string) attestation.Statement {
	k.Helper()
	value, ok := k.get(name).Annotations[attestation.AnnotationVerdict]
	verdict, err := attestation.ParseStatement(value)
	if ok && err != nil {
		k.Errorf("%s: %v: %q", name, err, value)
	}
	return verdict
}

// changed changes a record.
func (k *kit) changed(record *v1alpha1.NodeAttestation, change func(*v1alpha1.NodeAttestation)) {
	k.Helper()
	change(record)
	if err := k.server.Update(k.ctx, record); err != nil {
		k.Fatal(err)
	}
}

// rehearse files both requests of a rehearsal, and has them decided on. It returns the verdict.
func (in *instance) rehearse(node, username string, hello, proof document) attestation.Statement {
	in.k.Helper()
	in.k.request("hello", attestation.RehearsalHelloSignerName, node, username, hello)
	in.once("hello")
	if in.k.get("hello").Annotations[attestation.AnnotationChallenge] == "" {
		return in.k.verdict("hello")
	}
	proof.Hello = "hello"
	in.k.request("proof", attestation.RehearsalSignerName, node, username, proof)
	in.once("proof")
	return in.k.verdict("proof")
}

// A rehearsal ends in the reason that a real request would get, also in audit mode. It changes
// nothing but annotations of its own two requests.
func TestRehearsal(t *testing.T) {
	refused := func(reason verifier.Reason) document { return document{Refused: reason} }
	ek := document{EK: "ek-1"}
	for name, c := range map[string]struct {
		prepare      func(k *kit)
		node, as     string
		hello, proof document
		want, says   string
	}{
		"a node that has not attested": {
			prepare: func(k *kit) { k.node("worker-1") }, // it is in the cluster, by kubeadm
			node:    "worker-1", as: asNode("worker-1"), hello: ek, want: attestation.ReasonRehearsalPassed,
			says: "for the node worker-1 from the signer " + tpmSigner + " or " + kubeletSigner + ", with a bootstrap credential",
		},
		"a node that has attested": {
			prepare: func(k *kit) { k.attested("worker-1", "ek-1"); k.node("worker-1") },
			node:    "worker-1", as: asNode("worker-1"), hello: ek, want: attestation.ReasonRehearsalPassed,
		},
		"a machine with a bootstrap token": {node: "worker-1", as: asToken("worker-1"), hello: ek, want: attestation.ReasonRehearsalPassed},
		"with a warning": {
			prepare: func(k *kit) {
				k.changed(k.attested("worker-1", "ek-1"), func(r *v1alpha1.NodeAttestation) { r.Status.Boot = &v1alpha1.BootCounters{Resets: 7} })
			},
			node: "worker-1", as: asNode("worker-1"), hello: ek, proof: document{Boot: 3}, want: attestation.ReasonRehearsalPassed, says: "BootCountersWentBack",
		},
		"a token, and the Node exists": {
			prepare: func(k *kit) { k.node("worker-1") },
			node:    "worker-1", as: asToken("worker-1"), hello: ek, want: string(verifier.ReasonNodeAlreadyRegistered),
		},
		"another machine's token": {node: "worker-1", as: asToken("worker-2"), hello: ek, want: string(verifier.ReasonTokenNotForMachine)},
		"another node's name":     {node: "worker-2", as: asNode("worker-1"), hello: ek, want: string(verifier.ReasonRequesterNotAllowed)},
		"another machine's name":  {node: "worker-2", as: asNode("worker-2"), hello: ek, want: string(verifier.ReasonNodeNameMismatch)},
		"a quote that is refused": {node: "worker-1", as: asNode("worker-1"), hello: ek, proof: refused("AttestationQuoteMismatch"), want: "AttestationQuoteMismatch"},
		"a hello that is refused": {node: "worker-1", as: asNode("worker-1"), hello: document{EK: "ek-1", Refused: "AttestationEKDenied"}, want: "AttestationEKDenied"},
		"a credential not in the record": {
			prepare: func(k *kit) {
				k.changed(k.attested("worker-1", "ek-1"), func(r *v1alpha1.NodeAttestation) { r.Status.Certificates[0].SHA256 = "another" })
			},
			node: "worker-1", as: asNode("worker-1"), hello: ek, want: string(verifier.ReasonUnknownCredential),
		},
	} {
		for _, audit := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, audit %t", name, audit), func(t *testing.T) {
				t.Parallel()
				inBubble(t, func(k *kit) {
					k.config.Audit = audit
					k.config.Challenged = func(name string) { k.Errorf("a policy is tried with %s", name) }
					if c.prepare != nil {
						c.prepare(k)
					}
					in := k.start(inSync)
					got := in.rehearse(c.node, c.as, c.hello, c.proof)
					if got.Reason != c.want || !strings.Contains(got.Text, c.says) {
						k.Errorf("the verdict is %q, want %s", got, c.want)
					}
					for kind := range in.counted() {
						if verb, _, _ := strings.Cut(kind, " "); verb != "get" && verb != "list" && kind != "patch "+requestsResource {
							k.Errorf("it made the call %s", kind)
						}
					}
					for _, r := range k.server.requests() {
						if len(r.Status.Conditions) > 0 || len(r.Status.Certificate) > 0 {
							k.Errorf("%s: %+v", r.Name, r.Status)
						}
					}
					if len(k.journal.events) > 0 || len(k.journal.linesWith(" record &")) > 0 {
						k.Errorf("%v, %v", k.journal.events, k.journal.linesWith(" record &"))
					}
				})
			})
		}
	}
}

// A rehearsal waits as a real request would, and says for what. Its verdict comes when the cause is
// gone, or at the deadline.
func TestRehearsalWaits(t *testing.T) {
	inBubble(t, func(k *kit) {
		k.config.Audit = true
		in := k.start(inSync)
		k.request("hello", attestation.RehearsalHelloSignerName, "late", asNode("late"), document{EK: "ek-late"})
		in.once("hello")
		if got := k.waitingFor("hello"); got != string(verifier.ReasonMachineNotFound) || k.verdict("hello").Reason != "" {
			k.Errorf("it waits for %q", got)
		}
		k.machine(machineNamed("late", "ek-late"))
		in.once("hello")
		if annotations := k.get("hello").Annotations; annotations[attestation.AnnotationChallenge] == "" || annotations[attestation.AnnotationWaiting] != "" {
			k.Errorf("%v", annotations)
		}
		k.request("never", attestation.RehearsalHelloSignerName, "never", asNode("never"), document{EK: "ek-never"})
		in.once("never")
		time.Sleep(verifier.DefaultWaitDeadline)
		in.once("never")
		if got := k.verdict("never"); got.Reason != string(verifier.ReasonMachineNotFound) || k.get("never").Annotations[attestation.AnnotationWaiting] != "" {
			k.Errorf("at the deadline: %q", got)
		}
	})
}

// Nothing that a requester or another client does with a rehearsal leads to more than a verdict.
func TestRehearsalCannotBeUsed(t *testing.T) {
	hello := document{EK: "ek-1"}
	writes := func(in *instance) (made []string) {
		for _, c := range in.made() {
			if c.writes() {
				made = append(made, c.String()+" "+c.name)
			}
		}
		return made
	}
	for name, c := range map[string]struct {
		do   func(k *kit)
		want []string
	}{
		"approved by an administrator": {func(k *kit) {
			k.request("proof", attestation.RehearsalSignerName, "worker-1", asToken("worker-1"), document{Hello: "hello"})
			k.condition("proof", certificatesv1.CertificateApproved, "KubectlApprove")
		}, nil},
		"a verdict of the requester's own": {func(k *kit) {
			k.request("proof", attestation.RehearsalSignerName, "worker-1", asToken("worker-1"), document{Hello: "hello", Refused: "AttestationQuoteMismatch"})
			k.annotate("proof", attestation.AnnotationVerdict, "RehearsalPassed: by the requester")
		}, []string{"patch certificatesigningrequests proof"}},
		"a real proof of its hello": {func(k *kit) {
			k.request("proof", tpmSigner, "worker-1", asToken("worker-1"), document{Hello: "hello"})
		}, []string{"patch certificatesigningrequests/approval proof"}},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(k *kit) {
				in := k.start(inSync)
				k.request("hello", attestation.RehearsalHelloSignerName, "worker-1", asToken("worker-1"), hello)
				in.once("hello")
				_ = in.counted()
				c.do(k)
				in.once("proof")
				if got := writes(in); !slices.Equal(got, c.want) {
					k.Errorf("it writes %v, want %v", got, c.want)
				}
				switch name {
				case "a real proof of its hello":
					k.is("proof", "Denied/"+string(verifier.ReasonProofMismatch))
				case "a verdict of the requester's own":
					if got := k.verdict("proof"); got.Reason != "AttestationQuoteMismatch" {
						k.Errorf("%q", got)
					}
				}
			})
		})
	}
}

// After a restart a rehearsal with a verdict is judged again until the deadline, since the verdict
// may be its requester's. A missing input then makes it wait again. Afterwards nothing changes it.
func TestRehearsalIsJudgedAgain(t *testing.T) {
	inBubble(t, func(k *kit) {
		in := k.start(inSync)
		if got := in.rehearse("worker-1", asToken("worker-1"), document{EK: "ek-1"}, document{}); got.Reason != attestation.ReasonRehearsalPassed {
			k.Fatalf("%q", got)
		}
		k.ca.leave(errors.New("away"))
		again := k.start(inSync)
		again.once("proof")
		if k.verdict("proof").Reason != "" || k.waitingFor("proof") != string(verifier.ReasonSignerUnavailable) {
			k.Errorf("%v", k.get("proof").Annotations)
		}
		k.ca.leave(nil)
		again.once("proof")
		if got := k.verdict("proof"); got.Reason != attestation.ReasonRehearsalPassed {
			k.Errorf("%q", got)
		}
		k.ca.leave(errors.New("away"))
		time.Sleep(verifier.DefaultWaitDeadline)
		late := k.start(inSync)
		_ = late.counted()
		for range 3 {
			late.once("hello")
			late.once("proof")
		}
		if got := k.verdict("proof"); got.Reason != attestation.ReasonRehearsalPassed || len(late.counted()) > 0 {
			k.Errorf("%q", got)
		}
	})
}

// A rehearsal that has its answer is not kept whole: it stays for a day. While it waits, it counts
// for no alert, and a verdict of its requester's own is removed.
func TestRehearsalIsCheapToKeep(t *testing.T) {
	inBubble(t, func(k *kit) {
		in := k.start(inSync)
		if got := in.rehearse("worker-1", asToken("worker-1"), document{EK: "ek-1"}, document{}); got.Reason != attestation.ReasonRehearsalPassed {
			k.Fatalf("%q", got)
		}
		for _, name := range []string{"hello", "proof"} {
			cached := &certificatesv1.CertificateSigningRequest{}
			if err := in.cache.Get(k.ctx, client.ObjectKey{Name: name}, cached); err != nil || len(cached.Spec.Request) > 0 {
				k.Errorf("%s: %d bytes are kept, %v", name, len(cached.Spec.Request), err)
			}
		}
		k.request("late", attestation.RehearsalSignerName, "late", asNode("late"), document{Hello: "none"})
		k.annotate("late", attestation.AnnotationVerdict, "RehearsalPassed: by the requester")
		in.once("late")
		if k.verdict("late").Reason != "" || k.waitingFor("late") == "" || len(in.retries.Causes()) > 0 {
			k.Errorf("%v, %v", k.get("late").Annotations, in.retries.Causes())
		}
	})
}

// A verdict that the API server refuses, as where an older set of rights is applied, is tried again
// after minutes.
func TestRefusedVerdict(t *testing.T) {
	inBubble(t, func(k *kit) {
		in := k.start(inSync)
		in.intercept = func(_ int, c call, run func() error) error {
			if c.verb == "patch" {
				return apierrors.NewForbidden(requestsGVR.GroupResource(), c.name, errors.New("no"))
			}
			return run()
		}
		k.request("hello", attestation.RehearsalHelloSignerName, "worker-1", asToken("worker-2"), document{EK: "ek-1"})
		if result := in.once("hello"); result.RequeueAfter != refusedVerdictDelay || len(k.journal.eventsOf(string(report.ReasonWriteRefused))) != 1 {
			k.Errorf("%+v, %v", result, k.journal.events)
		}
	})
}

// The hello of a rehearsal is never closed, so that its proof keeps the verdict.
func TestRehearsalIsNotClosed(t *testing.T) {
	inBubble(t, func(k *kit) {
		in := k.start(inSync)
		if got := in.rehearse("worker-1", asToken("worker-1"), document{EK: "ek-1"}, document{}); got.Reason != attestation.ReasonRehearsalPassed {
			k.Fatalf("%q", got)
		}
		time.Sleep(time.Hour)
		for _, name := range []string{"hello", "proof"} {
			if result := in.once(name); result.RequeueAfter != 0 {
				k.Errorf("%s: %+v", name, result)
			}
			k.is(name, "")
		}
		if got := k.verdict("proof"); got.Reason != attestation.ReasonRehearsalPassed {
			k.Errorf("%q", got)
		}
	})
}
