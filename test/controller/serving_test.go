// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"bytes"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"net"
	"os"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/client-go/rest"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/act"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// asksToServe files what a kubelet does for its serving certificate.
func (f *fleet) asksToServe(t *testing.T, credential *rest.Config, node string, names []string, ips ...string) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	key, _, err := csr.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.CertificateRequest{Subject: pkix.Name{Organization: []string{"system:nodes"}, CommonName: "system:node:" + node}, DNSNames: names}
	for _, ip := range ips {
		template.IPAddresses = append(template.IPAddresses, net.ParseIP(ip))
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, template, key)
	if err != nil {
		t.Fatal(err)
	}
	content := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
	object := csr.Object(csr.NewName(), certificatesv1.KubeletServingSignerName, content, key.Public(), nil)
	object.Spec.Usages = []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth}
	api, err := csr.NewClient(credential)
	if err != nil {
		t.Fatal(err)
	}
	filed, err := api.Create(t.Context(), object, false)
	if err != nil {
		t.Fatal(err)
	}
	return filed
}

// A node that attested gets a serving certificate for the addresses of its machine, by
// kube-controller-manager's hand; for no others, and nobody else does.
func TestServingCertificates(t *testing.T) {
	f := newFleet(t, func(_ *fleet, p *verifier.Policy) {
		p.ServingSigners = []string{certificatesv1.KubeletServingSignerName}
		p.ForbiddenAddresses = []string{"api.example.com", "10.96.0.0/12"}
	})
	if err := f.StartControllerManager(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := f.StopControllerManager(); err != nil {
			t.Error(err)
		}
	}()
	m := f.newMachine(t, "serving-1")
	f.inventoried(t, m)
	listed, err := os.ReadFile(f.inventory)
	if err != nil {
		t.Fatal(err)
	}
	m.enrols(t)
	early := f.asksToServe(t, m.credential(t), m.name, []string{m.name}, "192.0.2.11")
	harness.Eventually(t, harness.Soon, "it is said that it waits", func() bool { return f.said(t, early, string(verifier.ReasonAddressUnknown)) })
	harness.WriteFile(t, f.inventory, append(bytes.TrimSpace(listed), "\naddresses: [serving-1.example.com, 192.0.2.11]\n"...))
	began := time.Now()
	harness.Eventually(t, harness.Soon, "it is issued", func() bool { return len(f.get(t, early.Name).Status.Certificate) > 0 })
	if got := f.get(t, early.Name).Status.Conditions[0]; got.Reason != string(act.ReasonServing) {
		t.Errorf("%+v", got)
	}
	t.Logf("issued %s after the addresses were listed", time.Since(began).Round(time.Millisecond))

	served := leaf(t, f.get(t, early.Name).Status.Certificate)
	if err := served.VerifyHostname("192.0.2.11"); err != nil || served.ExtKeyUsage[0] != x509.ExtKeyUsageServerAuth {
		t.Errorf("%v, usages %v", err, served.ExtKeyUsage)
	}
	for name, object := range map[string]*certificatesv1.CertificateSigningRequest{
		string(verifier.ReasonAddressMismatch):  f.asksToServe(t, m.credential(t), m.name, []string{m.name}, "192.0.2.12"),
		string(verifier.ReasonAddressForbidden): f.asksToServe(t, m.credential(t), m.name, []string{"kubernetes.default.svc"}, "10.96.0.1"),
	} {
		f.refused(t, object, name)
	}
	other, err := f.ClientCA().IssueClient("system:node:serving-2", []string{"system:nodes"}, time.Now().Add(-time.Minute), time.Now().Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	stranger := f.asksToServe(t, f.asNode(other.CertPEM, other.KeyPEM), "serving-2", []string{"serving-2"})
	time.Sleep(2 * time.Second) // nothing may be decided on it
	if got := f.get(t, stranger.Name); len(got.Status.Conditions) > 0 {
		t.Errorf("a node that never attested: %+v", got.Status)
	}
}
