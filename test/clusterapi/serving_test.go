// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/rest"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/act"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/oddrequest"
)

// The signers of serving certificates: for one the controller approves, for the other it issues,
// too.
const (
	stockServing = certificatesv1.KubeletServingSignerName
	ownServing   = "cluster.x-k8s.io/kubelet-serving-tpm"
)

// optional are the manifests that give the rights for the signers.
var optional = []string{"serving.yaml", "serving-tpm.yaml"}

// readOptional returns what is in the optional manifests.
func readOptional(t *testing.T) (objects []*unstructured.Unstructured) {
	t.Helper()
	for _, name := range optional {
		manifests, err := os.ReadFile(filepath.Join(module, "packaging", "kubernetes", "optional", name))
		if err != nil {
			t.Fatal(err)
		}
		for decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(manifests), 4096); ; {
			object := &unstructured.Unstructured{}
			if err := decoder.Decode(object); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatal(err)
			}
			objects = append(objects, object)
		}
	}
	return objects
}

// allowServing installs the optional manifests. The function that it returns takes them away again,
// once there is no controller that would miss them.
func (c *cluster) allowServing(t *testing.T) (undo func()) {
	t.Helper()
	objects := readOptional(t)
	for _, object := range objects {
		if err := c.workload.client.Create(t.Context(), object); err != nil {
			t.Fatal(err)
		}
	}
	for _, signer := range []string{stockServing, ownServing} {
		harness.Eventually(t, harness.Soon, "the controller may approve under "+signer, func() bool {
			approve := &authorizationv1.ResourceAttributes{Verb: "approve", Group: certificatesv1.GroupName, Resource: "signers", Name: signer}
			review := &authorizationv1.SubjectAccessReview{
				Spec: authorizationv1.SubjectAccessReviewSpec{User: controllerUser, ResourceAttributes: approve},
			}
			if err := c.workload.client.Create(t.Context(), review); err != nil {
				t.Fatal(err)
			}
			return review.Status.Allowed
		})
	}
	return func() {
		for _, object := range objects {
			if err := c.workload.client.Delete(context.WithoutCancel(t.Context()), object); err != nil {
				t.Error(err)
			}
		}
	}
}

// serves is what a kubelet asks for its serving certificate.
type serves struct {
	names, emails, uris []string
	ips                 []string
	extension           []byte // of alternative names, in place of all those
}

func (s serves) template(t *testing.T, node string) *x509.CertificateRequest {
	t.Helper()
	template := &x509.CertificateRequest{
		Subject:  pkix.Name{Organization: []string{"system:nodes"}, CommonName: "system:node:" + node},
		DNSNames: s.names, EmailAddresses: s.emails,
	}
	for _, ip := range s.ips {
		parsed := net.ParseIP(ip)
		if parsed == nil {
			t.Fatalf("no IP: %s", ip)
		}
		template.IPAddresses = append(template.IPAddresses, parsed)
	}
	for _, uri := range s.uris {
		parsed, err := url.Parse(uri)
		if err != nil {
			t.Fatal(err)
		}
		template.URIs = append(template.URIs, parsed)
	}
	if s.extension != nil {
		template.ExtraExtensions = []pkix.Extension{{Id: oddrequest.SubjectAltName, Value: s.extension}}
	}
	return template
}

// asksToServe files it under a signer.
func (c *cluster) asksToServe(
	t *testing.T, credential *rest.Config, signer, node string, s serves,
) (*certificatesv1.CertificateSigningRequest, *ecdsa.PublicKey) {
	t.Helper()
	filed, key, err := c.fileServing(t, credential, signer, node, s)
	if err != nil {
		t.Fatal(err)
	}
	return filed, key
}

func (c *cluster) fileServing(
	t *testing.T, credential *rest.Config, signer, node string, s serves,
) (*certificatesv1.CertificateSigningRequest, *ecdsa.PublicKey, error) {
	t.Helper()
	key, _, err := csr.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, s.template(t, node), key)
	if err != nil {
		t.Fatal(err)
	}
	object := csr.Object(csr.NewName(), signer, pem.EncodeToMemory(&pem.Block{Type: attestation.BlockRequest, Bytes: der}), key.Public(), nil)
	object.Spec.Usages = []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth}
	api, err := csr.NewClient(credential)
	if err != nil {
		t.Fatal(err)
	}
	filed, err := api.Create(t.Context(), object, false)
	return filed, key.Public().(*ecdsa.PublicKey), err
}

