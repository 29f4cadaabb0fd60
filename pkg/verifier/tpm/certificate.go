// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// maxRSA and maxCurve limit the keys of CAs that a node sends, in bits, since a larger key's
// signature takes long to verify. If a manufacturer has such a CA, the operator can configure it.
const (
	maxRSA   = 4096
	maxCurve = 384
)

// ekCertificate has the data about the TPM in a verified EK certificate. The TPM's manufacturer
// vouches for it.
type ekCertificate struct {
	// manufacturer is the id of the TPM's manufacturer (TCG TPM Vendor ID Registry): "IFX", or
	// eight hex digits if it is not ASCII. It is empty, like model and version, if the certificate
	// has no subject alternative name.
	manufacturer, model, version string
	// subject and issuer are distinguished names (RFC 2253); the subject is usually empty. serial
	// is in hex.
	subject, issuer, serial string
	notBefore, notAfter     time.Time
}

// Object identifiers of X.509 (RFC 5280) and of the TCG (EK Credential Profile, section 4).
func oidSubjectAltName() asn1.ObjectIdentifier { return asn1.ObjectIdentifier{2, 5, 29, 17} }
func oidEKCertificate() asn1.ObjectIdentifier  { return asn1.ObjectIdentifier{2, 23, 133, 8, 1} }
func oidManufacturer() asn1.ObjectIdentifier   { return asn1.ObjectIdentifier{2, 23, 133, 2, 1} }
func oidModel() asn1.ObjectIdentifier          { return asn1.ObjectIdentifier{2, 23, 133, 2, 2} }
func oidVersion() asn1.ObjectIdentifier        { return asn1.ObjectIdentifier{2, 23, 133, 2, 3} }

// verifyCertificates judges the certificates of a hello: the EK's and its issuers'. It returns
// either the verified EK certificate, or problems.
func (v *Verifier) verifyCertificates(ek *candidateEK, list [][]byte, at time.Time) (*ekCertificate, verifier.Refusals) {
	var problems verifier.Refusals
	if len(list) == 0 {
		problems.Add(reasonEKUntrusted, "EK: it has no certificate, and no authoritative source names it")
		return nil, problems
	}
	parsed, err := parseCertificate(list[0])
	if err != nil {
		problems.Add(reasonEKCertMalformed, "EK: the certificate %v", err)
		return nil, problems
	}
	leaf := *withFoldedNames(parsed)
	issuers := usableIssuers(list[1:])
	if certified, err := template.CertifiedKey(&leaf); err != nil || !sameKey(certified, ek.key) {
		problems.Add(reasonEKCertMismatch, "EK: the certificate is another key's")
		return nil, problems
	}
	if leaf.IsCA || leaf.KeyUsage&(x509.KeyUsageCertSign|x509.KeyUsageCRLSign) != 0 {
		problems.Add(reasonEKIsCA, "EK: the certificate is a CA's")
	}
	if problem := checkUsage(&leaf); problem != "" {
		problems.Add(reasonEKUsage, "EK: the certificate %s", problem)
	}
	name, err := subjectAltName(&leaf)
	if err != nil {
		problems.Add(reasonEKSubjectAltName, "EK: %v", err)
	}
	// crypto/x509 reports a critical subject alternative name without DNS name, address or URI as
	// unhandled. subjectAltName has handled it.
	leaf.UnhandledCriticalExtensions = slices.DeleteFunc(slices.Clone(leaf.UnhandledCriticalExtensions), oidSubjectAltName().Equal)
	if unknown := leaf.UnhandledCriticalExtensions; len(unknown) > 0 {
		problems.Add(reasonEKCriticalExtension, "EK: the certificate has critical extension %.64s", unknown[0])
		leaf.UnhandledCriticalExtensions = nil // reported once
	}
	if problem := v.verifyChain(&leaf, issuers, at); problem != nil {
		problems = append(problems, *problem)
	}
	if len(problems) > 0 {
		return nil, problems
	}
	return &ekCertificate{
		manufacturer: name.manufacturer, model: name.model, version: name.version,
		subject: leaf.Subject.String(), issuer: leaf.Issuer.String(), serial: leaf.SerialNumber.Text(16),
		notBefore: leaf.NotBefore, notAfter: leaf.NotAfter,
	}, nil
}

