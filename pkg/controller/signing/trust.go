// SPDX-License-Identifier: Apache-2.0

package signing

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"time"
)

// probeLifetime is the lifetime of the certificate that CheckTrusted verifies.
const probeLifetime = time.Minute

// CheckTrusted returns nil if an API server with these certificates in its --client-ca-file accepts
// the certificates that the CA signs. Any certificate of the CA's chain suffices.
//
// It verifies as the API server does, with path lengths, name constraints and key usages. For that
// it signs a certificate whose subject is no node's, throws the key away, and verifies the chain
// that a node would present.
func (ca *CA) CheckTrusted(trusted []*x509.Certificate, now time.Time) error {
	if err := ca.checkTime(now); err != nil {
		return err
	}
	public, _, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return err
	}
	serial, err := newSerial(rand.Reader)
	if err != nil {
		return err
	}
	probe := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "comparison of the signing CA with client-ca-file"},
		NotBefore: now.Add(-time.Second), NotAfter: now.Add(probeLifetime),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, probe, ca.chain[0], public, ca.key)
	if err != nil {
		return fmt.Errorf("sign a certificate to compare the signing CA by: %w", err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return fmt.Errorf("sign a certificate to compare the signing CA by: %w", err)
	}
	options := x509.VerifyOptions{
		Roots: x509.NewCertPool(), Intermediates: x509.NewCertPool(), CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	for _, c := range trusted {
		options.Roots.AddCert(c)
	}
	for _, c := range ca.issuersForNode() {
		options.Intermediates.AddCert(c)
	}
	_, err = leaf.Verify(options)
	return err
}