// otherNameBeside is the extension of alternative names with a DNS name and one of another kind.
func otherNameBeside(name string) []byte {
	names := append([]byte{0x82, byte(len(name))}, name...)
	names = append(names, oddrequest.OtherName[2:]...)
	return append([]byte{0x30, byte(len(names))}, names...)
}

// at has a Machine's addresses be these.
func at(addresses ...clusterv1.MachineAddress) func(*machine) {
	return func(m *machine) { m.object.Status.Addresses = addresses }
}

// endpointHost is where the workload cluster's API server is.
const endpointHost = "api.workload.example.test"

// An attested node gets serving certificates for the addresses of its Machine, as soon as those are
// known. It gets none for other addresses, and no other client gets one. Under Kubernetes' own
// signer they are approved, and another signer issues. Under ours they are issued with the
// cluster's CA.
func TestServingCertificates(t *testing.T) {
	t.Parallel()
	w := newWorld(t, shared.management)
	c := w.newCluster(t, "workload", func(c *cluster) { c.object.Spec.ControlPlaneEndpoint.Host = endpointHost })
	undo := c.allowServing(t)
	process := w.start(t, func(file map[string]any) {
		file["serving"] = map[string]any{"signers": []any{stockServing, ownServing}, "forbiddenAddresses": []any{"vip.example.test"}}
		clusterAPI(file)["servingAddresses"] = []any{"Hostname", "InternalIP", "ExternalIP", "InternalDNS", "ExternalDNS"}
	})
	t.Cleanup(func() {
		if err := process.Kill(); err != nil {
			t.Error(err)
		}
		undo()
	})
	m := c.newMachine(t, "serves", at())
	other := c.newMachine(t, "serves-too", at(
		clusterv1.MachineAddress{Type: clusterv1.MachineInternalIP, Address: "192.0.2.20"},
		clusterv1.MachineAddress{Type: clusterv1.MachineInternalDNS, Address: "other.example.test"},
	))
	m.attests(t)
	other.attests(t)

	asked := serves{names: []string{m.name, "serves.example.test"}, ips: []string{"192.0.2.10", "2001:db8::10"}}
	stock, _ := c.asksToServe(t, m.credential(), stockServing, m.name, asked)
	own, key := c.asksToServe(t, m.credential(), ownServing, m.name, asked)
	c.waits(t, verifier.ReasonAddressUnknown, stock, own)
	since := time.Now()
	updateStatus(t, c.client, m.object, func(o *clusterv1.Machine) {
		o.Status.Addresses = clusterv1.MachineAddresses{
			{Type: clusterv1.MachineInternalIP, Address: "192.0.2.10"}, {Type: clusterv1.MachineExternalIP, Address: "2001:db8::10"},
			{Type: clusterv1.MachineInternalDNS, Address: "serves.example.test"},
			// What no node has, though its platform says so: some ask the guest.
			{Type: clusterv1.MachineExternalDNS, Address: endpointHost}, {Type: clusterv1.MachineExternalDNS, Address: "vip.example.test"},
			{Type: clusterv1.MachineHostName, Address: "kubernetes.default.svc"}, {Type: clusterv1.MachineHostName, Address: "localhost"},
			{Type: clusterv1.MachineInternalIP, Address: "10.96.0.10"}, {Type: clusterv1.MachineInternalIP, Address: "127.0.0.1"},
			{Type: clusterv1.MachineInternalIP, Address: "169.254.7.7"}, {Type: clusterv1.MachineInternalIP, Address: "fe80::7"},
		}
	})
	harness.Eventually(t, harness.Soon, "both are approved", func() bool { return approved(c.get(t, stock.Name)) && len(c.get(t, own.Name).Status.Certificate) > 0 })
	follows(t, "addresses", since)
	for _, r := range []*certificatesv1.CertificateSigningRequest{stock, own} {
		if got := c.get(t, r.Name).Status.Conditions; len(got) != 1 || got[0].Reason != string(act.ReasonServing) {
			t.Errorf("%s: %+v", r.Spec.SignerName, got)
		}
	}
	c.checkServing(t, c.get(t, own.Name).Status.Certificate, m.name, key, asked)

	for _, signer := range []string{stockServing, ownServing} {
		t.Run(signer, func(t *testing.T) { c.refusesToServe(t, signer, m, other) })
	}
	t.Run("addresses of two Machines", func(t *testing.T) { c.refusesSharedAddresses(t, m, other) })
	if got := c.get(t, stock.Name); len(got.Status.Certificate) > 0 {
		t.Error("a certificate was issued under Kubernetes' own signer")
	}
	if record := m.remembered(t); len(record.Status.Certificates) != 1 {
		t.Errorf("serving certificates are in the record: %+v", record.Status.Certificates)
	}
}