// usableIssuers returns the usable issuer certificates in a hello. It skips data that is not X.509:
// some manufacturers add such data, and it cannot lead to a root.
//
// It uses each folded name and each key once. Otherwise a node could send several CAs of one name,
// which crypto/x509 would try in every order.
func usableIssuers(list [][]byte) []*x509.Certificate {
	var issuers []*x509.Certificate
	for _, der := range list {
		parsed, err := parseCertificate(der)
		if err != nil || isSlow(parsed) {
			continue
		}
		issuer := withFoldedNames(parsed)
		if !slices.ContainsFunc(issuers, func(other *x509.Certificate) bool {
			return bytes.Equal(other.RawSubject, issuer.RawSubject) || bytes.Equal(other.RawSubjectPublicKeyInfo, issuer.RawSubjectPublicKeyInfo)
		}) {
			issuers = append(issuers, issuer)
		}
	}
	return issuers
}

// parseCertificate parses one certificate to its last byte. The reader of the TPM has removed the
// padding.
func parseCertificate(der []byte) (*x509.Certificate, error) {
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, errors.New("does not parse as X.509")
	}
	if len(certificate.Raw) != len(der) {
		return nil, errors.New("has bytes after it")
	}
	return certificate, nil
}

// isSlow reports whether a signature by the key of a certificate takes long to verify.
func isSlow(certificate *x509.Certificate) bool {
	switch key := certificate.PublicKey.(type) {
	case *rsa.PublicKey:
		return key.N.BitLen() > maxRSA
	case *ecdsa.PublicKey:
		return key.Curve.Params().BitSize > maxCurve
	}
	return false
}

// sameKey compares keys, not their encodings.
func sameKey(a, b crypto.PublicKey) bool {
	key, ok := a.(interface{ Equal(crypto.PublicKey) bool })
	return ok && key.Equal(b)
}

// checkUsage returns what is wrong with the usages of an EK certificate, "" if nothing is.
//
// The EK Credential Profile (section 3.2, "Extended Key Usage") has tcg-kp-EKCertificate for EKs.
// Some issuers leave it out, but it is required here. Without it, any certificate of the same CA
// would pass for an EK's, such as a web server's with a software key. An authoritative source can
// name an EK whose certificate lacks it. anyExtendedKeyUsage is no substitute.
//
// Key usage (section 3.2, "Key Usage") is keyEncipherment with RSA and keyAgreement with ECC.
// Manufacturers confuse them: Intel's ECC EKs have the former, Microsoft's RSA EKs the latter. So
// either is accepted. A key usage with neither is refused.
func checkUsage(leaf *x509.Certificate) string {
	if !slices.ContainsFunc(leaf.UnknownExtKeyUsage, oidEKCertificate().Equal) {
		return "lacks the extended key usage tcg-kp-EKCertificate"
	}
	if leaf.KeyUsage != 0 && leaf.KeyUsage&(x509.KeyUsageKeyEncipherment|x509.KeyUsageKeyAgreement) == 0 {
		return "is for neither key encipherment nor key agreement"
	}
	return ""
}

// verifyChain returns why leaf does not lead to a root at the time at, nil if it does. CAs that a
// node sends are only used as intermediates.
func (v *Verifier) verifyChain(leaf *x509.Certificate, fromNode []*x509.Certificate, at time.Time) *verifier.Refusal {
	var problem verifier.Refusals
	if !v.hasRoots {
		problem.Add(reasonEKUntrusted, "EK: no roots are configured for its certificate, and no authoritative source names it")
		return &problem[0]
	}
	intermediates := v.intermediates.Clone()
	for _, ca := range fromNode {
		intermediates.AddCert(ca)
	}
	// Roots is never nil here: crypto/x509 would use the system's.
	chains, err := leaf.Verify(x509.VerifyOptions{
		Roots: v.roots, Intermediates: intermediates, CurrentTime: at, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny},
	})
	if err == nil {
		chains = slices.DeleteFunc(chains, func(chain []*x509.Certificate) bool { return slices.ContainsFunc(chain[1:], notForEKs) })
		switch {
		case slices.ContainsFunc(chains, v.hasNoDeniedCA):
			return nil
		case len(chains) == 0:
			problem.Add(reasonEKUsage, "EK: its certificate leads to a root only through a CA that is not for EKs")
		default:
			problem.Add(reasonEKChainDenied, "EK: its certificate leads to a root through a denied CA only")
		}
		return &problem[0]
	}
	intermediates = v.timelessIntermediates.Clone()
	for _, ca := range fromNode {
		intermediates.AddCert(withoutDates(ca))
	}
	if _, err := withoutDates(leaf).Verify(x509.VerifyOptions{
		Roots: v.timelessRoots, Intermediates: intermediates, CurrentTime: at, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny},
	}); err == nil {
		problem.Add(reasonEKChainExpired, "EK: its certificate, or a CA's above it, is not valid at %s", at.UTC().Format(time.RFC3339))
		return &problem[0]
	}
	if weak := v.signedWithSHA1(leaf, fromNode); weak != nil {
		which := "it"
		if weak != leaf {
			which = fmt.Sprintf("the CA %.64q above it", weak.Subject.String())
		}
		problem.Add(reasonEKChainSHA1, "EK: its certificate leads to a root, but %s is signed with SHA-1, which counts for nothing: an inventory can name the EK", which)
		return &problem[0]
	}
	problem.Add(reasonEKChainUnknown, "EK: its certificate leads to no root that is configured")
	return &problem[0]
}

