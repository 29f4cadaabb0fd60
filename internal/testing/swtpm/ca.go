// SPDX-License-Identifier: Apache-2.0

package swtpm

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"fmt"
	"math/big"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// CA is the CA of a maker of TPMs: a root, and an intermediate that issues EK certificates.
type CA struct {
	Root, Intermediate *x509.Certificate

	intermediateKey *ecdsa.PrivateKey
}

// CertificateOption may change a certificate before it is signed.
type CertificateOption func(*x509.Certificate)

// TPMManufacturer, TPMModel and TPMVersion are the attributes by which an EK certificate describes
// its TPM (EK Credential Profile).
const (
	TPMManufacturer = "id:49424D00"
	TPMModel        = "swtpm"
	TPMVersion      = "id:20191023"
)

// NewCA returns a CA of its own.
func NewCA() (*CA, error) {
	newCert := func(name string, parent *x509.Certificate, parentKey *ecdsa.PrivateKey) (*x509.Certificate, *ecdsa.PrivateKey, error) {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			return nil, nil, err
		}
		c := &x509.Certificate{
			SerialNumber:          serial(),
			Subject:               pkix.Name{Organization: []string{"swtpm"}, CommonName: name},
			NotBefore:             time.Now().Add(-time.Hour),
			NotAfter:              time.Now().Add(24 * time.Hour),
			KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
			BasicConstraintsValid: true,
			IsCA:                  true,
		}
		if parent == nil {
			parent, parentKey = c, key
		}
		der, err := x509.CreateCertificate(rand.Reader, c, parent, key.Public(), parentKey)
		if err != nil {
			return nil, nil, err
		}
		parsed, err := x509.ParseCertificate(der)
		return parsed, key, err
	}
	root, rootKey, err := newCert("Root", nil, nil)
	if err != nil {
		return nil, err
	}
	intermediate, key, err := newCert("Intermediate", root, rootKey)
	if err != nil {
		return nil, err
	}
	return &CA{Root: root, Intermediate: intermediate, intermediateKey: key}, nil
}

// Issue returns a certificate in DER for an EK, by the intermediate, as the EK Credential Profile
// demands. Its subject is empty, so that a critical alternative name describes the TPM, and it has
// the extended key usage for EKs. The option may change it.
func (c *CA) Issue(ek crypto.PublicKey, option CertificateOption) ([]byte, error) {
	san, err := DirectorySAN(TPMManufacturer, TPMModel, TPMVersion)
	if err != nil {
		return nil, err
	}
	cert := &x509.Certificate{
		SerialNumber:          serial(),
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().Add(24 * time.Hour),
		KeyUsage:              x509.KeyUsageKeyAgreement,
		UnknownExtKeyUsage:    []asn1.ObjectIdentifier{{2, 23, 133, 8, 1}}, // tcg-kp-EKCertificate
		BasicConstraintsValid: true,
		ExtraExtensions:       []pkix.Extension{san},
	}
	if _, ok := ek.(*rsa.PublicKey); ok {
		cert.KeyUsage = x509.KeyUsageKeyEncipherment
	}
	if option != nil {
		option(cert)
	}
	return x509.CreateCertificate(rand.Reader, cert, c.Intermediate, ek, c.intermediateKey)
}

// DirectorySAN is the alternative name of an EK certificate: a directoryName of the TPM's
// manufacturer, model and version.
func DirectorySAN(manufacturer, model, version string) (pkix.Extension, error) {
	var name pkix.RDNSequence
	for i, value := range []string{manufacturer, model, version} {
		name = append(name, pkix.RelativeDistinguishedNameSET{{Type: asn1.ObjectIdentifier{2, 23, 133, 2, i + 1}, Value: value}})
	}
	der, err := asn1.Marshal(name)
	if err != nil {
		return pkix.Extension{}, err
	}
	// GeneralNames ::= SEQUENCE OF GeneralName, directoryName [4] EXPLICIT Name (RFC 5280,
	// 4.2.1.6)
	value, err := asn1.Marshal([]asn1.RawValue{{Class: asn1.ClassContextSpecific, Tag: 4, IsCompound: true, Bytes: der}})
	return pkix.Extension{Id: asn1.ObjectIdentifier{2, 5, 29, 17}, Critical: true, Value: value}, err
}

func serial() *big.Int {
	var random [12]byte
	_, _ = rand.Read(random[:]) // never fails
	return new(big.Int).SetBytes(append([]byte{1}, random[:]...))
}

// setup makes a TPM's state with swtpm_setup, and a CA with swtpm_localca, all below dir.
func setup(dir, state string, more []string) (*CA, error) {
	path := func(name string) string { return filepath.Join(dir, name) }
	ca := path("ca")
	for name, content := range map[string]string{
		"setup.conf": fmt.Sprintf("create_certs_tool = swtpm_localca\ncreate_certs_tool_config = %s\ncreate_certs_tool_options = %s\n"+
			"active_pcr_banks = sha256\n", path("ca.conf"), path("ca.options")),
		"ca.conf": fmt.Sprintf("statedir = %s\nsigningkey = %s\nissuercert = %s\ncertserial = %s\n",
			ca, filepath.Join(ca, "key.pem"), filepath.Join(ca, "cert.pem"), filepath.Join(ca, "serial")),
		"ca.options": "--platform-manufacturer test\n--platform-version 1\n--platform-model test\n",
	} {
		if err := os.WriteFile(path(name), []byte(content), 0o600); err != nil {
			return nil, err
		}
	}
	if err := os.Mkdir(ca, 0o700); err != nil {
		return nil, err
	}
	//nolint:gosec // the arguments are this package's own
	cmd := exec.Command("swtpm_setup", append([]string{"--tpm2", "--tpmstate", state, "--config", path("setup.conf"), "--create-ek-cert", "--lock-nvram"}, more...)...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("swtpm_setup: %w: %s", err, bytes.TrimSpace(out))
	}
	read := func(name string) (*x509.Certificate, error) {
		data, err := os.ReadFile(filepath.Join(ca, name))
		if err != nil {
			return nil, err
		}
		block, _ := pem.Decode(data)
		if block == nil {
			return nil, fmt.Errorf("%s: no PEM", name)
		}
		return x509.ParseCertificate(block.Bytes)
	}
	intermediate, err := read("cert.pem")
	if err != nil {
		return nil, err
	}
	root, err := read("swtpm-localca-rootca-cert.pem")
	if err != nil {
		return nil, err
	}
	return &CA{Root: root, Intermediate: intermediate}, nil
}
