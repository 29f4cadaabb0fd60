// SPDX-License-Identifier: Apache-2.0

// Package protocol has the provider and the verifier talk to each other over a TPM, without an API
// server between them.
package protocol

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	verifier "github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

// Machine is both halves: a provider with its TPM, and the verifier.
type Machine struct {
	Provider provider.Challenger
	Verifier *verifier.Verifier
	// Named are the EKs that an authoritative source names.
	Named []verifier.Fingerprint

	pkcs10 []byte
	usages []string
}

// New returns a machine with the TPM behind a socket. lockDir is for the TPM's lock. The
// configuration lacks what is the same for everybody: the cluster and a key; PCRs 0 to 7 are quoted
// unless it says otherwise.
func New(socket, lockDir string, config verifier.Config) (*Machine, error) {
	p, err := tpm.Factory().New(provider.Settings{TPMDevice: socket, RuntimeDir: lockDir})
	if err != nil {
		return nil, err
	}
	m := &Machine{Provider: p.(provider.Challenger)}
	key, _, err := csr.NewKey()
	if err != nil {
		return nil, err
	}
	if m.pkcs10, err = csr.PKCS10(csr.Identity{NodeName: "a", ProviderID: "test://a"}, key); err != nil {
		return nil, err
	}
	for _, usage := range csr.Usages(key.Public()) {
		m.usages = append(m.usages, string(usage))
	}
	secret := make([]byte, 32)
	_, _ = rand.Read(secret) // never fails
	config.ClusterUID, config.Keys = "cluster", verifier.Keys{Current: "k1", ByID: map[string][]byte{"k1": secret}}
	if config.PCRs.Bank == "" {
		config.PCRs = attestation.PCRSelection{Bank: "sha256", Indexes: []int{0, 1, 2, 3, 4, 5, 6, 7}}
	}
	m.Verifier, err = verifier.New(config)
	return m, err
}

// Request wraps a document as the API server would show it.
func (m *Machine) Request(name, signer string, document []byte) (verifier.Request, error) {
	content, err := attestation.Request{PKCS10: m.pkcs10, Provider: tpm.Name, Data: document}.Marshal()
	return verifier.Request{Name: name, UID: "uid-of-" + name, SignerName: signer, Request: content, Usages: m.usages}, err
}

// Ask is what the provider is asked under a name.
func (m *Machine) Ask(name string) provider.Request {
	return provider.Request{
		PKCS10: m.pkcs10, NodeName: "a", ProviderID: "test://a", Name: name, SignerName: tpm.SignerName, Usages: m.usages,
		Version: attestation.VersionTPM,
	}
}

// Attestation is what came of both rounds, and how long each side took for its part.
type Attestation struct {
	Hello                *attestation.Hello
	Evidence             *verifier.VerifiedProof
	Greet, Prove, Verify time.Duration
}

// Attest goes through both rounds. On an error the Hello may be set.
func (m *Machine) Attest(ctx context.Context) (a Attestation, err error) {
	began := time.Now()
	lap := func(d *time.Duration) {
		*d += time.Since(began)
		began = time.Now()
	}
	document, remember, err := m.Provider.Hello(ctx, m.Ask("hello"))
	if err != nil {
		return a, err
	}
	lap(&a.Greet)
	if a.Hello, err = attestation.ParseHello(document); err != nil {
		return a, err
	}
	if a.Hello.EKTemplate != remember {
		return a, fmt.Errorf("template %s is to be remembered as %s", a.Hello.EKTemplate, remember)
	}
	hello, err := m.Request("hello", attestation.HelloSignerName, document)
	if err != nil {
		return a, err
	}
	claim, err := m.Verifier.VerifyHello(hello, m.Named, began)
	if err != nil {
		return a, err
	}
	challenge, err := m.Verifier.Challenge(rand.Reader, claim, began)
	if err != nil {
		return a, err
	}
	answer, err := challenge.Marshal()
	if err != nil {
		return a, err
	}
	lap(&a.Verify)
	ask := m.Ask("proof")
	ask.Challenge = &provider.Challenge{HelloName: hello.Name, HelloUID: hello.UID, HelloRequest: hello.Request, Answer: answer, Fresh: true}
	evidence, err := m.Provider.Evidence(ctx, ask)
	if err != nil {
		return a, err
	}
	lap(&a.Prove)
	proof, err := m.Request("proof", tpm.SignerName, evidence)
	if err != nil {
		return a, err
	}
	if a.Evidence, err = m.Verifier.VerifyProof(proof, hello, m.Named, began); err != nil {
		return a, err
	}
	if a.Evidence == nil {
		return a, errors.New("neither evidence nor a refusal")
	}
	lap(&a.Verify)
	return a, nil
}
