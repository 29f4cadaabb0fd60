// SPDX-License-Identifier: Apache-2.0

// Package oddrequest has requests that no honest node files, for tests of the controller with each
// of its sources of machines. They have the names of a real machine, and are refused for their
// form.
package oddrequest

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// Request is one. What is not set is as an honest node has it.
type Request struct {
	// Title says what is odd, and Reason why it is refused.
	Title  string
	Reason verifier.Reason

	key        crypto.Signer
	subject    pkix.RDNSequence
	extensions []pkix.Extension
	provider   string
	usages     []certificatesv1.KeyUsage
	// trailing follows the blocks; bare is without evidence.
	trailing string
	bare     bool
}

var (
	oidCommonName   = asn1.ObjectIdentifier{2, 5, 4, 3}
	oidOrganization = asn1.ObjectIdentifier{2, 5, 4, 10}
	oidUnit         = asn1.ObjectIdentifier{2, 5, 4, 11}
	// SubjectAltName is the extension of alternative names.
	SubjectAltName = asn1.ObjectIdentifier{2, 5, 29, 17}
	// OtherName is the value of one that crypto/x509 passes over: a user principal name.
	OtherName = []byte("\x30\x12\xa0\x10\x06\x0a\x2b\x06\x01\x04\x01\x82\x37\x14\x02\x03\xa0\x02\x0c\x00")
)

func subject(values ...pkix.AttributeTypeAndValue) pkix.RDNSequence {
	var sequence pkix.RDNSequence
	for _, v := range values {
		sequence = append(sequence, pkix.RelativeDistinguishedNameSET{v})
	}
	return sequence
}

// All returns odd requests in the name of a machine.
func All(nodeName, providerID string) ([]Request, error) {
	good, _, err := csr.NewKey()
	if err != nil {
		return nil, err
	}
	p224, err := ecdsa.GenerateKey(elliptic.P224(), rand.Reader)
	if err != nil {
		return nil, err
	}
	short, err := rsa.GenerateKey(rand.Reader, 1024) //nolint:gosec // G403: that is what is odd
	if err != nil {
		return nil, err
	}
	id, err := asn1.MarshalWithParams(providerID, "utf8")
	if err != nil {
		return nil, err
	}
	extensions := func(more ...pkix.Extension) []pkix.Extension {
		return append([]pkix.Extension{{Id: csr.ProviderIDOID, Value: id}}, more...)
	}
	named := func(name string) pkix.AttributeTypeAndValue {
		return pkix.AttributeTypeAndValue{Type: oidCommonName, Value: name}
	}
	in := func(group string) pkix.AttributeTypeAndValue {
		return pkix.AttributeTypeAndValue{Type: oidOrganization, Value: group}
	}
	nodes, masters, name := in("system:nodes"), in("system:masters"), named("system:node:"+nodeName)
	usages := func(of ...certificatesv1.KeyUsage) []certificatesv1.KeyUsage { return of }
	all := []Request{
		{Title: "RSA-1024", key: short, Reason: verifier.ReasonUnsupportedKey},
		{Title: "P-224", key: p224, Reason: verifier.ReasonUnsupportedKey},
		{Title: "extra OU", subject: subject(nodes, pkix.AttributeTypeAndValue{Type: oidUnit, Value: "x"}, name), Reason: verifier.ReasonSubjectMismatch},
		{Title: "two CNs", subject: subject(nodes, named("system:node:other"), name), Reason: verifier.ReasonSubjectMismatch},
		{Title: "two organizations", subject: subject(nodes, masters, name), Reason: verifier.ReasonSubjectMismatch},
		{Title: "system:masters", subject: subject(masters, name), Reason: verifier.ReasonSubjectMismatch},
		{Title: "empty node name", subject: subject(nodes, named("system:node:")), Reason: verifier.ReasonSubjectMismatch},
		{Title: "otherName SAN", extensions: extensions(pkix.Extension{Id: SubjectAltName, Value: OtherName}), Reason: verifier.ReasonForbiddenExtension},
		{Title: "empty SAN", extensions: extensions(pkix.Extension{Id: SubjectAltName, Value: []byte{0x30, 0}}), Reason: verifier.ReasonForbiddenExtension},
		{
			Title: "CA:TRUE", extensions: extensions(pkix.Extension{Id: asn1.ObjectIdentifier{2, 5, 29, 19}, Value: []byte{0x30, 3, 1, 1, 0xff}}),
			Reason: verifier.ReasonForbiddenExtension,
		},
		{Title: "trailing garbage", trailing: "garbage", Reason: verifier.ReasonMalformedRequest},
		{Title: "extra PEM block", trailing: "-----BEGIN X-----\n-----END X-----\n", Reason: verifier.ReasonMalformedRequest},
		{Title: "no evidence", bare: true, Reason: verifier.ReasonMalformedRequest},
		{Title: "another provider", provider: "insecure", Reason: verifier.ReasonProviderMismatch},
		{
			Title: "server auth", usages: usages(certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth),
			Reason: verifier.ReasonUsageMismatch,
		},
		{
			Title:  "key encipherment",
			usages: usages(certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth, certificatesv1.UsageKeyEncipherment),
			Reason: verifier.ReasonUsageMismatch,
		},
	}
	for i := range all {
		r := &all[i]
		if r.key == nil {
			r.key = good
		}
		if r.subject == nil {
			r.subject = subject(nodes, name)
		}
		if r.extensions == nil {
			r.extensions = extensions()
		}
		if r.provider == "" {
			r.provider = tpm.Name
		}
		if r.usages == nil {
			r.usages = csr.Usages(r.key.Public())
		}
	}
	return all, nil
}

// Object returns the object to file under a signer, with a document of evidence.
func (r Request) Object(signer string, document []byte) (*certificatesv1.CertificateSigningRequest, error) {
	raw, err := asn1.Marshal(r.subject)
	if err != nil {
		return nil, err
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{RawSubject: raw, ExtraExtensions: r.extensions}, r.key)
	if err != nil {
		return nil, err
	}
	content := pem.EncodeToMemory(&pem.Block{Type: attestation.BlockRequest, Bytes: der})
	if !r.bare {
		if content, err = (attestation.Request{PKCS10: der, Provider: r.provider, Data: document}).Marshal(); err != nil {
			return nil, err
		}
	}
	object := csr.Object(csr.NewName(), signer, append(content, r.trailing...), r.key.Public(), nil)
	object.Spec.Usages = r.usages
	return object, nil
}

// Proof returns a proof's document that is well-formed and proves nothing, for a hello of that
// name.
func Proof(helloName string) ([]byte, error) {
	return attestation.Proof{
		Version: attestation.VersionTPM, HelloName: helloName, HelloUID: "uid", KeyID: "k1", Expires: time.Now().Add(time.Minute).Unix(),
		PCRBank: "sha256", PCRs: []attestation.PCR{{Index: 0, Value: make([]byte, 32)}}, Quote: []byte{1}, Signature: []byte{1},
	}.Marshal()
}
