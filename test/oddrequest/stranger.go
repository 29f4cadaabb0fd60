// SPDX-License-Identifier: Apache-2.0

package oddrequest

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"

	"github.com/google/go-tpm/tpm2"
	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
)

// Stranger files well-formed hellos, each of another TPM that does not exist. No inventory names
// their EKs, so they wait. A hello takes a tenth of a millisecond to make.
type Stranger struct{ key crypto.Signer }

// NewStranger returns one, whose hellos are all for one key.
func NewStranger() (*Stranger, error) {
	key, _, err := csr.NewKey()
	return &Stranger{key}, err
}

// Hello returns a hello with a new EK, for a node of that name.
func (s *Stranger) Hello(nodeName string) (*certificatesv1.CertificateSigningRequest, error) {
	der, err := csr.PKCS10(csr.Identity{NodeName: nodeName, ProviderID: "test://" + nodeName}, s.key)
	if err != nil {
		return nil, err
	}
	document, err := strangersDocument()
	if err != nil {
		return nil, err
	}
	content, err := attestation.Request{PKCS10: der, Provider: tpm.Name, Data: document}.Marshal()
	if err != nil {
		return nil, err
	}
	return csr.Object(csr.NewName(), attestation.HelloSignerName, content, s.key.Public(), nil), nil
}

// strangersDocument has the public areas of an EK and an AK with the same key, which is no TPM's.
func strangersDocument() ([]byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	first := template.EKs()[0]
	ek, err := first.PublicArea(key.Public())
	if err != nil {
		return nil, err
	}
	ak := template.AK()
	ak.Unique = ek.Unique
	return attestation.Hello{
		Version: attestation.VersionTPM, Versions: attestation.Versions{attestation.VersionTPM}, SignerName: tpm.SignerName,
		EKTemplate: first.Name, EKPublic: tpm2.Marshal(ek), AKPublic: tpm2.Marshal(ak),
	}.Marshal()
}
