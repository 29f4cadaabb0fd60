// SPDX-License-Identifier: Apache-2.0

package node

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/act"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// A machine becomes a node with a certificate that it attested for, its heartbeat goes on, and a
// restarted kubelet asks for nothing.
func TestNodeBecomesReady(t *testing.T) {
	t.Parallel()
	c := newCluster(t, func(c *config.Config) {
		c.Serving = config.Serving{Signers: []string{certificatesv1.KubeletServingSignerName}, ForbiddenAddresses: []string{"10.0.0.0/24"}}
	})
	c.approvesServing(t)
	kubelets := []compile.KubeletComponents{built.kubelet}
	for _, older := range built.older {
		if minorVersion(t, older.KubernetesVersion) >= minorVersion(t, built.kubelet.KubernetesVersion)-oldestKubelet {
			kubelets = append(kubelets, older.KubeletComponents)
		}
	}
	for _, version := range kubelets {
		t.Run(version.KubernetesVersion, func(t *testing.T) {
			t.Parallel()
			testNodeBecomesReady(t, c, version)
		})
	}
}

// oldestKubelet is how many minors a kubelet may be older than the API server (Kubernetes' version
// skew policy).
const oldestKubelet = 3

func minorVersion(t *testing.T, v string) int {
	t.Helper()
	minor, err := strconv.Atoi(strings.Split(v, ".")[1])
	harness.Must(t, err)
	return minor
}

// The policies, the record and the signer work on older API servers, and their kubelets become
// nodes.
func TestOlderAPIServer(t *testing.T) {
	t.Parallel()
	if len(built.older) == 0 {
		t.Skip("make test-skew runs it")
	}
	for _, older := range built.older {
		t.Run(older.KubernetesVersion, func(t *testing.T) {
			t.Parallel()
			components := built.control
			components.APIServer, components.KubernetesVersion = older.APIServer, older.KubernetesVersion
			c := newClusterWith(t, testbed.Options{Components: &components}, built.controller, func(c *config.Config) {
				c.Serving = config.Serving{Signers: []string{certificatesv1.KubeletServingSignerName}, ForbiddenAddresses: []string{"10.0.0.0/24"}}
			})
			c.approvesServing(t)
			testNodeBecomesReady(t, c, older.KubeletComponents)
		})
	}
}

func testNodeBecomesReady(t *testing.T, c *cluster, version compile.KubeletComponents) {
	m := c.newTokenMachine(t, "ready-"+strings.ReplaceAll(version.KubernetesVersion, ".", "-"))
	m.version = version
	identity := m.identity(t)
	c.admit(t, identity)
	began := time.Now()
	m.startKubelet(t, "serverTLSBootstrap: true\n")
	harness.Eventually(t, time.Minute, "the node is ready", func() bool { return m.ready(t.Context()) == "" })
	t.Logf("ready after %s", time.Since(began).Round(10*time.Millisecond))
	p := m.watch(t)
	node, err := c.Client().CoreV1().Nodes().Get(t.Context(), m.name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if is := node.Status.NodeInfo.KubeletVersion; is != version.KubernetesVersion {
		t.Errorf("the kubelet's version is %s", is)
	}

	c.dismiss(t, identity)
	c.admit(t, append(identity, "addresses: ["+m.kubelet.Address()+"]\n"...))
	m.serves(t)

	leaf := m.leaf(t)
	sum := sha256.Sum256(leaf.Raw)
	record := m.record(t)
	if n := len(record.Status.Certificates); n != 1 || record.Status.Certificates[0].SHA256 != hex.EncodeToString(sum[:]) || record.Spec.NodeName != m.name {
		t.Errorf("the record does not know the certificate %x: %+v", sum, record)
	}
	hellos, proofs := m.requests(t)
	if len(hellos) != 1 || len(proofs) != 1 {
		t.Errorf("%d hellos and %d proofs", len(hellos), len(proofs))
	}

	harness.Eventually(t, 45*time.Second, "the Lease is renewed three times", func() bool { return p.Count() > 3 })
	commands := m.tpm.Count()
	if err := m.kubelet.Stop(); err != nil {
		t.Fatal(err)
	}
	if err := m.kubelet.Start(); err != nil {
		t.Fatal(err)
	}
	before := p.Count()
	harness.Eventually(t, 45*time.Second, "the Lease is renewed by the restarted kubelet", func() bool { return p.Count() > before+1 })
	p.Stop()
	p.Steady(t, maxGap, time.Now())
	if hellos, proofs := m.requests(t); len(hellos) != 1 || len(proofs) != 1 || m.tpm.Count() != commands || !m.leaf(t).Equal(leaf) {
		t.Errorf("after a restart: %d hellos, %d proofs, %d TPM commands more", len(hellos), len(proofs), m.tpm.Count()-commands)
	}
}

// approvesServing lets the controller approve serving certificates, which kube-controller-manager
// issues.
func (c *cluster) approvesServing(t *testing.T) {
	t.Helper()
	admin := filepath.Join(t.TempDir(), "admin.kubeconfig")
	if err := c.WriteKubeconfig(admin, c.AdminUser()); err != nil {
		t.Fatal(err)
	}
	if out, err := c.RunKubectl(t.Context(), admin, "apply", "-f", module+"/packaging/kubernetes/optional/serving.yaml"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := c.StartControllerManager(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// serves waits until the kubelet serves with a certificate of the cluster's, for the address that
// the inventory says the machine has.
func (m *machine) serves(t *testing.T) {
	t.Helper()
	roots := x509.NewCertPool()
	roots.AddCert(m.ClientCA().Certificate())
	dialer := &tls.Dialer{NetDialer: &net.Dialer{Timeout: 2 * time.Second}, Config: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}}
	began := time.Now()
	harness.Eventually(t, time.Minute, "the kubelet serves with an attested node's certificate", func() bool {
		connection, err := dialer.DialContext(t.Context(), "tcp", net.JoinHostPort(m.kubelet.Address(), "10250"))
		if err != nil {
			return false
		}
		defer func() { _ = connection.Close() }()
		// KEP-4872: API servers may require this name of the certificate that a kubelet serves
		// with.
		if name := connection.(*tls.Conn).ConnectionState().PeerCertificates[0].Subject.CommonName; name != "system:node:"+m.name {
			t.Errorf("the kubelet serves as %q", name)
		}
		return true
	})
	t.Logf("serves %s after its address was listed", time.Since(began).Round(10*time.Millisecond))
	list, err := m.Client().CertificatesV1().CertificateSigningRequests().List(t.Context(), metav1.ListOptions{FieldSelector: "spec.signerName=" + certificatesv1.KubeletServingSignerName})
	if err != nil {
		t.Fatal(err)
	}
	for _, item := range list.Items {
		if item.Spec.Username == "system:node:"+m.name && (len(item.Status.Conditions) != 1 || item.Status.Conditions[0].Reason != string(act.ReasonServing)) {
			t.Errorf("%s: %+v", item.Name, item.Status.Conditions)
		}
	}
}

// record returns the controller's record of the machine.
func (m *machine) record(t *testing.T) *v1alpha1.NodeAttestation {
	t.Helper()
	record := &v1alpha1.NodeAttestation{}
	if err := m.records(t).Get(t.Context(), client.ObjectKey{Namespace: controllerprocess.Namespace, Name: m.name}, record); err != nil {
		t.Fatal(err)
	}
	return record
}

// records returns a client for the controller's records.
func (c *cluster) records(t *testing.T) client.Client {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	api, err := client.New(c.AdminConfig(), client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	return api
}
