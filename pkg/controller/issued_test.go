// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/intake"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/watch"
)

// issuedAround files a request that another signer has issued.
func (k *kit) issuedAround(name, signer, node, username string) *certificatesv1.CertificateSigningRequest {
	k.Helper()
	k.plain(name, signer, node, username)
	k.condition(name, certificatesv1.CertificateApproved, "ByHand")
	k.issue(name, "system:node:"+node)
	return k.get(name)
}

// names has a record name a request.
func (k *kit) names(record *v1alpha1.NodeAttestation, request *certificatesv1.CertificateSigningRequest) {
	k.Helper()
	record.Status.Request = &v1alpha1.RequestReference{Name: request.Name, UID: request.UID}
	if err := k.server.Update(k.ctx, record); err != nil {
		k.Fatal(err)
	}
}

// Certificates that were issued without attestation are marked and reported once, by any
// controller. Those that a record names, of unattested nodes, and for others than nodes are not.
func TestIssuedWithoutAttestation(t *testing.T) {
	for name, c := range map[string]struct {
		file func(k *kit)
		// says is in the Event. Empty: nothing is reported.
		says string
		// live says that the cache alone does not show that nothing is to be reported.
		live bool
	}{
		"a node without a record": {func(k *kit) { k.issuedAround("r", kubeletSigner, "bare", asToken("worker-1")) }, "signer " + kubeletSigner, true},
		"a node that has attested": {func(k *kit) {
			k.attested("worker-1", "ek-1")
			k.issuedAround("r", kubeletSigner, "worker-1", asNode("worker-1"))
		}, "the node name worker-1 has a record, of machine worker-1", true},
		"another signer, whose requests are not cached": {func(k *kit) {
			k.issuedAround("r", "example.com/other", "bare", asToken("worker-1"))
		}, "signer example.com/other", true},
		"a certificate for no node": {func(k *kit) {
			k.plain("r", "example.com/other", "bare", asToken("worker-1"))
			k.condition("r", certificatesv1.CertificateApproved, "ByHand")
			k.issue("r", "somebody")
		}, "for somebody", true},
		"a marked one": {func(k *kit) {
			request := k.issuedAround("r", kubeletSigner, "bare", asToken("worker-1"))
			k.annotate("r", intake.AnnotationIssuedWithoutAttestation, mark(request))
		}, "", false},
		"a mark of the requester's own": {func(k *kit) {
			k.issuedAround("r", kubeletSigner, "bare", asToken("worker-1"))
			k.annotate("r", intake.AnnotationIssuedWithoutAttestation, "sha256:0")
		}, "signer " + kubeletSigner, true},
		"a request that a record names": {func(k *kit) {
			record := k.attested("worker-1", "ek-1")
			k.names(record, k.issuedAround("r", kubeletSigner, "worker-1", asNode("worker-1")))
		}, "", true},
		"an unattested node": {func(k *kit) {
			k.issuedAround("r", kubeletSigner, "left-alone", asNode("left-alone"))
		}, "", false},
		"another name of an unattested node": {func(k *kit) {
			k.issuedAround("r", kubeletSigner, "other", asNode("left-alone"))
		}, "signer " + kubeletSigner, true},
		"a serving certificate": {func(k *kit) {
			k.serving("r", servingSigner, "worker-1", asNode("worker-1"))
			k.condition("r", certificatesv1.CertificateApproved, "ByHand")
			k.issue("r", "system:node:worker-1")
		}, "", false},
		"a serving certificate of ours": {func(k *kit) {
			k.serving("r", oursToServe, "worker-1", asNode("worker-1"))
			k.condition("r", certificatesv1.CertificateApproved, "ByHand")
			k.issue("r", "system:node:worker-1")
		}, "", false},
		"an administrator": {func(k *kit) {
			k.issuedAround("r", kubeletSigner, "bare", "system:node:admin")
			request := k.get("r")
			request.Spec.Username, request.Spec.Groups = "admin", []string{"system:masters"}
			if err := k.server.Update(k.ctx, request); err != nil {
				k.Fatal(err)
			}
		}, "", false},
		"one that has expired": {func(k *kit) {
			k.plain("r", kubeletSigner, "bare", asToken("worker-1"))
			request := k.get("r")
			request.Status.Certificate = certificateFor("system:node:bare", time.Now().Add(-time.Second))
			k.setStatus(request)
		}, "", true},
		"what is no certificate": {func(k *kit) {
			k.plain("r", kubeletSigner, "bare", asToken("worker-1"))
			request := k.get("r")
			request.Status.Certificate = []byte("-----BEGIN CERTIFICATE-----\nYQ==\n-----END CERTIFICATE-----\n")
			k.setStatus(request)
		}, "", true},
	} {
		for _, w := range []watching{inSync, unwatched} {
			t.Run(name+"/"+w.String(), func(t *testing.T) {
				inBubble(t, func(k *kit) {
					k.node("bare")
					k.node("worker-1")
					in := k.start(w)
					c.file(k)
					before := k.get("r").Annotations[intake.AnnotationIssuedWithoutAttestation]
					in.settle()
					if read := len(in.counted()) > 0; w == inSync && read != c.live {
						k.Errorf("the API server was asked: %t", read)
					}
					events, marked := k.journal.eventsOf(watch.ReasonIssuedWithoutAttestation), k.get("r").Annotations[intake.AnnotationIssuedWithoutAttestation]
					if c.says == "" {
						if len(events) > 0 || marked != before {
							k.Errorf("%q, mark %q", events, marked)
						}
						return
					}
					if len(events) == 0 || !strings.Contains(events[0], c.says) || marked != mark(k.get("r")) {
						k.Errorf("%q, mark %q", events, marked)
					}
					in.settle()
					k.start(w).settle()
					if again := k.journal.eventsOf(watch.ReasonIssuedWithoutAttestation); len(again) != len(events) {
						k.Errorf("reported again: %q", again)
					}
				})
			})
		}
	}
}

