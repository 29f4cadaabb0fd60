// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
)

// A client that may file requests files as many bytes as the API server accepts. The requests name
// a signer that belongs to nobody, and do not fit into one answer of a reasonable size. Other
// machines are served all the same, by a controller that ran before and by one that starts
// afterwards.
func TestBulkyRequestsOfOthers(t *testing.T) {
	t.Parallel()
	w := newWorld(t, shared.management)
	c := w.newCluster(t, "workload", nil)
	process := w.start(t, nil)
	before := c.newMachine(t, "before", nil)
	before.enrols(t)

	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: "bulk"}}, key)
	if err != nil {
		t.Fatal(err)
	}
	bulk := append(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}), bytes.Repeat([]byte("x"), 1<<20)...)
	// a machine's credential may not ask that signer
	api, err := csr.NewClient(c.workload.AdminConfig())
	if err != nil {
		t.Fatal(err)
	}
	for i := range 80 {
		object := &certificatesv1.CertificateSigningRequest{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("bulk-%d", i)},
			Spec: certificatesv1.CertificateSigningRequestSpec{
				Request: bulk, SignerName: "example.com/nobody", Usages: []certificatesv1.KeyUsage{certificatesv1.UsageClientAuth},
			},
		}
		if _, err := api.Create(t.Context(), object, false); err != nil {
			t.Fatal(err)
		}
	}
	began := time.Now()
	c.newMachine(t, "during", nil).enrols(t)
	t.Logf("a machine was served in %s", time.Since(began).Round(time.Millisecond))

	if err := errors.Join(process.Kill(), process.Start(t.Context()), process.Ready(t.Context())); err != nil {
		t.Fatal(err)
	}
	began = time.Now()
	c.newMachine(t, "after", nil).enrols(t)
	t.Logf("by a controller that started with 80 MiB of requests there, in %s", time.Since(began).Round(time.Millisecond))
}
