// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"bytes"
	"slices"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr/state"
)

// judgePair applies S7. The challenge was given to whoever filed the hello, for what the hello asks.
func (t *trial) judgePair() {
	if t.lacksHello() {
		t.wait(ReasonHelloNotFound, "the hello that the proof refers to is not there")
		return
	}
	if !t.needsHello() {
		return
	}
	proof, hello := t.in.Request.Spec, t.in.Hello.Spec
	differ := func(what string) { t.deny(ReasonProofMismatch, "proof and hello differ in %s", what) }
	if hello.SignerName != attestation.HelloSignerName {
		t.deny(ReasonProofMismatch, "what the proof refers to is not a hello")
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
		t.deny(ReasonProofMismatch, "the hello is malformed")
	}
	if err == nil && content.Provider != t.content.Provider {
		differ("provider")
	}
	if err == nil && !bytes.Equal(content.PKCS10, t.content.PKCS10) {
		differ("the certification request")
	}
	if !slices.Equal(proof.Usages, hello.Usages) {
		differ("usages")
	}
	if a, b := proof.ExpirationSeconds, hello.ExpirationSeconds; (a == nil) != (b == nil) || a != nil && *a != *b {
		differ("expirationSeconds")
	}
}

func (t *trial) needsHello() bool { return !t.hello && t.rules.challenges(t.content.Provider) }

func (t *trial) lacksHello() bool { return t.needsHello() && t.in.Hello == nil }

// judgeSpent applies the rest of S7: one proof follows a hello. A second one by the same machine would be as genuine, and get a second
// certificate for one challenge.
func (t *trial) judgeSpent() {
	if !t.needsHello() || t.in.Hello == nil {
		return
	}
	named := false
	for i := range t.in.Records {
		r := &t.in.Records[i]
		named = named || r.names(t.in.Request)
		if r.HelloUID == string(t.in.Hello.UID) && !r.names(t.in.Request) {
			t.deny(ReasonProofMismatch, "another proof has followed the hello")
			return
		}
	}
	if state.Of(t.in.Hello) != state.Pending && !expired(t.in.Hello) && !named {
		t.deny(ReasonProofMismatch, "the hello is closed")
	}
}

// expired reports whether a hello was closed since its challenge had run out, and for no other reason: a proof that came in time may still wait.
func expired(hello *certificatesv1.CertificateSigningRequest) bool {
	reached, cause := state.Explain(hello)
	alone := len(hello.Status.Conditions) == 1 && len(hello.Status.Certificate) == 0
	return reached == state.Denied && alone && cause.Reason == string(ReasonHelloExpired)
}

// judgeOthers has a proof wait while another one of its machine is on its way: the record can name one, and only that is signed.
func (t *trial) judgeOthers() {
	if !t.hello && !t.serving && t.record != nil && t.record.Open && !t.record.names(t.in.Request) {
		t.wait(ReasonRequestPending, "another request of this machine is being issued")
	}
}