// checkServing checks a certificate as its users do.
func (c *cluster) checkServing(t *testing.T, chain []byte, node string, key *ecdsa.PublicKey, asked serves) {
	t.Helper()
	_, leaf, err := csr.ParseCertificates(chain)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(c.workload.ClientCA().Certificate())
	if _, err := leaf.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}); err != nil {
		t.Error(err)
	}
	if _, err := leaf.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err == nil {
		t.Error("it is good for a client, too")
	}
	for _, host := range append(slices.Clone(asked.names), asked.ips...) {
		if err := leaf.VerifyHostname(host); err != nil {
			t.Error(err)
		}
	}
	if len(leaf.DNSNames) != len(asked.names) || len(leaf.IPAddresses) != len(asked.ips) || len(leaf.EmailAddresses)+len(leaf.URIs) > 0 {
		t.Errorf("it is for %v %v %v %v", leaf.DNSNames, leaf.IPAddresses, leaf.EmailAddresses, leaf.URIs)
	}
	if leaf.IsCA || leaf.KeyUsage != x509.KeyUsageDigitalSignature || !slices.Equal(leaf.ExtKeyUsage, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}) ||
		leaf.Subject.CommonName != "system:node:"+node || !slices.Equal(leaf.Subject.Organization, []string{"system:nodes"}) || !key.Equal(leaf.PublicKey) {
		t.Errorf("CA %t, usages %v %v, subject %s", leaf.IsCA, leaf.KeyUsage, leaf.ExtKeyUsage, leaf.Subject)
	}
}

