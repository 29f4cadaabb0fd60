// SPDX-License-Identifier: Apache-2.0

package protocol

import (
	"crypto/rand"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	common "github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	verifier "github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

// An attacker may annotate hellos. He makes the victim's TPM open the challenge for a hello of his
// own, in the victim's name and for his own key. The TPM does, and still neither the victim's
// request nor his own is proven.
func TestChallengeOfAnotherHello(t *testing.T) { forEachChip(t, testAnnotator) }

func testAnnotator(t *testing.T, start starter) {
	chip := start(t, swtpm.Options{Certified: []string{"ecc-p256"}})
	victim := newMachine(t, chip.Socket(), trust(chip))
	// another key; he knows the victim's EK and AK, as everybody does
	attacker := newMachine(t, chip.Socket(), trust(chip))
	attacker.Verifier = victim.Verifier
	document, _, err := victim.Provider.Hello(t.Context(), victim.Ask("hello"))
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	answer := func(v *verifier.Verifier, hello verifier.Request) []byte {
		t.Helper()
		claim, err := v.VerifyHello(hello, nil, now)
		if err != nil {
			t.Fatal(err)
		}
		challenge, err := v.Challenge(rand.Reader, claim, now)
		if err != nil {
			t.Fatal(err)
		}
		annotation, err := challenge.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		return annotation
	}
	request := func(m *Machine, name, signer string, document []byte) verifier.Request {
		t.Helper()
		r, err := m.Request(name, signer, document)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	his := request(attacker, "his", attestation.HelloSignerName, document)
	hello := request(victim, "hello", attestation.HelloSignerName, document)
	for name, annotation := range map[string][]byte{
		"made for the attacker's hello":  answer(victim.Verifier, his),
		"made by the attacker's own key": answer(newMachine(t, chip.Socket(), trust(chip)).Verifier, hello),
	} {
		t.Run(name, func(t *testing.T) {
			ask := victim.Ask("proof")
			ask.Challenge = &provider.Challenge{HelloName: hello.Name, HelloUID: hello.UID, HelloRequest: hello.Request, Answer: annotation, Fresh: true}
			evidence, err := victim.Provider.Evidence(t.Context(), ask)
			if err != nil {
				t.Fatalf("the TPM does not answer, so this shows nothing: %v", err)
			}
			refused := func(whose string, proof, hello verifier.Request) {
				t.Helper()
				_, err := victim.Verifier.VerifyProof(proof, hello, nil, now)
				var refusals common.Refusals
				if !errors.As(err, &refusals) || !slices.Equal(refusals.Reasons(), []common.Reason{verifier.ReasonQuoteMAC}) {
					t.Errorf("%s: %v", whose, err)
				}
			}
			refused("the victim's", request(victim, "proof", tpm.SignerName, evidence), hello)
			// He copies the quote into a proof of his own.
			proof, err := attestation.ParseProof(evidence)
			if err != nil {
				t.Fatal(err)
			}
			proof.HelloName, proof.HelloUID = his.Name, his.UID
			copied, err := proof.Marshal()
			if err != nil {
				t.Fatal(err)
			}
			refused("his own", request(attacker, "proof", tpm.SignerName, copied), his)
		})
	}
}
