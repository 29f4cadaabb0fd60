// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	bootstrapv1 "sigs.k8s.io/cluster-api/api/bootstrap/kubeadm/v1beta2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// With the template of docs/examples/cluster-api/cluster.yaml the kubelet requests a serving
// certificate. The controller approves the Machine's addresses. The cluster's own signer issues the
// certificate, and the kubelet uses it. Then root on the host adds an address that is not the
// Machine's. The controller denies a request for it, and the kubelet keeps its certificate.
func TestServing(t *testing.T) {
	full(t)
	t.Parallel()
	s := newStory(t, func(file map[string]any) {
		file["clusterAPI"].(map[string]any)["servingAddresses"] = []any{"InternalIP"}
		file["serving"] = map[string]any{"signers": []any{certificatesv1.KubeletServingSignerName}}
	})
	c := s.newCluster(t, "one")
	c.allowServing(t)
	// As in the example. Without a CIDR for Services the controller denies addresses in kubeadm's
	// default CIDR, and the hosts of these tests have addresses in it.
	before := c.object.DeepCopy()
	c.object.Spec.ClusterNetwork.Services.CIDRBlocks = []string{"10.96.0.0/16"}
	harness.Must(t, s.client.Patch(t.Context(), c.object, client.MergeFrom(before)))
	d := c.newMachineDeployment(t, "serving", asDocumented)
	d.scale(t, 1)
	m := d.awaitRunning(t, 1)[0]
	address := m.Status.Addresses[0].Address

	var issued *x509.Certificate
	harness.Eventually(t, joinLimit, "the kubelet has a serving certificate", func() bool {
		for _, r := range c.servingRequests(t, &m) {
			if approved := condition(&r, certificatesv1.CertificateApproved); approved != nil && len(r.Status.Certificate) > 0 {
				if approved.Reason != "AddressesVerified" {
					t.Errorf("the request is approved with the reason %s", approved.Reason)
				}
				issued = parse(t, r.Status.Certificate)
			}
		}
		return issued != nil
	})
	if len(issued.IPAddresses) != 1 || issued.IPAddresses[0].String() != address || !slices.Equal(issued.DNSNames, []string{m.Name}) {
		t.Errorf("the certificate is for %v and %v, the Machine has %s", issued.IPAddresses, issued.DNSNames, address)
	}
	roots := x509.NewCertPool()
	roots.AddCert(c.workload.ClientCA().Certificate())
	if _, err := issued.Verify(x509.VerifyOptions{Roots: roots, DNSName: address}); err != nil {
		t.Error(err)
	}
	host, err := s.hosts.Machine(t.Context(), s.hosts.IDs(m.Name)[0])
	harness.Must(t, err)
	serves := func() bool {
		served, err := servedBy(t, host, address)
		return err == nil && bytes.Equal(served.Raw, issued.Raw)
	}
	harness.Eventually(t, joinLimit, "the kubelet uses the serving certificate", serves)

	const foreign = "10.99.77.7"
	_, err = host.Run(t.Context(), "ip", "address", "add", foreign+"/32", "dev", "lo")
	harness.Must(t, err)
	harness.Must(t, host.WriteFile("/etc/default/kubelet", []byte("KUBELET_EXTRA_ARGS=--node-ip="+foreign+"\n"), 0o644))
	_, err = host.Run(t.Context(), "systemctl", "restart", "kubelet")
	harness.Must(t, err)
	harness.Eventually(t, joinLimit, "the request with the foreign address is denied", func() bool {
		return slices.ContainsFunc(c.servingRequests(t, &m), func(r certificatesv1.CertificateSigningRequest) bool {
			if !asksFor(t, &r, foreign) {
				return false
			}
			if condition(&r, certificatesv1.CertificateApproved) != nil {
				t.Fatalf("%s was approved, for an address that is not the Machine's", r.Name)
			}
			return isDenied(&r, verifier.ReasonAddressMismatch)
		})
	})
	harness.Eventually(t, joinLimit, "the kubelet still uses the first certificate", serves)
}

// asDocumented uses the template of docs/examples/cluster-api/cluster.yaml. Three settings are
// added, because the host is a container itself and has no container runtime.
func asDocumented(d *machineDeployment) {
	example, err := os.ReadFile(filepath.Join(module, "docs", "examples", "cluster-api", "cluster.yaml"))
	if err != nil {
		panic(err)
	}
	own := d.template.Spec.Template.Spec.JoinConfiguration.NodeRegistration
	for _, document := range bytes.Split(example, []byte("\n---\n")) {
		var template bootstrapv1.KubeadmConfigTemplate
		if err := yaml.Unmarshal(document, &template); err != nil {
			panic(err)
		}
		if template.Kind == "KubeadmConfigTemplate" && template.Name == "one-workers" {
			d.template.Spec = template.Spec
		}
	}
	documented := &d.template.Spec.Template.Spec.JoinConfiguration.NodeRegistration
	documented.Name, documented.CRISocket, documented.IgnorePreflightErrors = own.Name, own.CRISocket, own.IgnorePreflightErrors
}

// allowServing installs the manifests that serving certificates need in the workload cluster.
func (c *cluster) allowServing(t *testing.T) {
	t.Helper()
	manifests, err := os.ReadFile(filepath.Join(module, "packaging", "kubernetes", "optional", "serving.yaml"))
	harness.Must(t, err)
	objects, err := testbed.ReadObjects(manifests)
	harness.Must(t, err)
	harness.Must(t, c.workload.CreateObjects(t.Context(), objects))
}

// servingRequests returns a Machine's requests for serving certificates.
func (c *cluster) servingRequests(t *testing.T, m *clusterv1.Machine) []certificatesv1.CertificateSigningRequest {
	t.Helper()
	_, all := harness.Requests(t, c.workload, m.Name)
	return slices.DeleteFunc(all, func(r certificatesv1.CertificateSigningRequest) bool {
		return r.Spec.SignerName != certificatesv1.KubeletServingSignerName
	})
}

func condition(r *certificatesv1.CertificateSigningRequest, kind certificatesv1.RequestConditionType) *certificatesv1.CertificateSigningRequestCondition {
	for i := range r.Status.Conditions {
		if r.Status.Conditions[i].Type == kind {
			return &r.Status.Conditions[i]
		}
	}
	return nil
}

func asksFor(t *testing.T, r *certificatesv1.CertificateSigningRequest, address string) bool {
	t.Helper()
	block, _ := pem.Decode(r.Spec.Request)
	request, err := x509.ParseCertificateRequest(block.Bytes)
	harness.Must(t, err)
	return slices.ContainsFunc(request.IPAddresses, net.ParseIP(address).Equal)
}

// servedBy returns the serving certificate of a host's kubelet at an address.
func servedBy(t *testing.T, m *testbed.Machine, address string) (*x509.Certificate, error) {
	t.Helper()
	out, err := m.Run(t.Context(), "python3", "-c", "import ssl, sys; print(ssl.get_server_certificate((sys.argv[1], 10250)))", address)
	if err != nil {
		return nil, err
	}
	return parse(t, []byte(out)), nil
}

func parse(t *testing.T, certificate []byte) *x509.Certificate {
	t.Helper()
	block, _ := pem.Decode(certificate)
	if block == nil {
		t.Fatalf("no certificate: %s", certificate)
	}
	parsed, err := x509.ParseCertificate(block.Bytes)
	harness.Must(t, err)
	return parsed
}
