// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"bytes"
	"slices"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr/state"
)

// judgePair applies S7: the challenge is valid only for the requester of the hello, and only for
// the request that the hello announced.
func (e *evaluation) judgePair() {
	if e.lacksHello() {
		e.wait(ReasonHelloNotFound, "the hello that the proof refers to is not there")
		return
	}
	if !e.needsHello() {
		return
	}
	proof, hello := e.in.Request.Spec, e.in.Hello.Spec
	differ := func(what string) { e.deny(ReasonProofMismatch, "proof and hello differ in %s", what) }
	if hello.SignerName != attestation.HelloSignerFor(proof.SignerName) {
		e.deny(ReasonProofMismatch, "what the proof refers to is not a hello, or only one of the two is a rehearsal")
	}
	if proof.Username != hello.Username {
		differ("username")
	}
	if proof.UID != hello.UID {
		differ("uid")
	}
	if !slices.Equal(slices.Sorted(slices.Values(proof.Groups)), slices.Sorted(slices.Values(hello.Groups))) {
		differ("groups")
	}
	content, err := attestation.Parse(hello.Request)
	if err != nil {
		e.deny(ReasonProofMismatch, "the hello is malformed")
	}
	if err == nil && content.Provider != e.content.Provider {
		differ("provider")
	}
	if err == nil && !bytes.Equal(content.PKCS10, e.content.PKCS10) {
		differ("the certification request")
	}
	if !slices.Equal(proof.Usages, hello.Usages) {
		differ("usages")
	}
	if a, b := proof.ExpirationSeconds, hello.ExpirationSeconds; (a == nil) != (b == nil) || a != nil && *a != *b {
		differ("expirationSeconds")
	}
}

func (e *evaluation) needsHello() bool { return !e.hello && e.rules.challenges(e.content.Provider) }

func (e *evaluation) lacksHello() bool { return e.needsHello() && e.in.Hello == nil }

// judgeHelloReuse applies the rest of S7: only one proof may follow a hello. A second proof by the
// same machine would verify, too, and would get a second certificate for one challenge.
func (e *evaluation) judgeHelloReuse() {
	if !e.needsHello() || e.in.Hello == nil {
		return
	}
	named := false
	for i := range e.in.Records {
		r := &e.in.Records[i]
		named = named || r.isFor(e.in.Request)
		if r.HelloUID == string(e.in.Hello.UID) && !r.isFor(e.in.Request) {
			e.deny(ReasonProofMismatch, "another proof has followed the hello")
			return
		}
	}
	if state.Of(e.in.Hello) != state.Pending && !closedByExpiry(e.in.Hello) && !named {
		e.deny(ReasonProofMismatch, "the hello is closed")
	}
}

// closedByExpiry reports whether a hello was closed only because its challenge had expired. A proof
// that came in time may still wait.
func closedByExpiry(hello *certificatesv1.CertificateSigningRequest) bool {
	reached, cause := state.Explain(hello)
	alone := len(hello.Status.Conditions) == 1 && len(hello.Status.Certificate) == 0
	return reached == state.Denied && alone && cause.Reason == string(ReasonHelloExpired)
}

// judgeOtherProofs makes a proof wait while another proof of its machine is pending. The record is
// written for one request, and only that one is signed.
func (e *evaluation) judgeOtherProofs() {
	if !e.hello && !e.serving && e.record != nil && e.record.ProofPending && !e.record.isFor(e.in.Request) {
		e.wait(ReasonRequestPending, "another request of this machine is being issued")
	}
}
