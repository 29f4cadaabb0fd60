// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"bytes"
	"crypto/rand"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
)

var noon = time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)

func newProvider(t *testing.T, s provider.Settings) *Provider {
	t.Helper()
	made, err := Factory().New(s)
	if err != nil {
		t.Fatal(err)
	}
	p := made.(*Provider)
	p.now = func() time.Time { return noon }
	return p
}

// wantClass checks the class of a provider.Error.
func wantClass(t *testing.T, err error, class provider.Class) {
	t.Helper()
	var known *provider.Error
	if !errors.As(err, &known) || known.Class != class {
		t.Fatalf("got %v, want a provider.Error of class %d", err, class)
	}
}

// A source can only vouch for a key by a certificate that can be read, or by a key that an operator
// has named.
func TestUsableEK(t *testing.T) {
	certified, malformed := &CertificateIdentity{}, &CertificateIdentity{Problem: "it does not parse"}
	for _, c := range []struct {
		setting string
		eks     []EKIdentity
		want    bool
	}{
		{"", nil, false},
		{"", []EKIdentity{{}}, false},
		{"", []EKIdentity{{Certificate: malformed}}, false},
		{"", []EKIdentity{{Certificate: malformed}, {Certificate: certified}}, true},
		{"auto", []EKIdentity{{}}, false},
		{"auto", []EKIdentity{{Certificate: certified}}, true},
		{"rsa-2048", []EKIdentity{{}}, true},
	} {
		if got := (&Identity{EKs: c.eks}).HasUsableEK(c.setting); got != c.want {
			t.Errorf("%q, %+v: %t", c.setting, c.eks, got)
		}
	}
}

