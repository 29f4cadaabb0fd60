// SPDX-License-Identifier: Apache-2.0

package node

import (
	"crypto/tls"
	"crypto/x509"
	"net"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// The API server listens on ::1 alone. A machine with an IPv6 address, and one with both families,
// become nodes. They serve with a certificate for each of their addresses.
func TestIPv6(t *testing.T) {
	t.Parallel()
	c := newClusterWith(t, testbed.Options{IPv6: true}, built.controller, func(c *config.Config) {
		c.Serving = config.Serving{Signers: []string{certificatesv1.KubeletServingSignerName}, ForbiddenAddresses: []string{"fd00:10:96::/112"}}
	})
	if !strings.HasPrefix(c.ServerURL(), "https://[::1]:") {
		t.Fatalf("the API server is at %s", c.ServerURL())
	}
	c.approvesServing(t)
	for name, options := range map[string]testbed.KubeletOptions{"ipv6": {IPv6Only: true}, "dual-stack": {IPv6: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := c.newTokenMachine(t, name)
			identity := m.identity(t)
			c.admit(t, identity)
			options.Kubeconfig, options.Config = m.execKubeconfig(), "serverTLSBootstrap: true\n"
			m.startKubeletOf(t, options)
			harness.Eventually(t, time.Minute, "the node is ready", func() bool { return m.ready(t.Context()) == "" })
			m.hasAddresses(t)
			c.dismiss(t, identity)
			c.admit(t, append(identity, "addresses: [\""+strings.Join(m.kubelet.Addresses(), "\", \"")+"\"]\n"...))
			m.serves(t)
			served := m.servingCertificate(t)
			if len(served.IPAddresses) != len(m.kubelet.Addresses()) {
				t.Errorf("a certificate for %v", served.IPAddresses)
			}
			for _, address := range m.kubelet.Addresses() {
				if err := served.VerifyHostname(address); err != nil {
					t.Error(err)
				}
			}
			if hellos, proofs := m.requests(t); len(hellos) != 1 || len(proofs) != 1 {
				t.Errorf("%d hellos and %d proofs", len(hellos), len(proofs))
			}
		})
	}
}

// hasAddresses checks that the Node has the addresses that its kubelet was given.
func (m *machine) hasAddresses(t *testing.T) {
	t.Helper()
	node, err := m.Client().CoreV1().Nodes().Get(t.Context(), m.name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var is []string
	for _, address := range node.Status.Addresses {
		if address.Type == corev1.NodeInternalIP {
			is = append(is, address.Address)
		}
	}
	if want := m.kubelet.Addresses(); strings.Join(is, " ") != strings.Join(want, " ") {
		t.Errorf("the Node has the addresses %q, its kubelet %q", is, want)
	}
}

// servingCertificate is what the kubelet shows to those who connect.
func (m *machine) servingCertificate(t *testing.T) *x509.Certificate {
	t.Helper()
	dialer := &tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true}}
	connection, err := dialer.DialContext(t.Context(), "tcp", net.JoinHostPort(m.kubelet.Address(), "10250"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = connection.Close() }()
	return connection.(*tls.Conn).ConnectionState().PeerCertificates[0]
}
