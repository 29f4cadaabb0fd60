// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/x509"
	"encoding/asn1"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// Limits of a certification request.
const (
	// maxPKCS10 limits a request, in bytes. It is several times the size of a normal request.
	maxPKCS10     = 8 << 10
	maxProviderID = 1024
	minRSABits    = 2048
	maxRSABits    = 4096
	rsaExponent   = 65537
)

// The tags of DER (X.690) that occur in a certification request.
const (
	tagInteger     = 0x02
	tagBitString   = 0x03
	tagOctetString = 0x04
	tagOID         = 0x06
	tagUTF8        = 0x0c
	tagPrintable   = 0x13
	tagSequence    = 0x30
	tagSet         = 0x31
	tagAttributes  = 0xa0 // [0] of CertificationRequestInfo (RFC 2986, 4.1)
)

// The object identifiers of a certification request, as the content of their DER.
const (
	oidOrganization     = "\x55\x04\x0a"
	oidCommonName       = "\x55\x04\x03"
	oidSubjectAltName   = "\x55\x1d\x11"
	oidExtensionRequest = "\x2a\x86\x48\x86\xf7\x0d\x01\x09\x0e"     // RFC 2985, 5.4.2
	oidProviderID       = "\x2b\x06\x01\x04\x01\xd6\x79\x02\x01\x15" // 1.3.6.1.4.1.11129.2.1.21
)

// requestedCertificate has the content of a PKCS#10 request. A field is zero if its rule failed.
type requestedCertificate struct {
	key      crypto.PublicKey
	nodeName string
	// providerID is "" if its rule failed, and if the request has none.
	providerID string
	// addresses are the requested addresses of a serving certificate.
	addresses Addresses
}

// parsePKCS10 applies S3, S4 and S5 to a PKCS#10 request in DER. For serving certificates,
// alternative names take the place of S5. It checks bytes: it encodes the parsed values again, and
// compares. So it refuses everything that crypto/x509 ignores: a second
// common name, an unknown kind of alternative name, bytes between the elements.
func parsePKCS10(refusals *Refusals, der []byte, serving bool) requestedCertificate {
	parts, err := splitPKCS10(der)
	if err != nil {
		refusals.Add(ReasonUnsupportedKey, "certification request: %v", err)
		return requestedCertificate{}
	}
	var c requestedCertificate
	if c.key, err = parts.checkKey(der); err != nil {
		refusals.Add(ReasonUnsupportedKey, "certification request: %v", err)
	}
	if c.nodeName, err = nodeNameOf(parts.subject); err != nil {
		refusals.Add(ReasonSubjectMismatch, "subject: %v", err)
	}
	if serving {
		c.addresses, err = addressesOf(parts.attributes)
	} else {
		c.providerID, err = providerIDOf(parts.attributes)
	}
	if err != nil {
		refusals.Add(ReasonForbiddenExtension, "extensions: %v", err)
	}
	return c
}

// pkcs10Parts are the elements of a PKCS#10 request, each with its tag and length.
type pkcs10Parts struct {
	info, subject, publicKey, attributes, algorithm []byte
	// signature has no tag and length.
	signature []byte
}

var errStructure = errors.New("does not parse to its last byte")

func splitPKCS10(der []byte) (pkcs10Parts, error) {
	if len(der) > maxPKCS10 {
		return pkcs10Parts{}, fmt.Errorf("is longer than %d bytes", maxPKCS10)
	}
	outer, err := elements(der, tagSequence)
	if err != nil {
		return pkcs10Parts{}, err
	}
	all, err := elements(outer[0].Bytes, tagSequence, tagSequence, tagBitString)
	if err != nil {
		return pkcs10Parts{}, err
	}
	info, err := elements(all[0].Bytes, tagInteger, tagSequence, tagSequence, tagAttributes)
	if err != nil {
		return pkcs10Parts{}, err
	}
	signature := all[2].Bytes
	if len(signature) < 2 || signature[0] != 0 { // the number of unused bits
		return pkcs10Parts{}, errStructure
	}
	return pkcs10Parts{
		info: all[0].FullBytes, subject: info[1].FullBytes, publicKey: info[2].FullBytes, attributes: info[3].FullBytes,
		algorithm: all[1].FullBytes, signature: signature[1:],
	}, nil
}

// checkKey applies S3 to the parts of a request.
func (p pkcs10Parts) checkKey(der []byte) (crypto.PublicKey, error) {
	key, err := x509.ParsePKIXPublicKey(p.publicKey)
	if err != nil {
		return nil, errors.New("its key cannot be read")
	}
	if err := checkKeyKind(key); err != nil {
		return nil, err
	}
	algorithm := p.signatureAlgorithm()
	if algorithm == x509.UnknownSignatureAlgorithm {
		return nil, errors.New("it is not signed with ECDSA or RSA (PKCS #1 v1.5) and SHA-256, SHA-384 or SHA-512")
	}
	canonicalKey, err := x509.MarshalPKIXPublicKey(key)
	if err != nil {
		return nil, errors.New("its key cannot be written")
	}
	info := element(tagSequence, []byte{tagInteger, 1, 0}, p.subject, canonicalKey, p.attributes)
	if !bytes.Equal(der, element(tagSequence, info, p.algorithm, element(tagBitString, []byte{0}, p.signature))) {
		return nil, errors.New("it is not in its one encoding, or not of version 0")
	}
	request := x509.CertificateRequest{RawTBSCertificateRequest: p.info, Signature: p.signature, SignatureAlgorithm: algorithm, PublicKey: key}
	if request.CheckSignature() != nil {
		return nil, errors.New("it is not signed with its own key")
	}
	return key, nil
}