// mark is the mark of a request's certificate.
func mark(request *certificatesv1.CertificateSigningRequest) string {
	return "sha256:" + must(signing.Fingerprint(request.Status.Certificate))
}

// A certificate that the controller itself approved is not reported as issued without attestation
// if its record was deleted since. The same holds if the record was made again.
func TestForgottenRecords(t *testing.T) {
	for name, anew := range map[string]bool{"deleted": false, "made anew": true} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(k *kit) {
				in := k.start(inSync)
				proof := k.pair("r", "worker-1", "ek-1", asToken("worker-1"))
				in.settle()
				if err := k.server.Delete(k.ctx, k.record("worker-1")); err != nil {
					k.Fatal(err)
				}
				if anew {
					time.Sleep(time.Minute)
					k.attested("worker-1", "ek-1")
				}
				in.once(proof)
				if events := k.journal.eventsOf(watch.ReasonIssuedWithoutAttestation); len(events) > 0 {
					k.Errorf("%q", events)
				}
				if lines := k.journal.linesWith("no record names"); len(lines) != 1 {
					k.Errorf("%q", lines)
				}
			})
		})
	}
}

// In audit mode it is logged once, and nothing is written.
func TestIssuedWithoutAttestationInAuditMode(t *testing.T) {
	inBubble(t, func(k *kit) {
		k.config.Audit = true
		in := k.start(inSync)
		k.issuedAround("r", kubeletSigner, "bare", asToken("worker-1"))
		in.once("r")
		in.once("r")
		if lines := k.journal.linesWith("no record names"); len(lines) != 1 || len(k.journal.events) > 0 || k.get("r").Annotations != nil {
			k.Errorf("%q, %q", lines, k.journal.events)
		}
	})
}

// What the API server answers to the mark: a conflict and a failure are tried again. Without the
// right to write it the report is made nevertheless, and what is gone is not reported.
func TestMarkThatCannotBeWritten(t *testing.T) {
	for answer, c := range map[string]struct {
		fails, comesBack bool
		reported         int
	}{
		"conflict": {comesBack: true}, "timeout": {fails: true}, "forbidden": {reported: 1}, "not found": {},
	} {
		t.Run(answer, func(t *testing.T) {
			inBubble(t, func(k *kit) {
				in := k.start(inSync)
				k.issuedAround("r", kubeletSigner, "bare", asToken("worker-1"))
				in.intercept = func(_ int, c call, run func() error) error {
					if c.writes() {
						return answers[answer](c)
					}
					return run()
				}
				result, err := in.reconcile("r")
				if (err != nil) != c.fails || (result.RequeueAfter > 0) != c.comesBack || len(k.journal.eventsOf(watch.ReasonIssuedWithoutAttestation)) != c.reported {
					k.Errorf("%+v, %v, %q", result, err, k.journal.events)
				}
				in.intercept = nil
				in.once("r")
				if events := k.journal.eventsOf(watch.ReasonIssuedWithoutAttestation); len(events) != 1 {
					k.Errorf("%q", events)
				}
			})
		})
	}
}
