// SPDX-License-Identifier: Apache-2.0

// Package nitrotpm imitates the NitroTPM of an EC2 instance for tests: a CA of the shape of AWS's,
// the documents that it signs, and a TPM with AWS's vendor command. It was written from AWS's
// documentation, AWS's own tool and one real document. It was not compared with a real NitroTPM.
package nitrotpm

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha512"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation/nitrotpm"
)

// Certificate is a certificate with its key.
type Certificate struct {
	*x509.Certificate
	Key *ecdsa.PrivateKey
}

// Maker makes documents of one instance. A test may change its fields between two documents.
type Maker struct {
	// Instance and Region name the instance.
	Instance, Region string
	// Chain has the root, the CAs of the region, the zone and the instance, and the certificate
	// that signs, as in a real document.
	Chain []Certificate
	// PCRs are the values of the document.
	PCRs [nitrotpm.PCRCount][]byte
}

// New returns a maker with its own root. Its certificates are valid around now, as long as AWS's.
func New(instance, region string, now time.Time) (*Maker, error) {
	m := &Maker{Instance: instance, Region: region}
	for i := range m.PCRs {
		m.PCRs[i] = bytes.Repeat([]byte{byte(i)}, nitrotpm.DigestSize)
	}
	const day = 24 * time.Hour
	for i, level := range []struct {
		name          string
		before, after time.Duration
		pathLen       int
		ca            bool
		usage         x509.KeyUsage
	}{
		{name: "test.nitro-enclaves", before: 365 * day, after: 3650 * day, pathLen: -1, ca: true, usage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign},
		{name: "280d3d43ef972f09." + region + ".test.nitro-enclaves", before: 2 * day, after: 18 * day, pathLen: 2, ca: true, usage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign},
		{name: "529189572cc01ee0.zonal." + region + ".test.nitro-enclaves", before: day, after: 5 * day, pathLen: 1, ca: true, usage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign},
		{name: instance + "." + region + ".test.nitro-enclaves", before: time.Hour, after: 23 * time.Hour, pathLen: 0, ca: true, usage: x509.KeyUsageCertSign},
		{name: m.ModuleID() + "." + region + ".aws", before: time.Hour, after: 2 * time.Hour, usage: x509.KeyUsageDigitalSignature | x509.KeyUsageContentCommitment},
	} {
		template := &x509.Certificate{
			Subject:   pkix.Name{CommonName: level.name, Organization: []string{"Amazon"}, OrganizationalUnit: []string{"AWS"}, Country: []string{"US"}},
			NotBefore: now.Add(-level.before), NotAfter: now.Add(level.after), KeyUsage: level.usage,
			BasicConstraintsValid: true, IsCA: level.ca, MaxPathLen: level.pathLen, MaxPathLenZero: level.ca && level.pathLen == 0,
		}
		m.Chain = append(m.Chain, Certificate{})
		if err := m.Issue(i, template, elliptic.P384()); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// Issue replaces certificate i of the chain, by one with a new key. The certificates below it stay
// as they are.
func (m *Maker) Issue(i int, template *x509.Certificate, curve elliptic.Curve) error {
	key, err := ecdsa.GenerateKey(curve, rand.Reader)
	if err != nil {
		return err
	}
	if template.SerialNumber, err = rand.Int(rand.Reader, big.NewInt(1<<62)); err != nil {
		return err
	}
	// A parsed certificate as template has what the new one must not take from it.
	template.RawSubject, template.PublicKey, template.SubjectKeyId = nil, nil, nil
	parent, signer := template, key
	if i > 0 {
		parent, signer = m.Chain[i-1].Certificate, m.Chain[i-1].Key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		return fmt.Errorf("certificate %d: %w", i, err)
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		return err
	}
	m.Chain[i] = Certificate{certificate, key}
	return nil
}

// Root is the certificate to trust.
func (m *Maker) Root() *x509.Certificate { return m.Chain[0].Certificate }

// ModuleID is what a document calls the instance's TPM.
func (m *Maker) ModuleID() string { return m.Instance + "-tpm0000000000000000" }

// Content returns what a document with this nonce says, not signed.
func (m *Maker) Content(nonce []byte, now time.Time) nitrotpm.Document {
	d := nitrotpm.Document{
		ModuleID: m.ModuleID(), Timestamp: uint64(now.UnixMilli()), PCRs: m.PCRs, Nonce: nonce,
	}
	for _, c := range m.Chain {
		d.CABundle = append(d.CABundle, c.Raw)
	}
	last := len(d.CABundle) - 1
	d.Certificate, d.CABundle = d.CABundle[last], d.CABundle[:last]
	return d
}

// Document returns a signed document.
func (m *Maker) Document(nonce []byte, now time.Time) ([]byte, error) {
	content := m.Content(nonce, now)
	return m.Sign(content.Payload())
}

// Sign returns the document of a payload.
func (m *Maker) Sign(payload []byte) ([]byte, error) {
	signature, err := m.Signature(payload)
	if err != nil {
		return nil, err
	}
	return nitrotpm.Assemble(payload, signature), nil
}

// Signature returns the signature over a payload: r and s.
func (m *Maker) Signature(payload []byte) ([]byte, error) {
	digest := sha512.Sum384(nitrotpm.ToBeSigned(payload))
	r, s, err := ecdsa.Sign(rand.Reader, m.Chain[len(m.Chain)-1].Key, digest[:])
	if err != nil {
		return nil, err
	}
	signature := make([]byte, nitrotpm.SignatureSize)
	r.FillBytes(signature[:nitrotpm.SignatureSize/2])
	s.FillBytes(signature[nitrotpm.SignatureSize/2:])
	return signature, nil
}