func checkKeyKind(key crypto.PublicKey) error {
	switch k := key.(type) {
	case *ecdsa.PublicKey:
		if k.Curve == elliptic.P256() || k.Curve == elliptic.P384() {
			return nil
		}
	case *rsa.PublicKey:
		if bits := k.N.BitLen(); bits >= minRSABits && bits <= maxRSABits && k.E == rsaExponent {
			return nil
		}
	}
	return errors.New("its key is not ECDSA P-256 or P-384, or RSA of 2048 to 4096 bits with exponent 65537")
}

// signatureAlgorithm returns the signature algorithm, if it is supported and in its only encoding.
// RSASSA-PSS and SHA-1 are not supported.
func (p pkcs10Parts) signatureAlgorithm() x509.SignatureAlgorithm {
	ecdsaWith := func(last byte) []byte { // RFC 5758, 3.2: no parameters
		return element(tagSequence, element(tagOID, []byte("\x2a\x86\x48\xce\x3d\x04\x03"), []byte{last}))
	}
	rsaWith := func(last byte) []byte { // RFC 4055, 5: the parameters are NULL
		return element(tagSequence, element(tagOID, []byte("\x2a\x86\x48\x86\xf7\x0d\x01\x01"), []byte{last}), []byte{0x05, 0})
	}
	for _, known := range []struct {
		der       []byte
		algorithm x509.SignatureAlgorithm
	}{
		{ecdsaWith(2), x509.ECDSAWithSHA256}, {ecdsaWith(3), x509.ECDSAWithSHA384}, {ecdsaWith(4), x509.ECDSAWithSHA512},
		{rsaWith(11), x509.SHA256WithRSA}, {rsaWith(12), x509.SHA384WithRSA}, {rsaWith(13), x509.SHA512WithRSA},
	} {
		if bytes.Equal(p.algorithm, known.der) {
			return known.algorithm
		}
	}
	return x509.UnknownSignatureAlgorithm
}

// nodeNameOf applies S4 to a Name in DER.
func nodeNameOf(subject []byte) (string, error) {
	errOther := errors.New("is not one O and one CN, each by itself, as PrintableString or UTF8String, in this order")
	names, err := elements(subject, tagSequence)
	if err != nil {
		return "", errOther
	}
	names, err = elements(names[0].Bytes, tagSet, tagSet)
	if err != nil {
		return "", errOther
	}
	var tags [2]byte
	var values [2]string
	for i, name := range names {
		attribute, err := elements(name.Bytes, tagSequence)
		if err != nil {
			return "", errOther
		}
		pair, err := elements(attribute[0].Bytes)
		if err != nil || len(pair) != 2 {
			return "", errOther
		}
		tags[i], values[i] = pair[1].FullBytes[0], string(pair[1].Bytes)
		if tags[i] != tagPrintable && tags[i] != tagUTF8 {
			return "", errOther
		}
	}
	if !bytes.Equal(subject, subjectOf(tags, values)) {
		return "", errOther
	}
	name, ok := strings.CutPrefix(values[1], userNode)
	if values[0] != groupNodes || !ok {
		return "", errors.New("is not O system:nodes and CN system:node:<name>")
	}
	if len(validation.IsDNS1123Subdomain(name)) > 0 {
		return "", errors.New("the node's name is not a DNS-1123 subdomain")
	}
	return name, nil
}

// subjectOf encodes a Name of an O and a CN.
func subjectOf(tags [2]byte, values [2]string) []byte {
	name := func(oid string, tag byte, value string) []byte {
		return element(tagSet, element(tagSequence, element(tagOID, []byte(oid)), element(tag, []byte(value))))
	}
	return element(tagSequence, name(oidOrganization, tags[0], values[0]), name(oidCommonName, tags[1], values[1]))
}

// extensionsOf returns the extensions in the attributes of a PKCS#10 request, with tag and length.
func extensionsOf(attributes []byte) ([]asn1.RawValue, error) {
	errOther := errors.New("there is an attribute other than one extensionRequest")
	all, err := elements(attributes, tagAttributes)
	if err != nil {
		return nil, errOther
	}
	all, err = elements(all[0].Bytes, tagSequence)
	if err != nil {
		return nil, errOther
	}
	attribute, err := elements(all[0].Bytes, tagOID, tagSet)
	if err != nil || string(attribute[0].Bytes) != oidExtensionRequest {
		return nil, errOther
	}
	lists, err := elements(attribute[1].Bytes, tagSequence)
	if err != nil {
		return nil, errOther
	}
	extensions, err := elements(lists[0].Bytes)
	if err != nil {
		return nil, errOther
	}
	return extensions, nil
}

