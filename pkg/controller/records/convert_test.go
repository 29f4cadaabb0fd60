// SPDX-License-Identifier: Apache-2.0

package records

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

// A machine that asks often must not fill its record until the CRD refuses it.
func TestRecordKeepsTheNewestCertificates(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	record := &v1alpha1.NodeAttestation{}
	record.Status.Certificates = []v1alpha1.IssuedCertificate{{RequestUID: "expired", NotAfter: metav1.NewTime(now.Add(-time.Second))}}
	note := func(i int, request *certificatesv1.CertificateSigningRequest) {
		t.Helper()
		der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{SerialNumber: big.NewInt(int64(i)), NotAfter: now.Add(time.Hour)},
			&x509.Certificate{SerialNumber: big.NewInt(int64(i))}, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		if err := AddCertificate(record, request, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), now); err != nil {
			t.Fatal(err)
		}
	}
	for i := range maxCertificates + 3 {
		note(i, requestNamed("", big.NewInt(int64(i)).String()))
	}
	got := record.Status.Certificates
	if len(got) != maxCertificates || got[0].RequestUID != "3" || !HasCertificateFor(record, "66") || HasCertificateFor(record, "2") || HasCertificateFor(record, "expired") {
		t.Errorf("%d certificates, the first for %s", len(got), got[0].RequestUID)
	}
	// A request whose certificate cannot be published does not push out the certificate in use.
	stuck := requestNamed("", "stuck")
	for i := range 3 * maxCertificates {
		note(i, stuck)
	}
	if got = record.Status.Certificates; len(got) != maxCertificates || !HasCertificateFor(record, "66") || !HasCertificateFor(record, "4") || HasCertificateFor(record, "3") || got[len(got)-1].RequestUID != "stuck" {
		t.Errorf("%d certificates, the first for %s", len(got), got[0].RequestUID)
	}
}

func requestNamed(name, uid string) *certificatesv1.CertificateSigningRequest {
	return &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(uid)}}
}
