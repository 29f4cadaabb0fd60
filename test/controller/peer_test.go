// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"bytes"
	"context"
	"crypto"
	"crypto/x509"
	"encoding/pem"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/act"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// peer performs the plugin's steps one by one. An attacker performs them in another order.
type peer struct {
	*fleet
	// api has the credential that the peer uses.
	api      *csr.Client
	provider provider.Challenger
	key      crypto.Signer
	keyPEM   []byte
	pkcs10   []byte
	signer   string
}

// asToken returns the credential of a bootstrap token.
func (f *fleet) asToken(token string) *rest.Config {
	return &rest.Config{Host: f.ServerURL(), TLSClientConfig: rest.TLSClientConfig{CAData: f.ServerCA()}, BearerToken: token, QPS: -1}
}

// asNode returns a node's own credential.
func (f *fleet) asNode(certificate, key []byte) *rest.Config {
	return &rest.Config{Host: f.ServerURL(), TLSClientConfig: rest.TLSClientConfig{CAData: f.ServerCA(), CertData: certificate, KeyData: key}, QPS: -1}
}

// newPeer returns a peer that claims a node name, and the provider ID that belongs to a name.
func (f *fleet) newPeer(t *testing.T, chip *swtpm.TPM, credential *rest.Config, nodeName, idOf string) *peer {
	t.Helper()
	p := &peer{fleet: f, signer: tpm.SignerName}
	made, err := tpm.Factory().New(provider.Settings{TPMDevice: chip.Socket(), RuntimeDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	p.provider = made.(provider.Challenger)
	if p.api, err = csr.NewClient(credential); err != nil {
		t.Fatal(err)
	}
	if p.key, p.keyPEM, err = csr.NewKey(); err != nil {
		t.Fatal(err)
	}
	if p.pkcs10, err = csr.PKCS10(csr.Identity{NodeName: nodeName, ProviderID: "test://" + idOf}, p.key); err != nil {
		t.Fatal(err)
	}
	return p
}

func (p *peer) ask(name string) provider.Request {
	ask := provider.Request{PKCS10: p.pkcs10, Name: name, SignerName: p.signer, Version: attestation.VersionTPM}
	for _, usage := range csr.Usages(p.key.Public()) {
		ask.Usages = append(ask.Usages, string(usage))
	}
	return ask
}

// object wraps a document.
func (p *peer) object(t *testing.T, signer string, document []byte) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	content, err := attestation.Request{PKCS10: p.pkcs10, Provider: tpm.Name, Data: document}.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	return csr.Object(csr.NewName(), signer, content, p.key.Public(), nil)
}

func (p *peer) file(t *testing.T, object *certificatesv1.CertificateSigningRequest) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	filed, err := p.api.Create(t.Context(), object, false)
	if err != nil {
		t.Fatal(err)
	}
	return filed
}

// hello files a hello.
func (p *peer) hello(t *testing.T) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	document, _, err := p.provider.Hello(t.Context(), p.ask("hello"))
	if err != nil {
		t.Fatal(err)
	}
	return p.file(t, p.object(t, attestation.HelloSignerName, document))
}

// challenged waits until a hello is answered.
func (p *peer) challenged(t *testing.T, hello *certificatesv1.CertificateSigningRequest) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	harness.Eventually(t, time.Minute, "the hello is answered", func() bool {
		hello = p.get(t, hello.Name)
		if reason := reasonOf(hello); reason != "" {
			t.Fatalf("the hello was refused: %s: %s", reason, hello.Status.Conditions[0].Message)
		}
		return hello.Annotations[attestation.AnnotationChallenge] != ""
	})
	return hello
}

// proof makes a proof without filing it.
func (p *peer) proof(t *testing.T, hello *certificatesv1.CertificateSigningRequest) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	name := csr.NewName()
	ask := p.ask(name)
	ask.Challenge = &provider.Challenge{
		HelloName: hello.Name, HelloUID: string(hello.UID), HelloRequest: hello.Spec.Request,
		Answer: []byte(hello.Annotations[attestation.AnnotationChallenge]), Fresh: true,
	}
	document, err := p.provider.Evidence(t.Context(), ask)
	if err != nil {
		t.Fatal(err)
	}
	object := p.object(t, p.signer, document)
	object.Name = name
	return object
}

// attests files a hello and its proof.
func (p *peer) attests(t *testing.T) (hello, proof *certificatesv1.CertificateSigningRequest) {
	t.Helper()
	hello = p.challenged(t, p.hello(t))
	return hello, p.file(t, p.proof(t, hello))
}

