// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"crypto/elliptic"
	"crypto/rand"
	"slices"
	"testing"

	"github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// TestAnotherGenuineTPM: a TPM of the same make that proves what it is. Where EKs are listed or
// named it is refused; where a root alone decides it passes, as itself and as no other.
func TestAnotherGenuineTPM(t *testing.T) {
	k := theKit()
	victim := FingerprintOf(spkiOf(k.ekKeys["ecc-p256"]))
	stranger := newKey(elliptic.P256()).Public()
	asStranger := bend{
		hello: func(h *attestation.Hello) {
			h.EKPublic, h.EKCertificates = ekPublic("ecc-p256", stranger), [][]byte{k.intermediate.issue(stranger, nil)}
		},
		secret: func(i *attestation.SecretInfo) { i.EKPublicKey = spkiOf(stranger) },
	}
	noRoots := func(c *Config) { c.Roots, c.Intermediates = nil, nil }
	for name, c := range map[string]struct {
		policy func(*Config)
		named  []Fingerprint
		want   []verifier.Reason
	}{
		"the victim is allowed": {func(c *Config) { noRoots(c); c.AllowedEKs = []Fingerprint{victim} }, nil, reasons(reasonEKUntrusted)},
		"the victim is named":   {func(c *Config) { noRoots(c); c.NamedEKs = true }, []Fingerprint{victim}, reasons(reasonEKUntrusted)},
		"denied": {func(c *Config) {
			c.DeniedEKs = []Fingerprint{FingerprintOf(spkiOf(stranger))}
		}, nil, reasons(ReasonEKDenied)},
		"a root decides": {nil, nil, nil},
		"a root decides, and the victim is named": {func(c *Config) { c.NamedEKs = true }, []Fingerprint{victim}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			b := asStranger
			b.policy, b.named = c.policy, c.named
			p := k.play(t, b)
			evidence, err := p.verifier.VerifyProof(p.proof, p.hello, p.named, p.now)
			if got := reasonsOf(err); !slices.Equal(got, c.want) {
				t.Fatalf("refused for %v, want %v: %v", got, c.want, err)
			}
			if c.want != nil {
				return
			}
			if evidence.EK.Fingerprint != FingerprintOf(spkiOf(stranger)) || !slices.Equal(evidence.EK.sources, []trustSource{trustChain}) {
				t.Errorf("taken for another: %+v", evidence.EK)
			}
		})
	}
}

