// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"bytes"
	"crypto"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// judged returns the reasons for which the hello and the proof of an exchange are refused.
func judged(t *testing.T, b bend) (hello, proof []verifier.Reason) {
	t.Helper()
	p := theKit().play(t, b)
	reasons := func(err error) []verifier.Reason {
		var refusals verifier.Refusals
		if err != nil && !errors.As(err, &refusals) {
			t.Fatal(err)
		}
		return refusals.Reasons()
	}
	_, helloErr := p.verifier.VerifyHello(p.hello, p.named, p.now)
	_, proofErr := p.verifier.VerifyProof(p.proof, p.hello, p.named, p.now)
	return reasons(helloErr), reasons(proofErr)
}

// A maker's CA that is for something else vouches for no EK, with any certificates below it.
func TestCAForOtherUsesVouchesForNoEK(t *testing.T) {
	k := theKit()
	for name, c := range map[string]struct {
		usages []x509.ExtKeyUsage
		others []asn1.ObjectIdentifier
		good   bool
	}{
		"none":                {nil, nil, true},
		"EKs":                 {nil, []asn1.ObjectIdentifier{oidEKCertificate()}, true},
		"EKs and web servers": {[]x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, []asn1.ObjectIdentifier{oidEKCertificate()}, true},
		"any":                 {[]x509.ExtKeyUsage{x509.ExtKeyUsageAny}, nil, true},
		"web servers":         {[]x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, nil, false},
		"something unknown":   {nil, []asn1.ObjectIdentifier{{2, 23, 133, 8, 3}}, false},
	} {
		sub := newCA("sub CA", k.root, func(ca *x509.Certificate) { ca.ExtKeyUsage, ca.UnknownExtKeyUsage = c.usages, c.others })
		hello, proof := judged(t, bend{hello: certificates(sub.issue(k.ekKeys["ecc-p256"], nil), sub.certificate.Raw)})
		want := []verifier.Reason{reasonEKUsage}
		if c.good {
			want = nil
		}
		if !slices.Equal(hello, want) || !slices.Equal(proof, want) {
			t.Errorf("a CA for %s: %v, %v; want %v", name, hello, proof, want)
		}
	}
}

// An EK whose chain is signed with SHA-1 counts once an authority names it, and then by that alone.
func TestSHA1ChainOnlyLacksTrust(t *testing.T) {
	k := theKit()
	sub := newCA("SHA-1", k.root, withSHA1)
	fingerprint := FingerprintOf(spkiOf(k.ekKeys["ecc-p256"]))
	for name, chain := range map[string][][]byte{
		"the EK's own": {k.intermediate.issue(k.ekKeys["ecc-p256"], withSHA1)},
		"a CA's":       {sub.issue(k.ekKeys["ecc-p256"], nil), sub.certificate.Raw},
	} {
		b := bend{hello: certificates(chain...), policy: func(c *Config) { c.NamedEKs = true }}
		p := k.play(t, b)
		_, err := p.verifier.VerifyHello(p.hello, nil, p.now)
		if err == nil || !OnlyEKUntrusted(err) || !strings.Contains(err.Error(), "SHA-1") || !strings.Contains(err.Error(), "inventory") {
			t.Errorf("%s: %v", name, err)
		}
		b.named = []Fingerprint{fingerprint}
		p = k.play(t, b)
		evidence, err := p.verifier.VerifyProof(p.proof, p.hello, p.named, p.now)
		if err != nil || evidence.EK.chainVerified() || evidence.EK.certificate != nil {
			t.Errorf("%s, named: %+v, %v", name, evidence, err)
		}
	}
	// The signature on a root does not count. A root that is signed with SHA-1 is as good as any.
	root := newCA("SHA-1 Root", nil, withSHA1)
	hello, proof := judged(t, bend{hello: certificates(root.issue(k.ekKeys["ecc-p256"], nil)), policy: func(c *Config) { c.Roots = append(c.Roots, root.certificate) }})
	if len(hello)+len(proof) > 0 {
		t.Errorf("a root signed with SHA-1: %v, %v", hello, proof)
	}
}

