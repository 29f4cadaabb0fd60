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

// sign signs a request as asked, but for the options.
func (n *node) sign(t *testing.T, request certificatesv1.CertificateSigningRequest, lifetime time.Duration, options ...testbed.SignOption) []byte {
	t.Helper()
	content, err := attestation.Parse(request.Spec.Request)
	if err != nil {
		t.Fatal(err)
	}
	certificate, err := n.ClientCA().SignCSR(content.PKCS10, time.Now().Add(-5*time.Minute), time.Now().Add(lifetime), options...)
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
	data, err := os.ReadFile(n.dir.File(file))
	if err != nil {
		t.Fatal(err)
	}
	return data
}