// TestSoftwareKeyIsNoAK: a real TPM opens a credential for a key that somebody made in software, so
// opening one proves nothing. But it loads no such key with the attributes that the AK must have.
func TestSoftwareKeyIsNoAK(t *testing.T) {
	m := boot(t, swtpm.Options{Certified: []string{"ecc-p256"}})
	_, h := m.hello("ecc-p256")
	key := newKey(elliptic.P256())
	scalar := must(key.Bytes())
	load := func(change func(*tpm2.TPMTPublic)) (*tpm2.LoadExternalResponse, []byte, error) {
		area := must(template.Parse(akPublic(&key.PublicKey)))
		change(&area)
		rsp, err := tpm2.LoadExternal{
			InPrivate: tpm2.New2B(tpm2.TPMTSensitive{
				SensitiveType: tpm2.TPMAlgECC,
				Sensitive:     tpm2.NewTPMUSensitiveComposite(tpm2.TPMAlgECC, &tpm2.TPM2BECCParameter{Buffer: scalar}),
			}),
			InPublic: tpm2.New2B(area), Hierarchy: tpm2.TPMRHNull,
		}.Execute(m.tpm.Transport())
		return rsp, tpm2.Marshal(area), err
	}
	free := func(area *tpm2.TPMTPublic) {
		a := &area.ObjectAttributes
		a.FixedTPM, a.FixedParent, a.SensitiveDataOrigin, a.Restricted = false, false, false, false
	}
	for name, set := range map[string]func(*tpm2.TPMAObject){
		"all of them":         func(a *tpm2.TPMAObject) { *a = template.AK().ObjectAttributes },
		"fixedTPM":            func(a *tpm2.TPMAObject) { a.FixedTPM = true },
		"fixedParent":         func(a *tpm2.TPMAObject) { a.FixedParent = true },
		"restricted":          func(a *tpm2.TPMAObject) { a.Restricted = true },
		"sensitiveDataOrigin": func(a *tpm2.TPMAObject) { a.SensitiveDataOrigin = true },
	} {
		rsp, _, err := load(func(area *tpm2.TPMTPublic) { free(area); set(&area.ObjectAttributes) })
		if err == nil {
			_, _ = tpm2.FlushContext{FlushHandle: rsp.ObjectHandle}.Execute(m.tpm.Transport())
		}
		// which says where a key came from, and binds nothing by itself
		if (err == nil) != (name == "sensitiveDataOrigin") {
			t.Errorf("loaded with %s: %v", name, err)
		}
	}

	loaded, public, err := load(free)
	if err != nil {
		t.Fatal(err)
	}
	ek := must(template.Parse(h.EKPublic))
	secret := []byte("0123456789abcdef0123456789abcdef")
	blob, encrypted, err := tpm2.CreateCredential(rand.Reader, must(tpm2.ImportEncapsulationKey(&ek)), loaded.Name.Buffer, secret)
	if err != nil {
		t.Fatal(err)
	}
	if opened := activate(t, m, *loaded, blob, encrypted); string(opened) != string(secret) {
		t.Error("the TPM opened no credential for a software key: then the template would prove less than is thought")
	}
	var refusals verifier.Refusals
	if name, _ := publicAK(&refusals, public); name != nil || refusals.Reason() != reasonAKTemplateMismatch {
		t.Errorf("the verifier takes it for an AK: %v", refusals)
	}
}

// activate is TPM2_ActivateCredential for any key that is loaded, with the EK ecc-p256.
func activate(t *testing.T, m machine, loaded tpm2.LoadExternalResponse, blob, encrypted []byte) []byte {
	t.Helper()
	opened, err := tryActivate(m, loaded, blob, encrypted)
	if err != nil {
		t.Fatal(err)
	}
	return opened
}

func tryActivate(m machine, loaded tpm2.LoadExternalResponse, blob, encrypted []byte) ([]byte, error) {
	chip := m.tpm.Transport()
	e, _ := template.EKByName("ecc-p256")
	made, err := tpm2.CreatePrimary{
		PrimaryHandle: tpm2.AuthHandle{Handle: tpm2.TPMRHEndorsement, Auth: tpm2.PasswordAuth(nil)},
		InPublic:      tpm2.New2B(e.Public),
	}.Execute(chip)
	if err != nil {
		return nil, err
	}
	defer func() { _, _ = tpm2.FlushContext{FlushHandle: made.ObjectHandle}.Execute(chip) }()
	policy := tpm2.Policy(tpm2.TPMAlgSHA256, 16, func(chip transport.TPM, session tpm2.TPMISHPolicy, nonce tpm2.TPM2BNonce) error {
		_, err := tpm2.PolicySecret{
			AuthHandle:    tpm2.AuthHandle{Handle: tpm2.TPMRHEndorsement, Auth: tpm2.PasswordAuth(nil)},
			PolicySession: session, NonceTPM: nonce,
		}.Execute(chip)
		return err
	})
	rsp, err := tpm2.ActivateCredential{
		ActivateHandle: tpm2.AuthHandle{Handle: loaded.ObjectHandle, Name: loaded.Name, Auth: tpm2.PasswordAuth(nil)},
		KeyHandle:      tpm2.AuthHandle{Handle: made.ObjectHandle, Name: made.Name, Auth: policy},
		CredentialBlob: tpm2.TPM2BIDObject{Buffer: blob},
		Secret:         tpm2.TPM2BEncryptedSecret{Buffer: encrypted},
	}.Execute(chip)
	if err != nil {
		return nil, err
	}
	return rsp.CertInfo.Buffer, nil
}