// refusesToServe files what is refused under a signer.
func (c *cluster) refusesToServe(t *testing.T, signer string, m, other *machine) {
	t.Helper()
	names := func(names ...string) serves { return serves{names: names} }
	ips := func(ips ...string) serves { return serves{ips: ips} }
	foreign, err := c.workload.ClientCA().IssueClient("system:node:"+m.name, []string{"system:nodes"}, time.Now().Add(-time.Minute), time.Now().Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	type ask struct {
		what string
		s    serves
		want verifier.Reason
		as   *rest.Config // its own certificate if this is nil
	}
	asks := []ask{
		{what: "another node's name", s: names(other.name), want: verifier.ReasonAddressMismatch},
		{what: "another machine's name", s: names("other.example.test"), want: verifier.ReasonAddressMismatch},
		{what: "another machine's IP", s: ips("192.0.2.20"), want: verifier.ReasonAddressMismatch},
		{what: "beside its own", s: serves{names: []string{m.name}, ips: []string{"192.0.2.10", "192.0.2.20"}}, want: verifier.ReasonAddressMismatch},
		{what: "nobody's name", s: names("nobody.example.test"), want: verifier.ReasonAddressMismatch},
		{what: "nobody's IP", s: ips("192.0.2.99"), want: verifier.ReasonAddressMismatch},
		{what: "the control plane's endpoint", s: names(m.name, endpointHost), want: verifier.ReasonAddressForbidden},
		{what: "what the operator forbids", s: names("vip.example.test"), want: verifier.ReasonAddressForbidden},
		{what: "the API server's service IP", s: ips("10.96.0.1"), want: verifier.ReasonAddressForbidden},
		{what: "another service's IP", s: ips("192.0.2.10", "10.96.0.10"), want: verifier.ReasonAddressForbidden},
		{what: "a service", s: names("metrics.kube-system.svc"), want: verifier.ReasonAddressForbidden},
		{what: "wildcard", s: names("*.example.test"), want: verifier.ReasonForbiddenExtension},
		{what: "wildcard beside its own", s: names(m.name, "*"), want: verifier.ReasonForbiddenExtension},
		{what: "otherName", s: serves{extension: oddrequest.OtherName}, want: verifier.ReasonForbiddenExtension},
		{what: "otherName beside its own", s: serves{extension: otherNameBeside(m.name)}, want: verifier.ReasonForbiddenExtension},
		{what: "URI", s: serves{names: []string{m.name}, uris: []string{"spiffe://example.test/node"}}, want: verifier.ReasonForbiddenExtension},
		{what: "email", s: serves{names: []string{m.name}, emails: []string{"node@example.test"}}, want: verifier.ReasonForbiddenExtension},
		{what: "no name", want: verifier.ReasonForbiddenExtension},
		{what: "filed by an administrator", s: names(m.name), as: c.workload.AdminConfig(), want: verifier.ReasonRequesterNotAllowed},
		{what: "filed with a certificate that is not ours", s: names(m.name), as: c.asNode(foreign.CertPEM, foreign.KeyPEM), want: verifier.ReasonUnknownCredential},
	}
	for _, name := range []string{"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local", "localhost"} {
		asks = append(asks, ask{what: name, s: names(name), want: verifier.ReasonAddressForbidden})
	}
	for _, ip := range []string{"127.0.0.1", "::1", "169.254.7.7", "fe80::7", "0.0.0.0", "224.0.0.1", "ff02::1"} {
		asks = append(asks, ask{what: ip, s: ips(ip), want: verifier.ReasonAddressForbidden})
	}
	if signer == ownServing {
		asks = append(asks, ask{what: "filed by another node", s: names(m.name), as: other.credential(), want: verifier.ReasonRequesterNotAllowed})
	} else if _, _, err := c.fileServing(t, other.credential(), signer, m.name, names(m.name)); !apierrors.IsForbidden(err) {
		// NodeRestriction knows that one
		t.Errorf("filed by another node: %v", err)
	}
	if _, _, err := c.fileServing(t, c.asToken(m.token), signer, m.name, names(m.name)); !apierrors.IsForbidden(err) { // by node-attestation-signers
		t.Errorf("filed with the machine's token: %v", err)
	}
	filed := make([]*certificatesv1.CertificateSigningRequest, len(asks))
	for i, ask := range asks {
		credential := ask.as
		if credential == nil {
			credential = m.credential()
		}
		filed[i], _ = c.asksToServe(t, credential, signer, m.name, ask.s)
	}
	for i, ask := range asks {
		t.Run(ask.what, func(t *testing.T) { c.refused(t, filed[i], string(ask.want)) })
	}
	// A node that never attested is not refused, as it may yet.
	stranger, err := c.workload.ClientCA().IssueClient("system:node:stranger", []string{"system:nodes"}, time.Now().Add(-time.Minute), time.Now().Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	waiting, _ := c.asksToServe(t, c.asNode(stranger.CertPEM, stranger.KeyPEM), signer, "stranger", names("stranger"))
	c.waits(t, verifier.ReasonMachineNotFound, waiting)
}

// A machine whose platform reports what the guest says may report another's address. Then nobody
// serves under it.
func (c *cluster) refusesSharedAddresses(t *testing.T, m, other *machine) {
	t.Helper()
	updateStatus(t, c.client, other.object, func(o *clusterv1.Machine) {
		o.Status.Addresses = append(o.Status.Addresses,
			clusterv1.MachineAddress{Type: clusterv1.MachineExternalIP, Address: "192.0.2.10"},
			clusterv1.MachineAddress{Type: clusterv1.MachineHostName, Address: m.name})
	})
	c.catchesUp(t, nil)
	for _, by := range []*machine{m, other} {
		filed, _ := c.asksToServe(t, by.credential(), ownServing, by.name, serves{ips: []string{"192.0.2.10"}})
		c.refused(t, filed, string(verifier.ReasonAddressMismatch))
		filed, _ = c.asksToServe(t, by.credential(), ownServing, by.name, serves{names: []string{m.name}})
		c.refused(t, filed, string(verifier.ReasonAddressMismatch))
	}
	filed, _ := c.asksToServe(t, other.credential(), ownServing, other.name, serves{names: []string{other.name}, ips: []string{"192.0.2.20"}})
	harness.Eventually(t, harness.Soon, "its own is its own", func() bool { return len(c.get(t, filed.Name).Status.Certificate) > 0 })
}
