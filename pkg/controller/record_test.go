// SPDX-License-Identifier: Apache-2.0

package controller

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

// A machine that asks again and again must not fill its record until it can no longer be written: the CRD takes as many certificates, and no more.
func TestRecordKeepsTheNewestCertificates(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	record := &v1alpha1.NodeAttestation{}
	record.Status.Certificates = []v1alpha1.IssuedCertificate{{RequestUID: "expired", NotAfter: metav1.NewTime(now.Add(-time.Second))}}
	for i := range maxCertificates + 3 {
		der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{SerialNumber: big.NewInt(int64(i)), NotAfter: now.Add(time.Hour)},
			&x509.Certificate{SerialNumber: big.NewInt(int64(i))}, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		request := &certificatesv1.CertificateSigningRequest{}
		request.UID = types.UID(big.NewInt(int64(i)).String())
		if err := noteCertificate(record, request, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), now); err != nil {
			t.Fatal(err)
		}
	}
	got := record.Status.Certificates
	if len(got) != maxCertificates || got[0].RequestUID != "3" || !noted(record, "66") || noted(record, "2") || noted(record, "expired") {
		t.Errorf("%d certificates, the first for %s", len(got), got[0].RequestUID)
	}
}
