// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"bytes"
	"crypto"
	"crypto/x509"
	"slices"
	"testing"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// head returns a template's bytes before its key.
func head(area tpm2.TPMTPublic) []byte {
	empty := 4 // two buffers' sizes
	if area.Type == tpm2.TPMAlgRSA {
		empty = 2
		area.Unique = tpm2.NewTPMUPublicID(tpm2.TPMAlgRSA, &tpm2.TPM2BPublicKeyRSA{})
	} else {
		area.Unique = tpm2.NewTPMUPublicID(tpm2.TPMAlgECC, &tpm2.TPMSECCPoint{})
	}
	all := tpm2.Marshal(area)
	return all[:len(all)-empty]
}

// otherwiseJudged judges a public area by what go-tpm makes of it: the reason to refuse it, "" for
// none, and its key.
func otherwiseJudged(from tpm2.TPMTPublic, public []byte, mismatch, weak verifier.Reason) (verifier.Reason, crypto.PublicKey) {
	if !bytes.HasPrefix(public, head(from)) { // keeps hostile tags away from go-tpm's unions
		return mismatch, nil
	}
	area, err := template.Parse(public)
	if err != nil {
		return mismatch, nil
	}
	key, err := template.PublicKey(area)
	if err != nil {
		return weak, nil
	}
	return "", key
}

// FuzzPublicOtherwise: EK and AK are refused for the reasons that go-tpm's parser and marshaller
// would give, and have the same key and Name. The data stands for the whole area, and for what
// follows the template's head.
func FuzzPublicOtherwise(f *testing.F) {
	k := theKit()
	for name, key := range k.ekKeys {
		public := ekPublic(name, key)
		e, _ := template.EKByName(name)
		f.Add(public)
		f.Add(public[len(head(e.Public)):])
	}
	f.Add(akPublic(&k.ak.PublicKey))
	f.Add(akPublic(&k.ak.PublicKey)[len(head(template.AK())):])
	judge := func(t *testing.T, e template.EK, public []byte) {
		var refusals verifier.Refusals
		weak := verifier.Reason(reasonEKPoint)
		if e.IsRSA() {
			weak = reasonEKWeak
		}
		ek := publicEK(&refusals, &attestation.Hello{EKTemplate: e.Name, EKPublic: public})
		reason, key := otherwiseJudged(e.Public, public, reasonEKPublicMismatch, weak)
		if (reason == "") != (len(refusals) == 0) || reason != "" && refusals.Reason() != reason || len(refusals) > 1 {
			t.Fatalf("%s: %v, otherwise %q\n%x", e.Name, refusals, reason, public)
		}
		if reason == "" && (!sameKey(ek.key, key) || !bytes.Equal(ek.publicKey, must(x509.MarshalPKIXPublicKey(key))) || !bytes.Equal(tpm2.Marshal(ek.public), public)) {
			t.Fatalf("%s: another EK\n%x", e.Name, public)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, e := range template.EKs() {
			judge(t, e, data)
			judge(t, e, slices.Concat(head(e.Public), data))
		}
		for _, public := range [][]byte{data, slices.Concat(head(template.AK()), data)} {
			var refusals verifier.Refusals
			name, ak := publicAK(&refusals, public)
			reason, key := otherwiseJudged(template.AK(), public, reasonAKTemplateMismatch, reasonAKPoint)
			if (reason == "") != (len(refusals) == 0) || reason != "" && refusals.Reason() != reason || len(refusals) > 1 {
				t.Fatalf("AK: %v, otherwise %q\n%x", refusals, reason, public)
			}
			if reason == "" && (!sameKey(ak, key) || !bytes.Equal(name, nameOf(public))) {
				t.Fatalf("another AK\n%x", public)
			}
		}
	})
}