// signedWithSHA1 returns the first certificate with a SHA-1 signature on a path from leaf to a
// root, nil if there is no such path. crypto/x509 refuses SHA-1, since forgeries are affordable,
// and so does this package.
//
// The result only explains a refusal: nothing accepts a chain because of it. So a forged signature
// can only change the reason of the refusal. Each signature is verified nevertheless, since the
// reason suggests to operators that they name the EK. Dates do not count: the EK would be refused
// at any time.
func (v *Verifier) signedWithSHA1(leaf *x509.Certificate, fromNode []*x509.Certificate) *x509.Certificate {
	cas := slices.Concat(v.rootList, v.intermediateList, fromNode)
	seen := map[*x509.Certificate]bool{} // verifies each signature once
	var walk func(c, weak *x509.Certificate) *x509.Certificate
	walk = func(c, weak *x509.Certificate) *x509.Certificate {
		seen[c] = true
		for i, ca := range cas {
			if seen[ca] || !bytes.Equal(c.RawIssuer, ca.RawSubject) || notForEKs(ca) || v.denied[FingerprintOf(ca.RawSubjectPublicKeyInfo)] {
				continue
			}
			sha1, ok := signedBy(c, ca)
			if !ok {
				continue
			}
			first := weak
			if first == nil && sha1 {
				first = c
			}
			if i >= len(v.rootList) { // the signature of a root does not matter
				first = walk(ca, first)
			}
			if first != nil {
				return first
			}
		}
		return nil
	}
	return walk(leaf, nil)
}

// signedBy reports whether a CA signed a certificate, and whether with SHA-1.
func signedBy(c, ca *x509.Certificate) (sha1, ok bool) {
	err := c.CheckSignatureFrom(ca)
	var insecure x509.InsecureAlgorithmError
	if err == nil || !errors.As(err, &insecure) || c.SignatureAlgorithm != x509.SHA1WithRSA && c.SignatureAlgorithm != x509.ECDSAWithSHA1 {
		return false, err == nil
	}
	// CheckSignatureFrom has checked everything but this signature. CheckSignature accepts SHA-1.
	return true, ca.CheckSignature(c.SignatureAlgorithm, c.RawTBSCertificate, c.Signature) == nil
}

// notForEKs reports whether a CA has extended key usages without the one for EKs. They bind all
// certificates below the CA, as crypto/x509 enforces for usages that it knows. Otherwise a
// manufacturer's CA for web servers could make software pass for a TPM.
func notForEKs(ca *x509.Certificate) bool {
	return len(ca.ExtKeyUsage)+len(ca.UnknownExtKeyUsage) > 0 &&
		!slices.ContainsFunc(ca.UnknownExtKeyUsage, oidEKCertificate().Equal) && !slices.Contains(ca.ExtKeyUsage, x509.ExtKeyUsageAny)
}

// hasNoDeniedCA reports whether no CA of a chain is denied. The EK itself is judged separately.
func (v *Verifier) hasNoDeniedCA(chain []*x509.Certificate) bool {
	return !slices.ContainsFunc(chain[1:], func(c *x509.Certificate) bool { return v.denied[FingerprintOf(c.RawSubjectPublicKeyInfo)] })
}

// withoutDates returns a copy of a certificate that is always valid. It shows whether only dates
// are wrong.
func withoutDates(c *x509.Certificate) *x509.Certificate {
	always := *c
	always.NotBefore = time.Time{}
	// RFC 5280, section 4.1.2.5: no end
	always.NotAfter = time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)
	return &always
}

