// SPDX-License-Identifier: Apache-2.0

package controller

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
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// What kube-controller-manager's own signer issues is denied under ours, though the TPM and the name are right.
func TestOddRequests(t *testing.T) {
	t.Setenv("GODEBUG", "rsa1024min=0")
	f := newFleet(t, nil)
	m := f.newMachine(t, "odd")
	f.inventoried(t, m)
	p := f.newPeer(t, m.chip, f.asToken(m.token), m.name, m.name)
	document, err := hello(t, p).Marshal()
	if err != nil {
		t.Fatal(err)
	}

	p256, _, err := csr.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	p224, err := ecdsa.GenerateKey(elliptic.P224(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	rsa1024, err := rsa.GenerateKey(rand.Reader, 1024)
	if err != nil {
		t.Fatal(err)
	}
	cn, o := asn1.ObjectIdentifier{2, 5, 4, 3}, asn1.ObjectIdentifier{2, 5, 4, 10}
	subject := func(values ...pkix.AttributeTypeAndValue) pkix.RDNSequence {
		var sequence pkix.RDNSequence
		for _, v := range values {
			sequence = append(sequence, pkix.RelativeDistinguishedNameSET{v})
		}
		return sequence
	}
	nodes, name := pkix.AttributeTypeAndValue{Type: o, Value: "system:nodes"}, pkix.AttributeTypeAndValue{Type: cn, Value: "system:node:" + m.name}
	plain := subject(nodes, name)
	providerID := func(san ...pkix.Extension) []pkix.Extension {
		value, err := asn1.MarshalWithParams("test://"+m.name, "utf8")
		if err != nil {
			t.Fatal(err)
		}
		return append([]pkix.Extension{{Id: csr.ProviderIDOID, Value: value}}, san...)
	}
	otherName := pkix.Extension{Id: asn1.ObjectIdentifier{2, 5, 29, 17}, Value: []byte("\x30\x12\xa0\x10\x06\x0a\x2b\x06\x01\x04\x01\x82\x37\x14\x02\x03\xa0\x02\x0c\x00")}
	usages := func(of ...certificatesv1.KeyUsage) []certificatesv1.KeyUsage { return of }
	serve := usages(certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth)
	for title, c := range map[string]struct {
		key        crypto.Signer
		subject    pkix.RDNSequence
		extensions []pkix.Extension
		provider   string
		usages     []certificatesv1.KeyUsage
		trailing   string
		bare       bool
		want       verifier.Reason
	}{
		"RSA-1024":          {key: rsa1024, want: verifier.ReasonUnsupportedKey},
		"P-224":             {key: p224, want: verifier.ReasonUnsupportedKey},
		"extra OU":          {subject: subject(nodes, pkix.AttributeTypeAndValue{Type: asn1.ObjectIdentifier{2, 5, 4, 11}, Value: "x"}, name), want: verifier.ReasonSubjectMismatch},
		"two CNs":           {subject: subject(nodes, pkix.AttributeTypeAndValue{Type: cn, Value: "system:node:other"}, name), want: verifier.ReasonSubjectMismatch},
		"two organizations": {subject: subject(nodes, pkix.AttributeTypeAndValue{Type: o, Value: "system:masters"}, name), want: verifier.ReasonSubjectMismatch},
		"system:masters":    {subject: subject(pkix.AttributeTypeAndValue{Type: o, Value: "system:masters"}, name), want: verifier.ReasonSubjectMismatch},
		"empty node name":   {subject: subject(nodes, pkix.AttributeTypeAndValue{Type: cn, Value: "system:node:"}), want: verifier.ReasonSubjectMismatch},
		"otherName SAN":     {extensions: providerID(otherName), want: verifier.ReasonForbiddenExtension},
		"empty SAN":         {extensions: providerID(pkix.Extension{Id: asn1.ObjectIdentifier{2, 5, 29, 17}, Value: []byte{0x30, 0}}), want: verifier.ReasonForbiddenExtension},
		"CA:TRUE":           {extensions: providerID(pkix.Extension{Id: asn1.ObjectIdentifier{2, 5, 29, 19}, Value: []byte{0x30, 3, 1, 1, 0xff}}), want: verifier.ReasonForbiddenExtension},
		"trailing garbage":  {trailing: "garbage", want: verifier.ReasonMalformedRequest},
		"extra PEM block":   {trailing: "-----BEGIN X-----\n-----END X-----\n", want: verifier.ReasonMalformedRequest},
		"no evidence":       {bare: true, want: verifier.ReasonMalformedRequest},
		"another provider":  {provider: "insecure", want: verifier.ReasonProviderMismatch},
		"server auth":       {usages: serve, want: verifier.ReasonUsageMismatch},
		"key encipherment": {
			usages: usages(certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth, certificatesv1.UsageKeyEncipherment),
			want:   verifier.ReasonUsageMismatch,
		},
	} {
		t.Run(title, func(t *testing.T) {
			if c.key == nil {
				c.key = p256
			}
			if c.subject == nil {
				c.subject = plain
			}
			if c.extensions == nil {
				c.extensions = providerID()
			}
			if c.provider == "" {
				c.provider = tpm.Name
			}
			if c.usages == nil {
				c.usages = csr.Usages(c.key.Public())
			}
			raw, err := asn1.Marshal(c.subject)
			if err != nil {
				t.Fatal(err)
			}
			der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{RawSubject: raw, ExtraExtensions: c.extensions}, c.key)
			if err != nil {
				t.Fatal(err)
			}
			for signer, data := range map[string][]byte{attestation.HelloSignerName: document, tpm.SignerName: f.lonelyProof(t, "node-csr-nowhere")} {
				content, err := attestation.Request{PKCS10: der, Provider: c.provider, Data: data}.Marshal()
				if err != nil {
					t.Fatal(err)
				}
				if c.bare {
					content = pem.EncodeToMemory(&pem.Block{Type: attestation.BlockRequest, Bytes: der})
				}
				object := csr.Object(csr.NewName(), signer, append(content, c.trailing...), c.key.Public(), nil)
				object.Spec.Usages = c.usages
				f.refused(t, p.file(t, object), string(c.want))
			}
		})
	}
	f.onlyFor(t, m.enrols(t).leaf)
}
