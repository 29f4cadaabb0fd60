// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"os"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// sign signs a request as requested, except for the options.
func (n *node) sign(t *testing.T, request certificatesv1.CertificateSigningRequest, lifetime time.Duration, options ...testbed.SignOption) []byte {
	t.Helper()
	return n.signBy(t, n.ClientCA(), request, -5*time.Minute, lifetime, options...)
}

// signBy signs a request with a CA, with a validity relative to now.
func (n *node) signBy(t *testing.T, ca *testbed.CA, request certificatesv1.CertificateSigningRequest, from, until time.Duration, options ...testbed.SignOption) []byte {
	t.Helper()
	content, err := attestation.Parse(request.Spec.Request)
	if err != nil {
		t.Fatal(err)
	}
	certificate, err := ca.SignCSR(content.PKCS10, time.Now().Add(from), time.Now().Add(until), options...)
	if err != nil {
		t.Fatal(err)
	}
	return certificate
}

// issue approves a request and publishes a certificate, as a signer does.
func (n *node) issue(t *testing.T, name string, certificate []byte) {
	t.Helper()
	if err := n.Approve(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	if err := n.SetCertificate(t.Context(), name, certificate); err != nil {
		t.Fatal(err)
	}
}

func (n *node) remove(t *testing.T, name string) {
	t.Helper()
	if err := n.Client().CertificatesV1().CertificateSigningRequests().Delete(context.WithoutCancel(t.Context()), name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
}

func (n *node) read(t *testing.T, file string) []byte {
	t.Helper()
	return n.readPath(t, n.dir.File(file))
}

func (n *node) readPath(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}
