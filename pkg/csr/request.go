// SPDX-License-Identifier: Apache-2.0

// Package csr is the plugin's side of the Kubernetes CSR API (certificates.k8s.io/v1, KEP-1513). It
// builds the PKCS#10 request and the CertificateSigningRequest, files it, and waits for the
// decision.
package csr

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/base32"
	"encoding/pem"
	"errors"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ProviderIDOID is the extension that carries the machine's provider ID in a request. The Cluster
// API proposal "Kubelet Authentication" calls it KubernetesNodeProviderIdentifierOID.
var ProviderIDOID = asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 11129, 2, 1, 21}

// maxProviderID bounds a provider ID, in bytes.
const maxProviderID = 1024

// Identity is the node that a request names.
type Identity struct {
	// NodeName is the Node's name, a DNS-1123 subdomain.
	NodeName string
	// ProviderID is the machine's spec.providerID. If it is empty, the request has no such
	// extension.
	ProviderID string
}

// NewKey returns a new ECDSA P-256 key and its PEM form (PKCS #8).
func NewKey() (crypto.Signer, []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("generate key: %w", err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, nil, fmt.Errorf("generate key: %w", err)
	}
	return key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

// ParseKey reads the PEM form that NewKey returns. The error quotes nothing.
func ParseKey(data []byte) (crypto.Signer, error) {
	block, rest := pem.Decode(data)
	if block == nil || block.Type != "PRIVATE KEY" || len(rest) > 0 {
		return nil, errors.New("key: not one PEM block of type PRIVATE KEY")
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, errors.New("key: not PKCS #8")
	}
	signer, ok := key.(crypto.Signer)
	if !ok {
		return nil, errors.New("key: cannot sign")
	}
	return signer, nil
}

// PKCS10 returns a certification request in DER (RFC 2986) for system:node:<name> in system:nodes.
// The provider ID is its only extension, and there is no subject alternative name.
func PKCS10(id Identity, key crypto.Signer) ([]byte, error) {
	template := &x509.CertificateRequest{
		Subject: pkix.Name{Organization: []string{"system:nodes"}, CommonName: "system:node:" + id.NodeName},
	}
	if id.ProviderID != "" {
		if err := CheckProviderID(id.ProviderID); err != nil {
			return nil, err
		}
		value, err := asn1.MarshalWithParams(id.ProviderID, "utf8")
		if err != nil {
			return nil, fmt.Errorf("provider ID: %w", err)
		}
		template.ExtraExtensions = []pkix.Extension{{Id: ProviderIDOID, Value: value}}
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, template, key)
	if err != nil {
		return nil, fmt.Errorf("build request for node %q: %w", id.NodeName, err)
	}
	return der, nil
}

// CheckProviderID returns an error unless id has 1 to maxProviderID bytes of printable UTF-8
// without white space.
func CheckProviderID(id string) error {
	if id == "" || len(id) > maxProviderID {
		return fmt.Errorf("provider ID: must have 1 to %d bytes", maxProviderID)
	}
	if !utf8.ValidString(id) || strings.ContainsFunc(id, func(r rune) bool { return unicode.IsSpace(r) || !unicode.IsPrint(r) }) {
		return errors.New("provider ID: must be printable UTF-8 without white space")
	}
	return nil
}

// NewName returns a name for a CertificateSigningRequest: "node-csr-" and 128 random bits in
// base32.
func NewName() string {
	var random [16]byte
	_, _ = rand.Read(random[:]) // never fails
	return "node-csr-" + strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(random[:]))
}

// Usages returns the key usages to request. They follow from the kind of key: key encipherment only
// makes sense with RSA (KEP-1513, kubernetes.io/kube-apiserver-client-kubelet).
func Usages(key crypto.PublicKey) []certificatesv1.KeyUsage {
	if _, ok := key.(*rsa.PublicKey); ok {
		return []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageKeyEncipherment, certificatesv1.UsageClientAuth}
	}
	return []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth}
}

// Object returns the CertificateSigningRequest to file, with the Usages of key. If
// expirationSeconds is nil, the signer decides on the lifetime.
func Object(name, signerName string, request []byte, key crypto.PublicKey, expirationSeconds *int32) *certificatesv1.CertificateSigningRequest {
	return &certificatesv1.CertificateSigningRequest{
		TypeMeta:   metav1.TypeMeta{APIVersion: certificatesv1.SchemeGroupVersion.String(), Kind: "CertificateSigningRequest"},
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:           request,
			SignerName:        signerName,
			Usages:            Usages(key),
			ExpirationSeconds: expirationSeconds,
		},
	}
}