func TestProviderIDIsTheSystemUUID(t *testing.T) {
	const id = "4c4c4544-0042-4a10-8056-b4c04f4d3332"
	file := filepath.Join(t.TempDir(), "product_uuid")
	for _, c := range []struct{ scheme, content, want, problem string }{
		{"metal", strings.ToUpper(id) + "\n", "metal://" + id, ""},
		{"", id, "", ""},
		{"metal", "", "", "does not hold a UUID"},
		{"metal", "Not Settable\n", "", "does not hold a UUID"},
		{"metal", id + "0", "", "does not hold a UUID"},
		{"metal", strings.ReplaceAll(id, "-", "0"), "", "does not hold a UUID"},
		{"metal", "00000000-0000-0000-0000-000000000000", "", "many machines"},
		{"metal", "FFFFFFFF-FFFF-FFFF-FFFF-FFFFFFFFFFFF", "", "many machines"},
		{"metal", "01010101-0101-0101-0101-010101010101", "", "many machines"},
		{"metal", "03000200-0400-0500-0006-000700080009", "", "many machines"},
		{"metal", "00020003-0004-0005-0006-000700080009", "", "many machines"},
		{"metal", "12345678-1234-5678-90AB-CDDEEFAABBCC", "", "many machines"},
		{"metal", "78563412-3412-7856-90ab-cddeefaabbcc", "", "many machines"},
		{"metal", "4C4C4544-0000-2010-8020-80C04F202020", "", "many machines"},
		{"vsphere", "VMware-42 0b cf 2b 1f 6b e7 f0-5e 5f 2c 3d 4e 5f 60 71\n", "vsphere://420bcf2b-1f6b-e7f0-5e5f-2c3d4e5f6071", ""},
		{"vsphere", "VMware-42 0b cf 2b 1f 6b e7 f0-5e 5f 2c 3d 4e 5f 60\n", "", "does not hold a UUID"},
		{"vsphere", "VMware-42 0b cf 2b 1f 6b e7 f0-5e 5f 2c 3d 4e 5f 60 7g\n", "", "does not hold a UUID"},
		{"vsphere", "420bcf2b1f6be7f05e5f2c3d4e5f6071\n", "", "does not hold a UUID"},
		{"vsphere", "VMware-00 00 00 00 00 00 00 00-00 00 00 00 00 00 00 00\n", "", "many machines"},
	} {
		if err := os.WriteFile(file, []byte(c.content), 0o600); err != nil {
			t.Fatal(err)
		}
		p := newProvider(t, provider.Settings{ProviderIDScheme: c.scheme})
		p.uuidFile = file
		got, err := p.ProviderID(t.Context())
		if got != c.want || (err == nil) != (c.problem == "") || err != nil && !strings.Contains(err.Error(), c.problem) {
			t.Errorf("%q of %q: %q, %v", c.scheme, c.content, got, err)
		}
	}
	p := newProvider(t, provider.Settings{ProviderIDScheme: "metal"})
	p.uuidFile = file + ".none"
	if _, err := p.ProviderID(t.Context()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

// Each line of the list has a UUID and its source.
func TestSharedUUIDsHaveSources(t *testing.T) {
	for line := range strings.Lines(sharedUUIDs) {
		id, source, _ := strings.Cut(strings.TrimSpace(line), " ")
		if id != "#" && (!isUUID(id) || source == "") {
			t.Errorf("%q", line)
		}
	}
}

// The setting selects the file, and no other file can be named.
func TestSystemUUIDFrom(t *testing.T) {
	for field, file := range map[string]string{"": "/sys/class/dmi/id/product_uuid", "product_uuid": "/sys/class/dmi/id/product_uuid", "product_serial": "/sys/class/dmi/id/product_serial"} {
		if p := newProvider(t, provider.Settings{SystemUUIDFrom: field}); p.uuidFile != file {
			t.Errorf("%q: %s", field, p.uuidFile)
		}
	}
	for _, field := range []string{"board_serial", "../product_uuid", "Product_UUID"} {
		if _, err := Factory().New(provider.Settings{SystemUUIDFrom: field}); err == nil || !strings.Contains(err.Error(), "product_serial") {
			t.Errorf("%q: %v", field, err)
		}
	}
}

func TestSchemesThatNoURIHas(t *testing.T) {
	for _, scheme := range []string{"Metal", "1x", "a b", "a:", "a/", "ä", strings.Repeat("a", 64), "-a"} {
		if _, err := Factory().New(provider.Settings{ProviderIDScheme: scheme}); err == nil || len(err.Error()) > 300 {
			t.Errorf("%q: %v", scheme, err)
		}
	}
	for _, scheme := range []string{"a", "metal3", "x+y.z-0"} {
		newProvider(t, provider.Settings{ProviderIDScheme: scheme})
	}
}

// answered returns a hello by a real TPM with an answer to it.
func answered(t *testing.T, p *Provider, change func(*attestation.Challenge)) provider.Request {
	t.Helper()
	request := provider.Request{PKCS10: []byte("x"), Name: "proof", SignerName: SignerName, Version: attestation.VersionTPM}
	hello, _, err := p.Hello(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	content, err := attestation.Request{PKCS10: []byte("x"), Provider: Name, Data: hello}.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	challenge := attestation.Challenge{
		Version: attestation.VersionTPM, KeyID: "k", Expires: noon.Add(time.Minute).Unix(),
		CredentialBlob: []byte{0, 1, 0}, EncryptedSecret: []byte{0, 1, 0},
		PCRs: attestation.PCRSelection{Bank: "sha256", Indexes: []int{0}},
	}
	if change != nil {
		change(&challenge)
	}
	answer, err := challenge.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	request.Challenge = &provider.Challenge{HelloName: "hello", HelloUID: "uid", HelloRequest: content, Answer: answer}
	return request
}

// Whatever is wrong with a challenge, a new hello may get a better one.
func TestChallengesThatCannotBeAnswered(t *testing.T) {
	chip := swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256"}})
	proxy := swtpm.NewProxy(t, chip)
	p := newProvider(t, provider.Settings{TPMDevice: proxy.Socket(), RuntimeDir: t.TempDir()})

	expired := answered(t, p, func(c *attestation.Challenge) {
		c.Expires = noon.Unix() - 1
		c.CredentialBlob, c.EncryptedSecret = credentialFor(t, p, append([]byte{0, 0x0b}, make([]byte, 32)...))
	})
	proxy.Reset()
	_, err := p.Evidence(t.Context(), expired)
	if wantClass(t, err, provider.Stale); proxy.Count() > 0 {
		t.Errorf("%d TPM commands for a challenge that has expired", proxy.Count())
	}
	// Where it came while we waited, it is the clock that is wrong; the TPM finds what else is.
	expired.Challenge.Fresh = true
	_, err = p.Evidence(t.Context(), expired)
	if wantClass(t, err, provider.Stale); proxy.Count() == 0 {
		t.Error("a fresh challenge was not even tried")
	}

	garbled := answered(t, p, nil)
	garbled.Challenge.Answer = append(garbled.Challenge.Answer, ' ')
	proxy.Reset()
	_, err = p.Evidence(t.Context(), garbled)
	if wantClass(t, err, provider.Stale); proxy.Count() > 0 {
		t.Errorf("%d TPM commands for a malformed challenge", proxy.Count())
	}

	// well-formed, but for what the TPM is to open
	_, err = p.Evidence(t.Context(), answered(t, p, nil))
	wantClass(t, err, provider.Stale)

	if _, err := p.Evidence(t.Context(), provider.Request{}); err == nil {
		t.Error("evidence without a challenge")
	}
	if handles, err := chip.Handles(); err != nil || len(handles) > 0 {
		t.Errorf("left in the TPM: %x, %v", handles, err)
	}
}

func TestHelloIsInAVersionThatItCanWrite(t *testing.T) {
	p := newProvider(t, provider.Settings{TPMDevice: "/nonexistent", RuntimeDir: t.TempDir()})
	if _, _, err := p.Hello(t.Context(), provider.Request{Version: "tpm/v2"}); err == nil || !strings.Contains(err.Error(), "tpm/v2") {
		t.Errorf("got %v", err)
	}
	_, _, err := p.Hello(t.Context(), provider.Request{Version: attestation.VersionTPM})
	wantClass(t, err, provider.NoDevice)
}

// An event log that a request cannot hold is said to be too long, before anything is filed.
func TestEventLogThatIsTooLong(t *testing.T) {
	chip := swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256"}})
	p := newProvider(t, provider.Settings{TPMDevice: chip.Socket(), RuntimeDir: t.TempDir()})
	for size, fits := range map[int]bool{0: true, attestation.MaxEventLog: true, attestation.MaxEventLog + 1: false} {
		p.readEvent = func() ([]byte, error) { return make([]byte, size), nil }
		request := answered(t, p, func(c *attestation.Challenge) {
			c.EventLog = true
			c.CredentialBlob, c.EncryptedSecret = credential(t, p)
		})
		evidence, err := p.Evidence(t.Context(), request)
		if (err == nil) != fits {
			t.Errorf("%d bytes: %v", size, err)
		}
		if err == nil {
			proof, err := attestation.ParseProof(evidence)
			if err != nil || len(proof.EventLog) != size {
				t.Errorf("%d bytes: %v", size, err)
			}
		} else if !strings.Contains(err.Error(), "57345") {
			t.Errorf("it does not say how long: %v", err)
		}
	}
}

// What a person is shown of a hello and a proof is in words, and bounded, for any answer of the
// TPM.
func TestExplainIsInWords(t *testing.T) {
	chip := swtpm.Start(t, swtpm.Options{Setup: true})
	p := newProvider(t, provider.Settings{TPMDevice: chip.Socket(), RuntimeDir: t.TempDir()})
	document, remember, err := p.Hello(t.Context(), provider.Request{SignerName: SignerName, Version: attestation.VersionTPM})
	if err != nil || remember != "ecc-p384-high" {
		t.Fatalf("%q, %v", remember, err)
	}
	var all strings.Builder
	for _, fact := range p.Explain(document) {
		all.WriteString(fact.Name + "=" + fact.Value + "\n")
	}
	for _, want := range []string{"ecc-p384-high", "AK name=000b", "EK certificate=", "serial"} {
		if !strings.Contains(all.String(), want) {
			t.Errorf("%q is not in\n%s", want, all.String())
		}
	}
	if facts := p.Explain(bytes.ToUpper(document)); facts != nil {
		t.Errorf("it explains what is no document of its own: %v", facts)
	}
}

// credential makes one that the TPM opens.
func credential(t *testing.T, p *Provider) (blob, secret []byte) {
	t.Helper()
	return credentialFor(t, p, nil)
}

// credentialFor makes one for the TPM's EK and, unless it is nil, for a key of another name than
// the AK's.
func credentialFor(t *testing.T, p *Provider, name []byte) (blob, secret []byte) {
	t.Helper()
	document, _, err := p.Hello(t.Context(), provider.Request{SignerName: SignerName, Version: attestation.VersionTPM})
	if err != nil {
		t.Fatal(err)
	}
	hello, err := attestation.ParseHello(document)
	if err != nil {
		t.Fatal(err)
	}
	if name == nil {
		if name, err = template.Name(hello.AKPublic); err != nil {
			t.Fatal(err)
		}
	}
	return makeCredential(t, hello.EKPublic, name, make([]byte, 32))
}

// makeCredential is TPM2_MakeCredential (TPM 2.0 Part 3, 12.6) in software.
func makeCredential(t *testing.T, ek, name, secret []byte) (blob, encrypted []byte) {
	t.Helper()
	area, err := template.Parse(ek)
	if err != nil {
		t.Fatal(err)
	}
	key, err := tpm2.ImportEncapsulationKey(&area)
	if err != nil {
		t.Fatal(err)
	}
	blob, encrypted, err = tpm2.CreateCredential(rand.Reader, key, name, secret)
	if err != nil {
		t.Fatal(err)
	}
	return tpm2.Marshal(tpm2.TPM2BIDObject{Buffer: blob}), tpm2.Marshal(tpm2.TPM2BEncryptedSecret{Buffer: encrypted})
}

// A chip may hold more certificates of issuers than a hello does: the EK's own goes first, and what
// does not fit is left out.
func TestLongChainIsCutShort(t *testing.T) {
	chip := swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256"}})
	for i := range uint32(attestation.MaxCertificates + 1) {
		if err := chip.WriteNV(0x01c00100+i, chip.CA.Intermediate.Raw); err != nil {
			t.Fatal(err)
		}
	}
	p := newProvider(t, provider.Settings{TPMDevice: chip.Socket(), RuntimeDir: t.TempDir()})
	document, _, err := p.Hello(t.Context(), provider.Request{SignerName: SignerName, Version: attestation.VersionTPM})
	if err != nil {
		t.Fatal(err)
	}
	hello, err := attestation.ParseHello(document)
	if err != nil || len(hello.EKCertificates) != attestation.MaxCertificates || bytes.Equal(hello.EKCertificates[0], chip.CA.Intermediate.Raw) {
		t.Errorf("%d certificates, %v", len(hello.EKCertificates), err)
	}
}

// A name that is none is an error that lists those that there are.
func TestEKTemplatesThatThereAreNot(t *testing.T) {
	for _, name := range []string{"rsa-3072", "RSA-2048", "ecc-p256 ", "Auto", strings.Repeat("x", 100)} {
		_, err := Factory().New(provider.Settings{EKTemplate: name})
		if err == nil || len(err.Error()) > 300 || !strings.Contains(err.Error(), "auto, or one of ecc-p256, ecc-p256-high, ecc-p384-high, rsa-2048, rsa-2048-high") {
			t.Errorf("%q: %v", name, err)
		}
	}
}

// The set template decides over the remembered one, and what it chose is remembered. With auto the
// remembered one stays.
func TestHelloWithASetTemplate(t *testing.T) {
	chip := swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256"}})
	for _, c := range []struct {
		set, remembered, want string
		allowed               bool
	}{
		{"", "", "ecc-p256", true},
		{"auto", "", "ecc-p256", true},
		{"auto", "ecc-p384-high", "ecc-p384-high", true},
		{"ecc-p384-high", "", "ecc-p384-high", true},
		{"ecc-p384-high", "ecc-p384-high", "ecc-p384-high", true},
		{"ecc-p384-high", "ecc-p384-high+nv", "ecc-p384-high", true},
		{"ecc-p384-high", "ecc-p256", "ecc-p384-high", false},
		{"ecc-p256", "ecc-p384-high", "ecc-p256", false},
	} {
		p := newProvider(t, provider.Settings{TPMDevice: chip.Socket(), RuntimeDir: t.TempDir(), EKTemplate: c.set})
		document, remember, err := p.Hello(t.Context(), provider.Request{SignerName: SignerName, Version: attestation.VersionTPM, Remembered: c.remembered})
		if err != nil {
			t.Fatal(err)
		}
		hello, err := attestation.ParseHello(document)
		if err != nil || hello.EKTemplate != c.want || remember != c.want || p.Allows(c.remembered) != c.allowed {
			t.Errorf("%+v: %s, remember %s, allowed %v, %v", c, hello.EKTemplate, remember, p.Allows(c.remembered), err)
		}
	}
}

// The name in a hello is the verifier's, and what is remembered says that NV has a part in the key.
func TestHelloWithAKeyFromNV(t *testing.T) {
	chip := swtpm.Start(t, swtpm.Options{})
	e, _ := template.EKByName("ecc-p256")
	if err := chip.WriteNV(e.Nonce, []byte("nonce")); err != nil {
		t.Fatal(err)
	}
	p := newProvider(t, provider.Settings{TPMDevice: chip.Socket(), RuntimeDir: t.TempDir(), EKTemplate: "ecc-p256"})
	document, remember, err := p.Hello(t.Context(), provider.Request{SignerName: SignerName, Version: attestation.VersionTPM})
	if err != nil {
		t.Fatal(err)
	}
	hello, err := attestation.ParseHello(document)
	if err != nil || hello.EKTemplate != "ecc-p256" || remember != "ecc-p256+nv" || !p.Allows(remember) {
		t.Errorf("%s, remember %s, %v", hello.EKTemplate, remember, err)
	}
	if _, _, err := e.Parse(hello.EKPublic); err != nil {
		t.Error(err)
	}
}

// The error for a TPM without the set template says what it has.
func TestSetTemplateThatTheTPMLacks(t *testing.T) {
	chip := swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256"}})
	proxy := swtpm.NewProxy(t, chip)
	p := newProvider(t, provider.Settings{TPMDevice: proxy.Socket(), RuntimeDir: t.TempDir(), EKTemplate: "ecc-p384-high"})
	_, _, err := p.Hello(t.Context(), provider.Request{SignerName: SignerName, Version: attestation.VersionTPM, Remembered: "ecc-p256"})
	if err != nil {
		t.Fatal(err)
	}
	proxy.Answer(tpm2.TPMCCCreatePrimary, tpm2.TPMRCCurve|0x40|0x200, 100)
	_, _, err = p.Hello(t.Context(), provider.Request{SignerName: SignerName, Version: attestation.VersionTPM, Remembered: "ecc-p256"})
	wantHint(t, "hello", err, provider.DeviceFailed, "--ek-template")
	for _, says := range []string{"no EK of template ecc-p384-high", "ecc-p256, ecc-p256-high, rsa-2048", "certificates for: ecc-p256"} {
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("it does not say %q: %v", says, err)
		}
	}
}
