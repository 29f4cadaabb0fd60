// SPDX-License-Identifier: Apache-2.0

package azure

import (
	"bytes"
	"cmp"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"errors"
	"fmt"
	"math/big"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation/cloudname"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/cloud"
)

const (
	// maxDocument bounds a document, in bytes. Azure's have about 3,200.
	maxDocument = 8 << 10
	// minModulus and maxModulus bound the keys of certificates, in bits: their strength, and the
	// time that a signature takes to verify.
	minModulus, maxModulus = 2048, 4096
)

// These types are the form of Azure's documents: a PKCS#7 SignedData (RFC 2315, section 9.1) with
// its content, one signer, and no attributes. A signature over attributes could be taken for one
// over content that has the same bytes.
type (
	contentInfo struct {
		Type asn1.ObjectIdentifier
		Data signedDataForm `asn1:"explicit,tag:0"`
	}
	signedDataForm struct {
		Version      int
		Digests      []pkix.AlgorithmIdentifier `asn1:"set"`
		Content      dataForm
		Certificates asn1.RawValue
		Signers      []signerForm `asn1:"set"`
	}
	dataForm struct {
		Type asn1.ObjectIdentifier
		Data []byte `asn1:"explicit,tag:0"`
	}
	signerForm struct {
		Version     int
		Certificate issuerAndSerial
		Digest      pkix.AlgorithmIdentifier
		Encryption  pkix.AlgorithmIdentifier
		Signature   []byte
	}
	issuerAndSerial struct {
		Issuer asn1.RawValue
		Serial *big.Int
	}
)

// Azure names the algorithms so in all documents that were found, from 2022 to 2026. As the digest
// algorithm it names a signature algorithm, RSA with SHA-256 (RFC 8017, appendix A.2.4).
var (
	signedDataType = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 7, 2}
	dataType       = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 7, 1}
	sha256WithRSA  = pkix.AlgorithmIdentifier{Algorithm: asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 1, 11}, Parameters: asn1.NullRawValue}
	rsaEncryption  = pkix.AlgorithmIdentifier{Algorithm: asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 1, 1}, Parameters: asn1.NullRawValue}
)

// signedData is a parsed document. Nothing in it is verified.
type signedData struct {
	content, signature []byte
	// signer is the certificate that the signer information names, and others are the rest.
	signer *x509.Certificate
	others []*x509.Certificate
}

// parseSignedData accepts a document only in DER and in Azure's form. General parsers of PKCS#7 are
// not strict enough: github.com/smallstep/pkcs7 v0.2.3 takes BER, bytes at the end, and lengths
// beyond the value around them, and needs quadratic time for nested values.
func parseSignedData(der []byte) (*signedData, error) {
	if len(der) > maxDocument {
		return nil, fmt.Errorf("longer than %d bytes", maxDocument)
	}
	var form contentInfo
	if _, err := asn1.Unmarshal(der, &form); err != nil {
		return nil, errors.New("not a PKCS#7 SignedData with content, in DER")
	}
	bag := form.Data.Certificates
	switch {
	case bag.Class != asn1.ClassContextSpecific || bag.Tag != 0 || !bag.IsCompound:
		return nil, errors.New("it has no certificates")
	case len(form.Data.Signers) != 1:
		return nil, fmt.Errorf("it has %d signers, not one", len(form.Data.Signers))
	}
	// Only these parts differ between Azure's documents.
	s := form.Data.Signers[0]
	again, err := asn1.Marshal(contentInfo{signedDataType, signedDataForm{
		1, []pkix.AlgorithmIdentifier{sha256WithRSA}, dataForm{dataType, form.Data.Content.Data}, bag,
		[]signerForm{{1, s.Certificate, sha256WithRSA, rsaEncryption, s.Signature}},
	}})
	if err != nil || !bytes.Equal(again, der) {
		return nil, errors.New("not in the form of Azure's documents")
	}

	certificates, err := x509.ParseCertificates(bag.Bytes)
	if err != nil {
		return nil, errors.New("a certificate in it does not parse")
	}
	signed := &signedData{content: form.Data.Content.Data, signature: s.Signature}
	for _, c := range certificates {
		key, ok := c.PublicKey.(*rsa.PublicKey)
		if !ok || key.N.BitLen() < minModulus || key.N.BitLen() > maxModulus {
			return nil, fmt.Errorf("a certificate in it has no RSA key of %d to %d bits", minModulus, maxModulus)
		}
		// Issuer and serial number name the signer's certificate (RFC 2315, section 9.2). Its place
		// in the list means nothing.
		named := bytes.Equal(c.RawIssuer, s.Certificate.Issuer.FullBytes) && c.SerialNumber.Cmp(s.Certificate.Serial) == 0
		switch {
		case !named:
			signed.others = append(signed.others, c)
		case signed.signer != nil:
			return nil, errors.New("two certificates in it are the signer's")
		default:
			signed.signer = c
		}
	}
	if signed.signer == nil {
		return nil, errors.New("it does not have its signer's certificate")
	}
	return signed, nil
}

// verify returns an error unless the signer's key signed the content.
func (s *signedData) verify() error {
	return s.signer.CheckSignature(x509.SHA256WithRSA, s.content, s.signature)
}

// content is what a document says for each purpose.
type content struct {
	vmID, subscription, nonce string
	created, expires          time.Time
}

// parseContent parses the content of a document. Members that are not needed, such as plan and sku,
// are ignored: the creator of the VM chose them.
func parseContent(data []byte) (content, error) {
	members, err := cloud.ParseObject(data)
	if err != nil {
		return content{}, err
	}
	vmID, noVM := guid(members, "vmId")
	subscription, noSubscription := guid(members, "subscriptionId")
	nonce, noNonce := members.Text("nonce")
	if err := cmp.Or(noVM, noSubscription, noNonce); err != nil {
		return content{}, err
	}
	times, err := cloud.ParseObject(members["timeStamp"])
	if err != nil {
		return content{}, fmt.Errorf("timeStamp: %w", err)
	}
	created, noCreated := timeOf(times, "createdOn")
	expires, noExpires := timeOf(times, "expiresOn")
	if err := cmp.Or(noCreated, noExpires); err != nil {
		return content{}, fmt.Errorf("timeStamp: %w", err)
	}
	return content{vmID, subscription, nonce, created, expires}, nil
}

// guid returns a member that is a GUID.
func guid(o cloud.Object, name string) (string, error) {
	text, err := o.Text(name)
	if err == nil && !cloudname.IsGUID(text) {
		err = fmt.Errorf("%q is not a GUID in lower case", name)
	}
	return text, err
}

// timeOf returns a member that is a time. Azure writes 04/19/22 01:27:21 -0000.
func timeOf(o cloud.Object, name string) (time.Time, error) {
	const layout = "01/02/06 15:04:05 -0700"
	text, err := o.Text(name)
	if err != nil {
		return time.Time{}, err
	}
	t, err := time.Parse(layout, text)
	if err != nil || len(text) != len(layout) { // Parse also takes fractions of a second
		return time.Time{}, fmt.Errorf("%q is not a time such as %s", name, layout)
	}
	return t, nil
}