// providerIDOf applies S5 to the attributes of a PKCS#10 request, with tag and length. It returns
// "" if there are none.
func providerIDOf(attributes []byte) (string, error) {
	if bytes.Equal(attributes, []byte{tagAttributes, 0}) {
		return "", nil
	}
	extensions, err := extensionsOf(attributes)
	if err != nil {
		return "", err
	}
	if slices.ContainsFunc(extensions, func(e asn1.RawValue) bool { return extensionIs(e, oidSubjectAltName) }) {
		return "", errors.New("there is a subject alternative name")
	}
	if len(extensions) != 1 || !extensionIs(extensions[0], oidProviderID) {
		return "", errors.New("the provider ID must be the only extension")
	}
	extension, err := elements(extensions[0].Bytes, tagOID, tagOctetString)
	if err != nil {
		return "", errors.New("the provider ID is critical, or not a DER extension")
	}
	value, err := elements(extension[1].Bytes, tagUTF8)
	if err != nil {
		return "", errors.New("the provider ID is not a UTF8String")
	}
	id := string(value[0].Bytes)
	if !isProviderID(id) {
		return "", errors.New("the provider ID is not 1 to 1024 bytes of printable UTF-8 without white space")
	}
	if !bytes.Equal(attributes, attributesOf(id)) {
		return "", errors.New("the provider ID is not in its one encoding")
	}
	return id, nil
}

// attributesOf encodes the attributes of a request with this provider ID.
func attributesOf(providerID string) []byte {
	return requestOfExtension(oidProviderID, element(tagUTF8, []byte(providerID)))
}

// requestOfExtension encodes the attributes of a request with one non-critical extension.
func requestOfExtension(oid string, value []byte) []byte {
	extension := element(tagSequence, element(tagOID, []byte(oid)), element(tagOctetString, value))
	return element(tagAttributes, element(tagSequence, element(tagOID, []byte(oidExtensionRequest)), element(tagSet, element(tagSequence, extension))))
}

func extensionIs(extension asn1.RawValue, oid string) bool {
	fields, err := elements(extension.Bytes)
	return err == nil && len(fields) > 0 && string(fields[0].FullBytes) == string(element(tagOID, []byte(oid)))
}

// isProviderID has the same rules as pkg/csr.CheckProviderID, which the plugin uses.
func isProviderID(id string) bool {
	return id != "" && len(id) <= maxProviderID && utf8.ValidString(id) &&
		!strings.ContainsFunc(id, func(r rune) bool { return unicode.IsSpace(r) || !unicode.IsPrint(r) })
}

// elements splits DER into its elements, to the last byte, and checks their tags if tags are given.
func elements(der []byte, tags ...byte) ([]asn1.RawValue, error) {
	var all []asn1.RawValue
	for len(der) > 0 {
		var value asn1.RawValue
		rest, err := asn1.Unmarshal(der, &value)
		if err != nil {
			return nil, errStructure
		}
		all, der = append(all, value), rest
	}
	if len(tags) == 0 {
		return all, nil
	}
	got := make([]byte, len(all))
	for i := range all {
		got[i] = all[i].FullBytes[0]
	}
	if !bytes.Equal(got, tags) {
		return nil, errStructure
	}
	return all, nil
}

// element encodes an element of DER.
func element(tag byte, content ...[]byte) []byte {
	joined := bytes.Join(content, nil)
	if len(joined) < 0x80 {
		return append([]byte{tag, byte(len(joined))}, joined...) //nolint:gosec // G115: less than 128
	}
	length := binary.BigEndian.AppendUint32(nil, uint32(len(joined))) //nolint:gosec // G115: spec.request has at most 128 KiB
	length = bytes.TrimLeft(length, "\x00")
	return slices.Concat([]byte{tag, 0x80 | byte(len(length))}, length, joined) //nolint:gosec // G115: 4 at most
}

// checkUsages applies S6 to a client (client auth) or a server (server auth). If the key is not
// known, either set of usages passes, since its rule has already added a refusal.
func checkUsages(refusals *Refusals, usages []certificatesv1.KeyUsage, key crypto.PublicKey, auth certificatesv1.KeyUsage) {
	plain := []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, auth}
	withRSA := append(slices.Clone(plain), certificatesv1.UsageKeyEncipherment)
	slices.Sort(plain)
	slices.Sort(withRSA)
	sorted := slices.Sorted(slices.Values(usages))
	_, isRSA := key.(*rsa.PublicKey)
	if (key == nil || !isRSA) && slices.Equal(sorted, plain) || (key == nil || isRSA) && slices.Equal(sorted, withRSA) {
		return
	}
	refusals.Add(ReasonUsageMismatch, "usages: are not digital signature and %s, with an RSA key also key encipherment, each once", auth)
}