// A misspelt maker would switch the check off without a word.
func TestMinimumFirmwareNamesAMaker(t *testing.T) {
	for _, maker := range []string{"", "Infineon", "ifx", "49465800", "id:49465800", "0x49465800", "\x00IFX", "IFX ", "I\nF", "IF\xfc", "0123456g"} {
		c := theKit().config()
		c.MinimumFirmware = map[string]uint64{maker: 1}
		if _, err := New(c); err == nil {
			t.Errorf("%q is taken for a maker", maker)
		}
	}
	for _, maker := range []string{"IFX", "INTC", "STM", "AMD", "NTC", "01020304"} {
		c := theKit().config()
		c.MinimumFirmware = map[string]uint64{maker: 1}
		if _, err := New(c); err != nil {
			t.Errorf("%q: %v", maker, err)
		}
	}
}

func TestKeyIDsThatNoChallengeCanHold(t *testing.T) {
	for _, id := range []string{"", "K1", "key 1", "k\n", strings.Repeat("k", 65)} {
		c := theKit().config()
		c.Keys = Keys{Current: id, ByID: map[string][]byte{id: theKit().key}}
		if _, err := New(c); err == nil {
			t.Errorf("%q is taken for a key id", id)
		}
	}
}

// Older certificates encode an RSA key with the identifier id-RSAES-OAEP, which crypto/x509 does
// not read. They certify it all the same.
func TestCertificateWithOAEPKey(t *testing.T) {
	k := theKit()
	var c struct {
		TBS       asn1.RawValue
		Algorithm pkix.AlgorithmIdentifier
		Signature asn1.BitString
	}
	if _, err := asn1.Unmarshal(k.intermediate.issue(k.ekKeys["rsa-2048"], nil), &c); err != nil {
		t.Fatal(err)
	}
	// 1.2.840.113549.1.1.1
	rsaEncryption := []byte{0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x01}
	oaep := append(bytes.Clone(rsaEncryption[:8]), 7)
	if n := bytes.Count(c.TBS.FullBytes, rsaEncryption); n != 1 {
		t.Fatalf("%d keys", n)
	}
	c.TBS = asn1.RawValue{FullBytes: bytes.Replace(c.TBS.FullBytes, rsaEncryption, oaep, 1)}
	digest := sha256.Sum256(c.TBS.FullBytes)
	signature := must(k.intermediate.key.Sign(rand.Reader, digest[:], crypto.SHA256))
	c.Signature = asn1.BitString{Bytes: signature, BitLength: 8 * len(signature)}
	der := must(asn1.Marshal(c))
	fingerprint := FingerprintOf(spkiOf(k.ekKeys["rsa-2048"]))
	for name, policy := range map[string]func(*Config){
		"by its chain": nil,
		"by the list":  func(c *Config) { c.AllowedEKs = []Fingerprint{fingerprint} },
	} {
		if hello, proof := judged(t, bend{ek: "rsa-2048", hello: certificates(der, k.intermediate.certificate.Raw), policy: policy}); len(hello)+len(proof) > 0 {
			t.Errorf("%s: %v, %v", name, hello, proof)
		}
	}
}

// A TPM loads the public part alone of a software key that looks like an AK. It opens no credential
// for it: there is nothing to authorise.
func TestPublicPartOfASoftwareKeyOpensNothing(t *testing.T) {
	m := boot(t, swtpm.Options{Certified: []string{"ecc-p256"}})
	_, h := m.hello("ecc-p256")
	key := newKey(elliptic.P256())
	chip := m.tpm.Transport()
	ek := must(template.Parse(h.EKPublic))
	for _, hierarchy := range []tpm2.TPMHandle{tpm2.TPMRHEndorsement, tpm2.TPMRHNull, tpm2.TPMRHOwner} {
		area := must(template.Parse(akPublic(&key.PublicKey)))
		loaded, err := tpm2.LoadExternal{InPublic: tpm2.New2B(area), Hierarchy: hierarchy}.Execute(chip)
		if err != nil {
			continue // so much the better
		}
		blob, encrypted, err := tpm2.CreateCredential(rand.Reader, must(tpm2.ImportEncapsulationKey(&ek)), loaded.Name.Buffer, make([]byte, 32))
		if err != nil {
			t.Fatal(err)
		}
		if opened, err := tryActivate(m, *loaded, blob, encrypted); err == nil {
			t.Errorf("hierarchy %#x: the credential was opened: %x", uint32(hierarchy), opened)
		}
		if _, err := (tpm2.FlushContext{FlushHandle: loaded.ObjectHandle}).Execute(chip); err != nil {
			t.Fatal(err)
		}
	}
}
