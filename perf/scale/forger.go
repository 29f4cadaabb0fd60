// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"fmt"
	"math/big"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/oddrequest"
)

// forger is somebody with a token and a TPM of his own, who files requests in another's name.
type forger struct {
	signer string
	key    crypto.Signer
	pkcs10 []byte
	// broken is a request whose document ends in the middle, and costly a hello of the form it must
	// have. Its EK is one that the inventory has, so that there is a machine to look for; its
	// certificates are made up.
	broken, costly []byte
}

// newForger has the last machine's TPM make a hello in the first one's name.
func (s *site) newForger(ctx context.Context) (*forger, error) {
	victim, own := s.machines[0], s.machines[len(s.machines)-1]
	f := &forger{signer: tpm.SignerName}
	var err error
	if f.key, _, err = csr.NewKey(); err != nil {
		return nil, err
	}
	if f.pkcs10, err = csr.PKCS10(csr.Identity{NodeName: victim.Name, ProviderID: victim.ProviderID()}, f.key); err != nil {
		return nil, err
	}
	document, _, err := own.Provider.(provider.Challenger).Hello(ctx, provider.Request{
		Name: csr.NewName(), SignerName: tpm.SignerName, Version: attestation.VersionTPM, NodeName: victim.Name, ProviderID: victim.ProviderID(), PKCS10: f.pkcs10,
	})
	if err != nil {
		return nil, err
	}
	hello, err := attestation.ParseHello(document)
	if err != nil {
		return nil, err
	}
	if hello.EKCertificates, err = madeUp(hello); err != nil {
		return nil, err
	}
	costly, err := hello.Marshal()
	if err != nil {
		return nil, err
	}
	if f.costly, err = f.request(costly); err != nil {
		return nil, err
	}
	f.broken, err = f.request(costly[:len(costly)/2])
	return f, err
}

func (f *forger) request(document []byte) ([]byte, error) {
	return attestation.Request{PKCS10: f.pkcs10, Provider: tpm.Name, Data: document}.Marshal()
}

// proof returns one that refers to a hello which is not there.
func (f *forger) proof() ([]byte, error) {
	document, err := oddrequest.Proof(csr.NewName())
	if err != nil {
		return nil, err
	}
	return f.request(document)
}

// madeUp returns a certificate of the hello's EK and as many CAs as a hello may have. Each is
// signed by the next one, on the slowest accepted curve. A verifier that searches for a root
// verifies them all. BenchmarkHostileHello of pkg/verifier/tpm has the cheaper cases.
func madeUp(hello *attestation.Hello) ([][]byte, error) {
	ek, err := ekKey(hello)
	if err != nil {
		return nil, err
	}
	const count = attestation.MaxCertificates - 1
	keys, cas := make([]*ecdsa.PrivateKey, count), make([]*x509.Certificate, count)
	now := time.Now()
	for i := range count {
		if keys[i], err = ecdsa.GenerateKey(elliptic.P384(), rand.Reader); err != nil {
			return nil, err
		}
		cas[i] = &x509.Certificate{
			SerialNumber: big.NewInt(int64(i + 1)), Subject: pkix.Name{CommonName: fmt.Sprintf("Made up %d", i)}, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour),
			KeyUsage: x509.KeyUsageCertSign, BasicConstraintsValid: true, IsCA: true,
		}
	}
	name, err := swtpm.DirectorySAN(swtpm.TPMManufacturer, swtpm.TPMModel, swtpm.TPMVersion)
	if err != nil {
		return nil, err
	}
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(count + 1), NotBefore: cas[0].NotBefore, NotAfter: cas[0].NotAfter, KeyUsage: x509.KeyUsageKeyAgreement,
		// tcg-kp-EKCertificate
		UnknownExtKeyUsage: []asn1.ObjectIdentifier{{2, 23, 133, 8, 1}}, ExtraExtensions: []pkix.Extension{name},
	}
	first, err := x509.CreateCertificate(rand.Reader, leaf, cas[0], ek, keys[0])
	if err != nil {
		return nil, err
	}
	list := [][]byte{first}
	for i := range count {
		next := (i + 1) % count
		der, err := x509.CreateCertificate(rand.Reader, cas[i], cas[next], keys[i].Public(), keys[next])
		if err != nil {
			return nil, err
		}
		list = append(list, der)
	}
	return list, nil
}

func ekKey(hello *attestation.Hello) (crypto.PublicKey, error) {
	_, key, err := template.CheckEK(hello.EKPublic)
	return key, err
}
