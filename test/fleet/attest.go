// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"errors"
	"fmt"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// Times say when a machine was how far. What it did not reach is zero.
type Times struct {
	// Began is when it set out, with nothing but a connection to make.
	Began time.Time
	// HelloFiled and ProofFiled are when the API server had taken the request, ChallengeSeen and
	// CertificateSeen when the machine had seen the answer. They are counted from Began, and are
	// those of the last hello.
	HelloFiled, ChallengeSeen, ProofFiled, CertificateSeen time.Duration
	// Hellos is how many it filed: one, unless its challenge ran out.
	Hellos int
	// Hello and Proof are the last requests' names.
	Hello, Proof string
}

// maxHellos is how often it begins, as the plugin.
const maxHellos = 3

var errExpired = errors.New("the challenge had expired")

// Attest gets a certificate, which the machine then has: with the bootstrap token, or with the
// certificate that it has already. It keeps watching what it has filed until ctx ends, also if
// another party decides on it. The times are there after an error, too.
func (m *Machine) Attest(ctx context.Context, cluster Cluster) (times Times, err error) {
	api, hangUp, err := m.connect(cluster)
	if err != nil {
		return times, fmt.Errorf("%s: %w", m.Name, err)
	}
	defer hangUp()
	a := &attempt{m: m, api: api, cluster: cluster, times: Times{Began: time.Now()}}
	for range maxHellos {
		if err = a.try(ctx); !errors.Is(err, errExpired) {
			break
		}
	}
	if err != nil {
		err = fmt.Errorf("%s: %w", m.Name, err)
	}
	return a.times, err
}

// attempt is one Attest.
type attempt struct {
	m       *Machine
	api     *csr.Client
	cluster Cluster
	times   Times

	key crypto.Signer
	ask provider.Request
}

// reach notes that something has happened by now.
func (a *attempt) reach(at *time.Duration) { *at = time.Since(a.times.Began) }

// try files one hello if the provider needs a challenge, and one proof, with a new key.
func (a *attempt) try(ctx context.Context) error {
	a.times = Times{Began: a.times.Began, Hellos: a.times.Hellos}
	key, keyPEM, err := csr.NewKey()
	if err != nil {
		return err
	}
	a.key = key
	if a.ask, err = a.m.ask(key); err != nil {
		return err
	}
	if challenger, ok := a.m.Provider.(provider.Challenger); ok {
		if err := a.greet(ctx, challenger); err != nil {
			return fmt.Errorf("hello %s: %w", a.times.Hello, err)
		}
	}
	certificate, err := a.prove(ctx)
	if err != nil {
		return fmt.Errorf("proof %s: %w", a.times.Proof, err)
	}
	a.m.Certificate, a.m.Key = certificate, keyPEM
	return nil
}

// ask is what the provider is asked for a key.
func (m *Machine) ask(key crypto.Signer) (ask provider.Request, err error) {
	ask = provider.Request{SignerName: m.Provider.SignerName(), Version: attestation.VersionTPM, NodeName: m.Name, ProviderID: m.ProviderID()}
	for _, usage := range csr.Usages(key.Public()) {
		ask.Usages = append(ask.Usages, string(usage))
	}
	ask.PKCS10, err = csr.PKCS10(csr.Identity{NodeName: m.Name, ProviderID: m.ProviderID()}, key)
	return ask, err
}

// greet files a hello, and waits for its challenge.
func (a *attempt) greet(ctx context.Context, challenger provider.Challenger) error {
	a.ask.Name = csr.NewName()
	a.times.Hello = a.ask.Name
	document, _, err := challenger.Hello(ctx, a.ask)
	if err != nil {
		return err
	}
	hello, err := a.file(ctx, attestation.HelloSignerName, document)
	if err != nil {
		return err
	}
	a.reach(&a.times.HelloFiled)
	a.times.Hellos++
	decision, err := a.api.Wait(ctx, hello, csr.ClassifyHello)
	if err != nil {
		return err
	}
	if decision.Outcome != csr.Answered {
		return &RefusedError{decision}
	}
	a.reach(&a.times.ChallengeSeen)
	a.ask.Challenge = &provider.Challenge{
		HelloName: hello.Name, HelloUID: string(hello.UID), HelloRequest: hello.Spec.Request, Answer: []byte(decision.Challenge), Fresh: true,
	}
	return nil
}

// prove files a proof, and waits for its certificate.
func (a *attempt) prove(ctx context.Context) (certificate []byte, err error) {
	a.ask.Name = csr.NewName()
	a.times.Proof = a.ask.Name
	document, err := a.m.Provider.Evidence(ctx, a.ask)
	if err != nil {
		return nil, err
	}
	proof, err := a.file(ctx, a.ask.SignerName, document)
	if err != nil {
		return nil, err
	}
	a.reach(&a.times.ProofFiled)
	decision, err := a.api.Wait(ctx, proof, csr.Classify)
	if err != nil {
		return nil, err
	}
	switch {
	case decision.Outcome == csr.Denied && decision.Reason == attestation.ReasonExpired:
		return nil, errExpired
	case decision.Outcome != csr.Issued:
		return nil, &RefusedError{decision}
	}
	a.reach(&a.times.CertificateSeen)
	return decision.Certificate, a.isOurs(decision.Certificate)
}

// file files the document as the request of that name.
func (a *attempt) file(ctx context.Context, signer string, document []byte) (*certificatesv1.CertificateSigningRequest, error) {
	content, err := attestation.Request{PKCS10: a.ask.PKCS10, Provider: a.m.Provider.Name(), Data: document}.Marshal()
	if err != nil {
		return nil, err
	}
	object := csr.Object(a.ask.Name, signer, content, a.key.Public(), nil)
	// as the plugin
	if p, ok := a.m.Provider.(provider.Originator); ok && len(a.m.Certificate) > 0 {
		origin, err := p.Origin(ctx, object.Name, content)
		if err != nil {
			return nil, err
		}
		object.Annotations = map[string]string{attestation.AnnotationOrigin: origin}
	}
	return a.api.File(ctx, object)
}

// isOurs checks that a certificate is the machine's, for the key that it asked with, and the
// cluster's.
func (a *attempt) isOurs(certificate []byte) error {
	_, leaf, err := csr.ParseCertificates(certificate)
	if err != nil {
		return err
	}
	key, ok := leaf.PublicKey.(*ecdsa.PublicKey)
	if leaf.Subject.CommonName != "system:node:"+a.m.Name || !ok || !key.Equal(a.key.Public()) {
		return fmt.Errorf("the certificate is %s's, or has another key", leaf.Subject)
	}
	return leaf.CheckSignatureFrom(a.cluster.Issuer)
}

// RefusedError says what became of a request that did not get what it was for.
type RefusedError struct{ Decision csr.Decision }

func (e *RefusedError) Error() string {
	outcome := map[csr.Outcome]string{csr.Denied: "denied", csr.Failed: "failed", csr.Deleted: "deleted", csr.Issued: "issued a certificate"}[e.Decision.Outcome]
	return fmt.Sprintf("%s: %s: %s", outcome, e.Decision.Reason, e.Decision.Message)
}
