// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"bytes"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	verifiertpm "github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/oddrequest"
)

// What kube-controller-manager's own signer issues is denied under ours, though the TPM and the
// name are right.
func TestOddRequests(t *testing.T) {
	f := newFleet(t, nil)
	m := f.newMachine(t, "odd")
	f.inventoried(t, m)
	p := f.newPeer(t, m.chip, f.asToken(m.token), m.name, m.name)
	document, err := hello(t, p).Marshal()
	if err != nil {
		t.Fatal(err)
	}
	requests, err := oddrequest.All(m.name, "test://"+m.name)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range requests {
		t.Run(r.Title, func(t *testing.T) {
			for signer, data := range map[string][]byte{attestation.HelloSignerName: document, tpm.SignerName: f.lonelyProof(t, "node-csr-nowhere")} {
				object, err := r.Object(signer, data)
				if err != nil {
					t.Fatal(err)
				}
				f.refused(t, p.file(t, object), string(r.Reason))
			}
		})
	}
	f.onlyFor(t, m.enrols(t).Leaf)
}

// A proof that does not parse is denied at once, with its error as the cause. It does not matter
// whether its hello is there. So is a proof without a hello whose challenge could no longer be
// answered. Another proof whose hello is not there waits beside them.
func TestMalformedProofs(t *testing.T) {
	f := newFleet(t, nil)
	m := f.newMachine(t, "malformed")
	f.inventoried(t, m)
	p := f.newPeer(t, m.chip, f.asToken(m.token), m.name, m.name)
	waits := p.file(t, p.object(t, tpm.SignerName, f.lonelyProof(t, "node-csr-nowhere")))
	greeting := p.challenged(t, p.hello(t))
	genuine := p.proof(t, greeting)
	sent, greeted := documentOf(t, genuine), documentOf(t, greeting)
	with := func(old, replacement string) []byte {
		changed := bytes.Replace(sent, []byte(old), []byte(replacement), 1)
		if bytes.Equal(changed, sent) {
			t.Fatalf("no %s in %s", old, sent)
		}
		return changed
	}
	lonely := func(expires time.Duration) []byte {
		proof, err := attestation.ParseProof(f.lonelyProof(t, "node-csr-nowhere"))
		if err != nil {
			t.Fatal(err)
		}
		proof.Expires = time.Now().Add(expires).Unix()
		data, err := proof.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	filed := map[*certificatesv1.CertificateSigningRequest]verifier.Reason{}
	for _, c := range []struct {
		document []byte
		want     verifier.Reason
	}{
		{with("tpm/v1", "tpm/v2"), verifiertpm.ReasonVersion},
		{[]byte("{}"), verifiertpm.ReasonMalformed},
		{with(`,"pcrs":`, `, "pcrs":`), verifiertpm.ReasonMalformed},
		{with(`{"index":1,`, `{"index":0,`), verifiertpm.ReasonMalformed},
		{with(`,"pcrs":`, `,"more":1,"pcrs":`), verifiertpm.ReasonMalformed},
		{with(`"pcrBank"`, `"PCRBank"`), verifiertpm.ReasonMalformed},
		{append(bytes.Clone(sent), '\n'), verifiertpm.ReasonMalformed},
		{greeted, verifiertpm.ReasonKind},
		{[]byte(greeting.Annotations[attestation.AnnotationChallenge]), verifiertpm.ReasonKind},
		{bytes.Replace(with("tpm/v1", "tpm/v2"), []byte(greeting.Name), []byte("node-csr-nowhere"), 1), verifiertpm.ReasonVersion},
		{bytes.Replace(with(`,"pcrs":`, `, "pcrs":`), []byte(greeting.Name), []byte("node-csr-nowhere"), 1), verifiertpm.ReasonMalformed},
		{lonely(-time.Second), attestation.ReasonExpired},
		{lonely(24 * time.Hour), "AttestationChallengeAhead"},
	} {
		filed[p.file(t, p.object(t, tpm.SignerName, c.document))] = c.want
	}
	for object, want := range filed {
		f.refused(t, object, string(want))
		if served := f.get(t, object.Name).Annotations[attestation.AnnotationVersions]; (served == attestation.VersionTPM) != (want == verifiertpm.ReasonVersion) {
			t.Errorf("%s: the versions are said to be %q", want, served)
		}
	}
	if got := f.get(t, waits.Name); len(got.Status.Conditions) > 0 {
		t.Errorf("a proof whose hello may yet come: %+v", got.Status.Conditions)
	}
	// None of them has used up the hello.
	f.onlyFor(t, leaf(t, f.issued(t, p.file(t, genuine), m.name)))
}