// tpmName is a TPM's name in a certificate.
type tpmName struct{ manufacturer, model, version string }

// subjectAltName reads the TPM's name: one directoryName with manufacturer, model and version once
// each and nothing else (EK Credential Profile, section 3.1.2). Without a subject alternative name
// it returns an empty name, since certificates of virtual TPMs have none.
func subjectAltName(leaf *x509.Certificate) (tpmName, error) {
	var value []byte
	for _, extension := range leaf.Extensions { // crypto/x509 refuses duplicate extensions
		if extension.Id.Equal(oidSubjectAltName()) {
			value = extension.Value
		}
	}
	if value == nil {
		return tpmName{}, nil
	}
	return parseSubjectAltName(value)
}

// parseSubjectAltName parses the extension's value (RFC 5280, section 4.2.1.6).
func parseSubjectAltName(value []byte) (tpmName, error) {
	var general []asn1.RawValue
	if rest, err := asn1.Unmarshal(value, &general); err != nil || len(rest) > 0 {
		return tpmName{}, errors.New("the subject alternative name does not parse")
	}
	if len(general) != 1 || general[0].Class != asn1.ClassContextSpecific || general[0].Tag != 4 || !general[0].IsCompound {
		return tpmName{}, errors.New("the subject alternative name is not one directoryName")
	}
	var sequence pkix.RDNSequence
	if rest, err := asn1.Unmarshal(general[0].Bytes, &sequence); err != nil || len(rest) > 0 {
		return tpmName{}, errors.New("the directoryName does not parse")
	}
	var name tpmName
	for _, set := range sequence {
		for _, attribute := range set {
			var field *string
			switch {
			case attribute.Type.Equal(oidManufacturer()):
				field = &name.manufacturer
			case attribute.Type.Equal(oidModel()):
				field = &name.model
			case attribute.Type.Equal(oidVersion()):
				field = &name.version
			default:
				return tpmName{}, errors.New("the directoryName holds more than a TPM's maker, model and version")
			}
			text, ok := attribute.Value.(string)
			if !ok || *field != "" || !isPlain(text) {
				return tpmName{}, errors.New("the directoryName holds a value twice, or one that is not a short text")
			}
			*field = text
		}
	}
	manufacturer, err := parseManufacturer(name.manufacturer)
	if err != nil {
		return tpmName{}, err
	}
	version, found := strings.CutPrefix(name.version, "id:")
	if !found || !isHex(version) {
		return tpmName{}, errors.New("the TPM's version is not \"id:\" and hexadecimal digits")
	}
	if name.model == "" {
		return tpmName{}, errors.New("the TPM's model is missing")
	}
	name.manufacturer = manufacturer
	return name, nil
}

// parseManufacturer decodes a TPMManufacturer: "id:" and eight hex digits, the four bytes of
// TPM_PT_MANUFACTURER.
func parseManufacturer(s string) (string, error) {
	digits, found := strings.CutPrefix(s, "id:")
	b, err := hex.DecodeString(digits)
	if !found || err != nil || len(b) != 4 {
		return "", errors.New("the TPM's maker is not \"id:\" and eight hexadecimal digits")
	}
	text := trimManufacturer(string(b))
	if text == "" || !isPlain(text) {
		return hex.EncodeToString(b), nil
	}
	return text, nil
}

// isManufacturerID reports whether parseManufacturer returns s for some certificate, in the
// registry's upper case.
func isManufacturerID(s string) bool {
	id := s
	if len(s) <= 4 {
		id = hex.EncodeToString([]byte(s + "\x00\x00\x00\x00"[len(s):]))
	}
	name, err := parseManufacturer("id:" + id)
	return err == nil && name == s && (len(s) > 4 || s == strings.ToUpper(s))
}

// trimManufacturer drops the padding of an ID to four bytes: blanks or zeros.
func trimManufacturer(s string) string { return strings.TrimRight(s, " \x00") }

// isPlain reports whether s is 1 to 64 characters of printable ASCII.
func isPlain(s string) bool {
	return s != "" && len(s) <= 64 && !strings.ContainsFunc(s, func(c rune) bool { return c < ' ' || c > '~' })
}

func isHex(s string) bool {
	return s != "" && !strings.ContainsFunc(s, func(c rune) bool { return !strings.ContainsRune("0123456789abcdefABCDEF", c) })
}
