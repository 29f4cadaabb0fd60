// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"errors"
	"fmt"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/client-go/rest"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// peer does by hand what the plugin does. An attacker does it in another order.
type peer struct {
	*cluster
	hardware *computer
	// api is the credential that it shows.
	api    *csr.Client
	ask    provider.Request
	key    crypto.Signer
	keyPEM []byte
}

// as is a client of the workload cluster.
func (c *cluster) as(change func(*rest.Config)) *rest.Config {
	config := &rest.Config{Host: c.workload.ServerURL(), TLSClientConfig: rest.TLSClientConfig{CAData: c.workload.ServerCA()}, QPS: -1}
	change(config)
	return config
}

// asToken shows a bootstrap token.
func (c *cluster) asToken(token string) *rest.Config {
	return c.as(func(config *rest.Config) { config.BearerToken = token })
}

// asNode shows a client certificate.
func (c *cluster) asNode(certificate, key []byte) *rest.Config {
	return c.as(func(config *rest.Config) { config.CertData, config.KeyData = certificate, key })
}

// credential is the machine's certificate, and what it bootstraps with where it has none yet.
func (m *machine) credential() *rest.Config {
	switch {
	case m.certificate != nil:
		return m.asNode(m.certificate, m.key)
	case m.static != nil:
		return m.as(m.static)
	}
	return m.asToken(m.token)
}

// peerOf makes one of hardware, a credential, and the names that it claims.
func (c *cluster) peerOf(hardware *computer, credential *rest.Config, nodeName, providerID string) (*peer, error) {
	p := &peer{cluster: c, hardware: hardware, ask: provider.Request{
		SignerName: tpm.SignerName, Version: attestation.VersionTPM, NodeName: nodeName, ProviderID: providerID,
	}}
	var err error
	if p.api, err = csr.NewClient(credential); err != nil {
		return nil, err
	}
	if p.key, p.keyPEM, err = csr.NewKey(); err != nil {
		return nil, err
	}
	if p.ask.PKCS10, err = csr.PKCS10(csr.Identity{NodeName: nodeName, ProviderID: providerID}, p.key); err != nil {
		return nil, err
	}
	for _, usage := range csr.Usages(p.key.Public()) {
		p.ask.Usages = append(p.ask.Usages, string(usage))
	}
	return p, nil
}

func (c *cluster) newPeer(t *testing.T, hardware *computer, credential *rest.Config, nodeName, providerID string) *peer {
	t.Helper()
	p, err := c.peerOf(hardware, credential, nodeName, providerID)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// peer is the machine itself.
func (m *machine) peer(t *testing.T) *peer {
	t.Helper()
	return m.newPeer(t, m.computer, m.credential(), m.name, m.providerID)
}

// object wraps a document.
func (p *peer) object(name, signer string, document []byte) (*certificatesv1.CertificateSigningRequest, error) {
	content, err := attestation.Request{PKCS10: p.ask.PKCS10, Provider: tpm.Name, Data: document}.Marshal()
	if err != nil {
		return nil, err
	}
	return csr.Object(name, signer, content, p.key.Public(), nil), nil
}

func (p *peer) fileHello(ctx context.Context) (*certificatesv1.CertificateSigningRequest, error) {
	ask := p.ask
	ask.Name = csr.NewName()
	document, _, err := p.hardware.provider.Hello(ctx, ask)
	if err != nil {
		return nil, err
	}
	object, err := p.object(ask.Name, attestation.HelloSignerName, document)
	if err != nil {
		return nil, err
	}
	return p.api.File(ctx, object)
}

// makeProof makes one that answers a hello's challenge, without filing it.
func (p *peer) makeProof(ctx context.Context, hello *certificatesv1.CertificateSigningRequest) (*certificatesv1.CertificateSigningRequest, error) {
	ask := p.ask
	ask.Name = csr.NewName()
	ask.Challenge = &provider.Challenge{
		HelloName: hello.Name, HelloUID: string(hello.UID), HelloRequest: hello.Spec.Request,
		Answer: []byte(hello.Annotations[attestation.AnnotationChallenge]), Fresh: true,
	}
	document, err := p.hardware.provider.Evidence(ctx, ask)
	if err != nil {
		return nil, err
	}
	return p.object(ask.Name, ask.SignerName, document)
}

// hello files one.
func (p *peer) hello(t *testing.T) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	hello, err := p.fileHello(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return hello
}

// challenged waits until a hello is answered.
func (p *peer) challenged(t *testing.T, hello *certificatesv1.CertificateSigningRequest) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	harness.Eventually(t, harness.Soon, "the hello is answered", func() bool {
		hello = p.get(t, hello.Name)
		if reason := reasonOf(hello); reason != "" {
			t.Fatalf("the hello was refused: %s: %s", reason, hello.Status.Conditions[0].Message)
		}
		return hello.Annotations[attestation.AnnotationChallenge] != ""
	})
	return hello
}

// catchesUp waits until the controller has seen all changes of Machines and KubeadmConfigs. One
// watch delivers the events of one kind in their order. So it makes a new Machine last, and waits
// until the controller answers that machine's hello. change applies to the new Machine.
func (c *cluster) catchesUp(t *testing.T, change func(*machine)) {
	t.Helper()
	p := c.newMachine(t, unique("last"), change).peer(t)
	p.challenged(t, p.hello(t))
}

