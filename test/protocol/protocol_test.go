// SPDX-License-Identifier: Apache-2.0

// Package protocol has the provider and the verifier talk to each other over a real TPM, without an API server between them.
package protocol

import (
	"crypto/rand"
	"crypto/x509"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	common "github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	verifier "github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

// machine is both halves: a provider with its TPM, and the verifier.
type machine struct {
	provider provider.Challenger
	verifier *verifier.Verifier
	// named are the EKs that an authoritative source names.
	named  []verifier.Fingerprint
	pkcs10 []byte
	usages []string
}

func newMachine(t *testing.T, socket string, change func(*verifier.Config)) *machine {
	t.Helper()
	p, err := tpm.Factory().New(provider.Settings{TPMDevice: socket, RuntimeDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	key, _, err := csr.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	m := &machine{}
	if m.pkcs10, err = csr.PKCS10(csr.Identity{NodeName: "a", ProviderID: "test://a"}, key); err != nil {
		t.Fatal(err)
	}
	for _, usage := range csr.Usages(key.Public()) {
		m.usages = append(m.usages, string(usage))
	}
	secret := make([]byte, 32)
	_, _ = rand.Read(secret) // never fails
	config := verifier.Config{
		PCRs:       attestation.PCRSelection{Bank: "sha256", Indexes: []int{0, 1, 2, 3, 4, 5, 6, 7}},
		ClusterUID: "cluster",
		Keys:       verifier.Keys{Current: "k1", ByID: map[string][]byte{"k1": secret}},
	}
	change(&config)
	if m.verifier, err = verifier.New(config); err != nil {
		t.Fatal(err)
	}
	m.provider = p.(provider.Challenger)
	return m
}

// request wraps a document as the API server would show it.
func (m *machine) request(name, signer string, document []byte) (verifier.Request, error) {
	content, err := attestation.Request{PKCS10: m.pkcs10, Provider: tpm.Name, Data: document}.Marshal()
	return verifier.Request{Name: name, UID: "uid-of-" + name, SignerName: signer, Request: content, Usages: m.usages}, err
}

func (m *machine) ask(name string) provider.Request {
	return provider.Request{
		PKCS10: m.pkcs10, NodeName: "a", ProviderID: "test://a", Name: name, SignerName: tpm.SignerName, Usages: m.usages,
		Version: attestation.VersionTPM,
	}
}

// attest goes through both rounds.
func (m *machine) attest(t *testing.T) (*attestation.Hello, error) {
	t.Helper()
	now := time.Now()
	document, remember, err := m.provider.Hello(t.Context(), m.ask("hello"))
	if err != nil {
		return nil, err
	}
	said, err := attestation.ParseHello(document)
	if err != nil || said.EKTemplate != remember {
		return nil, errors.Join(err, errors.New("the template is not what is to be remembered"))
	}
	hello, err := m.request("hello", attestation.HelloSignerName, document)
	if err != nil {
		return said, err
	}
	claim, err := m.verifier.Hello(hello, m.named, now)
	if err != nil {
		return said, err
	}
	challenge, err := m.verifier.Challenge(rand.Reader, claim, now)
	if err != nil {
		return said, err
	}
	answer, err := challenge.Marshal()
	if err != nil {
		return said, err
	}
	ask := m.ask("proof")
	ask.Challenge = &provider.Challenge{HelloName: hello.Name, HelloUID: hello.UID, HelloRequest: hello.Request, Answer: answer, Fresh: true}
	evidence, err := m.provider.Evidence(t.Context(), ask)
	if err != nil {
		return said, err
	}
	proof, err := m.request("proof", tpm.SignerName, evidence)
	if err != nil {
		return said, err
	}
	_, err = m.verifier.Proof(proof, hello, m.named, now)
	return said, err
}

func trust(chip *swtpm.TPM) func(*verifier.Config) {
	return func(c *verifier.Config) {
		c.Roots, c.Intermediates = []*x509.Certificate{chip.CA.Root}, []*x509.Certificate{chip.CA.Intermediate}
	}
}

// The whole protocol with each kind of EK, against swtpm.
func TestProtocolAgainstSwtpm(t *testing.T) {
	for _, template := range []string{"rsa-2048", "ecc-p256", "ecc-p384-high", "rsa-2048-high", "ecc-p256-high"} {
		t.Run(template, func(t *testing.T) {
			chip := swtpm.Start(t, swtpm.Options{Certified: []string{template}})
			proxy := swtpm.NewProxy(t, chip)
			m := newMachine(t, proxy.Socket(), func(c *verifier.Config) {
				trust(chip)(c)
				c.PCRs.Indexes = nil
				for i := range 24 {
					c.PCRs.Indexes = append(c.PCRs.Indexes, i)
				}
			})
			hello, err := m.attest(t)
			if err != nil || hello.EKTemplate != template {
				t.Fatalf("%+v, %v", hello, err)
			}
			t.Logf("%d TPM commands, 24 PCRs quoted", proxy.Count())
			if n := proxy.Count(); n > 30 && !strings.HasPrefix(template, "rsa") {
				t.Errorf("%d TPM commands", n)
			}
			// A TPM of the same make that nobody made a certificate for is another.
			other := swtpm.Start(t, swtpm.Options{CA: chip.CA})
			if _, err := newMachine(t, other.Socket(), trust(chip)).attest(t); err == nil {
				t.Error("a TPM without a certificate was accepted")
			}
		})
	}
}

// A node stays with the EK it enrolled with, even if the TPM gets one that it would have preferred.
func TestNodeStaysWithItsEK(t *testing.T) {
	chip := swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256", "rsa-2048"}})
	m := newMachine(t, chip.Socket(), trust(chip))
	for remembered, want := range map[string]string{"": "ecc-p256", "rsa-2048": "rsa-2048", "ecc-p256": "ecc-p256", "nonsense": "ecc-p256"} {
		ask := m.ask("hello")
		ask.Remembered = remembered
		if _, got, err := m.provider.Hello(t.Context(), ask); err != nil || got != want {
			t.Errorf("remembered %q: %q, %v; want %q", remembered, got, err, want)
		}
	}
}

// A thousand attestations leave no transient object and no session behind.
func TestThousandRunsLeaveNothingInTheTPM(t *testing.T) {
	chip := swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256"}})
	m := newMachine(t, chip.Socket(), trust(chip))
	for i := range 1000 {
		if _, err := m.attest(t); err != nil {
			t.Fatalf("run %d: %v", i, err)
		}
	}
	if handles, err := chip.Handles(); err != nil || len(handles) > 0 {
		t.Errorf("left in the TPM: %x, %v", handles, err)
	}
	if failed, err := chip.LockoutCounter(); err != nil || failed != 0 {
		t.Errorf("lockout counter %d, %v", failed, err)
	}
}

// What the kernel's event log of a machine would be for is out of swtpm's reach: it measures nothing. PCRs that were extended are quoted
// with their values.
func TestExtendedPCRsAreJudged(t *testing.T) {
	chip := swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256"}})
	good := make([]byte, 32) // as after a reset
	m := newMachine(t, chip.Socket(), func(c *verifier.Config) {
		trust(chip)(c)
		c.PCRValues = map[int][][]byte{4: {good}}
	})
	if _, err := m.attest(t); err != nil {
		t.Fatal(err)
	}
	if err := chip.Extend(4, []byte("another boot loader")); err != nil {
		t.Fatal(err)
	}
	_, err := m.attest(t)
	var refusals common.Refusals
	if !errors.As(err, &refusals) || !slices.Equal(refusals.Reasons(), []common.Reason{verifier.ReasonPCRPolicy}) {
		t.Errorf("got %v", err)
	}
}