func (f *bed) get(t *testing.T, name string) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	object := &certificatesv1.CertificateSigningRequest{}
	if err := f.client.Get(t.Context(), client.ObjectKey{Name: name}, object); err != nil {
		t.Fatal(err)
	}
	return object
}

// reasonOf returns why a request was denied or failed, "" if it was neither.
func reasonOf(object *certificatesv1.CertificateSigningRequest) string {
	for _, c := range object.Status.Conditions {
		if c.Type != certificatesv1.CertificateApproved {
			return c.Reason
		}
	}
	return ""
}

// refused waits until a request is refused for a reason.
func (f *fleet) refused(t *testing.T, object *certificatesv1.CertificateSigningRequest, reason string) {
	t.Helper()
	var got *certificatesv1.CertificateSigningRequest
	harness.Eventually(t, 30*time.Second, "refused: "+object.Name, func() bool {
		got = f.get(t, object.Name)
		return reasonOf(got) != "" || len(got.Status.Certificate) > 0
	})
	if reasonOf(got) != reason || len(got.Status.Certificate) > 0 {
		t.Errorf("%d bytes of certificate, reason %q, want %q: %+v", len(got.Status.Certificate), reasonOf(got), reason, got.Status.Conditions)
	}
}

// issued waits until a request has its certificate, which the record knows.
func (f *fleet) issued(t *testing.T, object *certificatesv1.CertificateSigningRequest, machine string) []byte {
	t.Helper()
	var got *certificatesv1.CertificateSigningRequest
	harness.Eventually(t, time.Minute, "issued: "+object.Name, func() bool {
		got = f.get(t, object.Name)
		if reason := reasonOf(got); reason != "" {
			t.Fatalf("%s: %s", reason, got.Status.Conditions[len(got.Status.Conditions)-1].Message)
		}
		return len(got.Status.Certificate) > 0
	})
	harness.Eventually(t, harness.Soon, "the certificate is noted", func() bool { return f.notes(t, machine, got.Status.Certificate) })
	return got.Status.Certificate
}

// notes reports whether the machine's record has a certificate.
func (f *fleet) notes(t *testing.T, machine string, certificate []byte) bool {
	t.Helper()
	fingerprint, err := signing.Fingerprint(certificate)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range f.record(t, machine).Status.Certificates {
		if c.SHA256 == fingerprint {
			return true
		}
	}
	return false
}

// all returns every request.
func (f *fleet) all(t *testing.T) []certificatesv1.CertificateSigningRequest {
	t.Helper()
	list := &certificatesv1.CertificateSigningRequestList{}
	if err := f.client.List(context.WithoutCancel(t.Context()), list); err != nil {
		t.Fatal(err)
	}
	return list.Items
}

// onlyFor checks that each issued certificate has the key of one of these leaves.
func (f *fleet) onlyFor(t *testing.T, leaves ...*x509.Certificate) {
	t.Helper()
	for _, item := range f.all(t) {
		if len(item.Status.Certificate) == 0 {
			continue
		}
		block, _ := pem.Decode(item.Status.Certificate)
		leaf, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			t.Fatal(err)
		}
		known := false
		for _, l := range leaves {
			known = known || bytes.Equal(l.RawSubjectPublicKeyInfo, leaf.RawSubjectPublicKeyInfo)
		}
		if !known {
			t.Errorf("%s has a certificate, for %s", item.Name, leaf.Subject)
		}
	}
}

// credential returns the credential in the plugin's directory.
func (m *machine) credential(t *testing.T) *rest.Config {
	t.Helper()
	pair, err := m.certs().Current()
	if err != nil {
		t.Fatal(err)
	}
	return m.asNode(pair.Chain, pair.Key)
}

// closed waits until a hello is closed because its proof got the certificate. Its message says that
// this is no error.
func (f *fleet) closed(t *testing.T, hello *certificatesv1.CertificateSigningRequest) {
	t.Helper()
	f.refused(t, hello, string(act.ReasonCompleted))
	for _, condition := range f.get(t, hello.Name).Status.Conditions {
		if !strings.Contains(condition.Message, "normal end") {
			t.Errorf("%s: %+v", hello.Name, condition)
		}
	}
}

// records returns the number of records.
func (f *fleet) records(t *testing.T) int {
	t.Helper()
	list := &v1alpha1.NodeAttestationList{}
	if err := f.client.List(t.Context(), list, client.InNamespace(f.namespace)); err != nil {
		t.Fatal(err)
	}
	return len(list.Items)
}