// proof makes one without filing it.
func (p *peer) proof(t *testing.T, hello *certificatesv1.CertificateSigningRequest) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	proof, err := p.makeProof(t.Context(), hello)
	if err != nil {
		t.Fatal(err)
	}
	return proof
}

func (p *peer) file(t *testing.T, object *certificatesv1.CertificateSigningRequest) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	filed, err := p.api.Create(t.Context(), object, false)
	if err != nil {
		t.Fatal(err)
	}
	return filed
}

// attests goes through both rounds, and waits for no decision on the proof.
func (p *peer) attests(t *testing.T) (hello, proof *certificatesv1.CertificateSigningRequest) {
	t.Helper()
	hello = p.challenged(t, p.hello(t))
	return hello, p.file(t, p.proof(t, hello))
}

// refusal is why a request was denied, or failed.
type refusal struct{ what, reason, message string }

func (r *refusal) Error() string { return fmt.Sprintf("%s: %s: %s", r.what, r.reason, r.message) }

// try goes through both rounds, and waits for the certificate for as long as the context lives.
func (p *peer) try(ctx context.Context) ([]byte, error) {
	hello, err := p.fileHello(ctx)
	if err != nil {
		return nil, err
	}
	decision, err := p.api.Wait(ctx, hello, csr.ClassifyHello)
	if err != nil {
		return nil, fmt.Errorf("hello %s: %w", hello.Name, err)
	}
	if decision.Outcome != csr.Answered {
		return nil, &refusal{"hello " + hello.Name, decision.Reason, decision.Message}
	}
	hello.Annotations = map[string]string{attestation.AnnotationChallenge: decision.Challenge}
	object, err := p.makeProof(ctx, hello)
	if err != nil {
		return nil, err
	}
	proof, err := p.api.File(ctx, object)
	if err != nil {
		return nil, err
	}
	if decision, err = p.api.Wait(ctx, proof, csr.Classify); err != nil {
		return nil, fmt.Errorf("proof %s: %w", proof.Name, err)
	}
	if decision.Outcome != csr.Issued {
		return nil, &refusal{"proof " + proof.Name, decision.Reason, decision.Message}
	}
	_, leaf, err := csr.ParseCertificates(decision.Certificate)
	if err != nil {
		return nil, err
	}
	if leaf.Subject.CommonName != "system:node:"+p.ask.NodeName || !leaf.PublicKey.(*ecdsa.PublicKey).Equal(p.key.Public()) {
		return nil, fmt.Errorf("the certificate is %s's, or has another key", leaf.Subject)
	}
	return decision.Certificate, nil
}

// attest gets a certificate as the plugin's worker does, and returns how long that took; it is a
// renewal from the second time on. It may run in a goroutine of its own.
func (m *machine) attest(ctx context.Context) (time.Duration, error) {
	p, err := m.peerOf(m.computer, m.credential(), m.name, m.providerID)
	if err != nil {
		return 0, err
	}
	began := time.Now()
	for range 3 { // a challenge may have expired
		certificate, err := p.try(ctx)
		var refused *refusal
		if errors.As(err, &refused) && refused.reason == attestation.ReasonExpired {
			continue
		}
		if err != nil {
			return 0, fmt.Errorf("%s: %w", m.name, err)
		}
		m.certificate, m.key = certificate, p.keyPEM
		return time.Since(began), nil
	}
	return 0, fmt.Errorf("%s: each challenge had expired", m.name)
}

// attests gets a certificate within a time that is long.
func (m *machine) attests(t *testing.T) time.Duration {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	took, err := m.attest(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return took
}

// attempt is a machine's attest that goes on by itself.
type attempt struct {
	*machine
	done chan struct{}
	err  error
}

// begins starts an attempt, which the test awaits.
func (m *machine) begins(t *testing.T) *attempt {
	t.Helper()
	a := &attempt{machine: m, done: make(chan struct{})}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	t.Cleanup(func() { cancel(); <-a.done })
	go func() {
		defer close(a.done)
		_, a.err = m.attest(ctx)
	}()
	return a
}

// waits checks that nothing comes of it, for some time.
func (a *attempt) waits(t *testing.T, d time.Duration) {
	t.Helper()
	select {
	case <-a.done:
		t.Fatalf("%s: it was decided too early: %v", a.name, a.err)
	case <-time.After(d):
	}
}

// ends waits until it has its certificate.
func (a *attempt) ends(t *testing.T) {
	t.Helper()
	a.within(t, 30*time.Second)
}

// within waits for a time until it has its certificate.
func (a *attempt) within(t *testing.T, limit time.Duration) {
	t.Helper()
	select {
	case <-a.done:
	case <-time.After(limit):
		t.Fatalf("%s: nothing was decided within %s", a.name, limit)
	}
	if a.err != nil {
		t.Fatal(a.err)
	}
}

// follows checks that the certificate comes soon after what it waited for.
func (a *attempt) follows(t *testing.T, what string, since time.Time) {
	t.Helper()
	a.ends(t)
	follows(t, what, since)
}

// reasonOf returns why a request was denied or failed, empty if it was not.
func reasonOf(object *certificatesv1.CertificateSigningRequest) string {
	for _, c := range object.Status.Conditions {
		if c.Type != certificatesv1.CertificateApproved {
			return c.Reason
		}
	}
	return ""
}
