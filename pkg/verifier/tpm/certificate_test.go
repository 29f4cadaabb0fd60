// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"fmt"
	"testing"
)

// An attacker may send five CAs with one key or one name in a hello. Only one of them is used,
// since crypto/x509 would try them in every order. One whose signatures take long to verify is
// none.
func TestAnIssuerIsTakenOnce(t *testing.T) {
	k := theKit()
	own := newCA("Made up", nil, nil)
	list := [][]byte{own.certificate.Raw, []byte("odd"), own.certificate.Raw}
	for i := range 4 {
		another := *own.certificate
		another.DNSNames = []string{fmt.Sprintf("ca-%d.example.com", i)}
		list = append(list, must(x509.CreateCertificate(rand.Reader, &another, own.certificate, own.key.Public(), own.key)))
	}
	for range 4 {
		list = append(list, newCA("Made up", nil, nil).certificate.Raw)
	}
	list = append(list, ring(&k.ecEKs["ecc-p256"].PublicKey, elliptic.P521())[1:]...)
	list = append(list, k.root.certificate.Raw)
	if got := usableIssuers(list); len(got) != 2 || !got[0].Equal(own.certificate) || !got[1].Equal(k.root.certificate) {
		t.Errorf("%d issuers", len(got))
	}
}
