// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"time"

	"k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
)

const serverValidity = 24 * time.Hour

// anyTime is the lifetime of certificates that are valid by any clock.
var anyTime = [2]time.Time{time.Date(1960, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(2100, 1, 1, 0, 0, 0, 0, time.UTC)}

// CA is a certificate authority with a P-256 key in memory. Two of the same
// name are two different authorities, as tests of mismatches need them.
type CA struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// KeyPair is a certificate and its private key, both PEM.
type KeyPair struct {
	CertPEM []byte
	KeyPEM  []byte
}

// NewCA makes a self-signed authority, valid since an hour ago for ten years.
func NewCA(name string) (*CA, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("generate the key of CA %q: %w", name, err)
	}
	config := cert.Config{CommonName: name, NotBefore: time.Now().Add(-time.Hour)}
	self, err := cert.NewSelfSignedCACert(config, key)
	if err != nil {
		return nil, fmt.Errorf("self-sign CA %q: %w", name, err)
	}
	return &CA{cert: self, key: key}, nil
}

// newCAForAnyTime makes a self-signed authority that machines trust with any time on their clock.
func newCAForAnyTime(name string) (*CA, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("generate the key of CA %q: %w", name, err)
	}
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: name}, NotBefore: anyTime[0], NotAfter: anyTime[1], SerialNumber: big.NewInt(1),
		KeyUsage: x509.KeyUsageCertSign, BasicConstraintsValid: true, IsCA: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("self-sign CA %q: %w", name, err)
	}
	self, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("parse CA %q: %w", name, err)
	}
	return &CA{cert: self, key: key}, nil
}

// Certificate returns the authority's own certificate. Do not change it.
func (ca *CA) Certificate() *x509.Certificate { return ca.cert }

// CertPEM returns the authority's own certificate.
func (ca *CA) CertPEM() []byte { return certPEM(ca.cert.Raw) }

// KeyPEM returns the authority's private key.
func (ca *CA) KeyPEM() ([]byte, error) {
	return keyutil.MarshalPrivateKeyToPEM(ca.key)
}

// IssueServer issues a serving certificate, valid for a day.
func (ca *CA) IssueServer(names []string, ips []net.IP) (KeyPair, error) {
	now := time.Now()
	return ca.issueServer(names, ips, now.Add(-time.Hour), now.Add(serverValidity))
}

func (ca *CA) issueServer(names []string, ips []net.IP, notBefore, notAfter time.Time) (KeyPair, error) {
	return ca.issue(&x509.Certificate{
		Subject:     pkix.Name{CommonName: "server"},
		DNSNames:    names,
		IPAddresses: ips,
		NotBefore:   notBefore,
		NotAfter:    notAfter,
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	})
}

// IssueClient issues a client certificate: Kubernetes takes the common name as
// the user and the organizations as its groups.
func (ca *CA) IssueClient(cn string, orgs []string, notBefore, notAfter time.Time) (KeyPair, error) {
	return ca.issue(&x509.Certificate{
		Subject:     pkix.Name{CommonName: cn, Organization: orgs},
		NotBefore:   notBefore,
		NotAfter:    notAfter,
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
}

// SignOption changes the certificate that SignCSR is about to sign. All fields
// are honoured, PublicKey too, so that a test can have every wrong certificate.
type SignOption func(*x509.Certificate)

// SignCSR signs a PKCS#10 request as a client certificate with the subject and
// the key that were asked for, and returns it as PEM.
func (ca *CA) SignCSR(pkcs10DER []byte, notBefore, notAfter time.Time, opts ...SignOption) ([]byte, error) {
	request, err := x509.ParseCertificateRequest(pkcs10DER)
	if err != nil {
		return nil, fmt.Errorf("parse the request to sign: %w", err)
	}
	if err := request.CheckSignature(); err != nil {
		return nil, fmt.Errorf("request to sign: %w", err)
	}
	template := &x509.Certificate{
		RawSubject:  request.RawSubject,
		NotBefore:   notBefore,
		NotAfter:    notAfter,
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		PublicKey:   request.PublicKey,
	}
	for _, opt := range opts {
		opt(template)
	}
	der, err := ca.sign(template)
	if err != nil {
		return nil, err
	}
	return certPEM(der), nil
}

// WithSubject replaces the subject that was asked for.
func WithSubject(subject pkix.Name) SignOption {
	return func(c *x509.Certificate) {
		c.RawSubject = nil // it would win over Subject
		c.Subject = subject
	}
}

// WithPublicKey certifies another key than the one that was asked for.
func WithPublicKey(key any) SignOption {
	return func(c *x509.Certificate) { c.PublicKey = key }
}

// WithExtKeyUsage replaces "client authentication".
func WithExtKeyUsage(usages ...x509.ExtKeyUsage) SignOption {
	return func(c *x509.Certificate) { c.ExtKeyUsage = usages }
}

func (ca *CA) issue(template *x509.Certificate) (KeyPair, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return KeyPair{}, fmt.Errorf("generate a key for %q: %w", template.Subject, err)
	}
	template.PublicKey = key.Public()
	der, err := ca.sign(template)
	if err != nil {
		return KeyPair{}, err
	}
	keyPEM, err := keyutil.MarshalPrivateKeyToPEM(key)
	if err != nil {
		return KeyPair{}, fmt.Errorf("encode the key for %q: %w", template.Subject, err)
	}
	return KeyPair{CertPEM: certPEM(der), KeyPEM: keyPEM}, nil
}

func (ca *CA) sign(template *x509.Certificate) ([]byte, error) {
	if template.SerialNumber == nil {
		serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
		if err != nil {
			return nil, fmt.Errorf("choose a serial number: %w", err)
		}
		template.SerialNumber = serial.Add(serial, big.NewInt(1)) // zero is not allowed
	}
	der, err := x509.CreateCertificate(rand.Reader, template, ca.cert, template.PublicKey, ca.key)
	if err != nil {
		return nil, fmt.Errorf("sign with CA %q: %w", ca.cert.Subject.CommonName, err)
	}
	return der, nil
}

func certPEM(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: cert.CertificateBlockType, Bytes: der})
}
