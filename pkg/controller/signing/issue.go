// SPDX-License-Identifier: Apache-2.0

package signing

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"
)

// A node's user and group (Kubernetes documentation, "Node authorization").
const (
	nodePrefix = "system:node:"
	nodesGroup = "system:nodes"
)

const (
	// minLifetime is the API server's minimum for spec.expirationSeconds (certificates.k8s.io/v1).
	// No certificate is issued with a shorter lifetime.
	minLifetime = 10 * time.Minute
	// maxLifetime is the longest lifetime that an operator may allow: 90 days.
	maxLifetime = 2160 * time.Hour
	// maxBackdate limits Limits.Backdate.
	maxBackdate = time.Hour
	// maxNodeRSA is the largest modulus of a node's key, in bits (rule S3).
	maxNodeRSA = 4096
)

// grantError says why no CA may sign a grant.
type grantError struct {
	problem string
}

func (e *grantError) Error() string { return "node certificate: " + e.problem }

// Grant has the values that a client certificate is made from. The caller must have verified each
// of them, except the wish ExpirationSeconds.
type Grant struct {
	// NodeName is the name in the record, not the one in the request.
	NodeName string
	// PublicKey is the key of the request: P-256, P-384, or RSA with 2048 to 4096 bits. The
	// request's signature shows that the requester has the private key.
	PublicKey crypto.PublicKey
	// ExpirationSeconds is spec.expirationSeconds, a wish.
	ExpirationSeconds *int32
}

// ServingGrant has the values that a serving certificate is made from.
type ServingGrant struct {
	Grant
	// DNSNames, in lower case, and IPs belong to the machine, and to no other. There must be at
	// least one. Issuing does not add the node's name.
	DNSNames []string
	IPs      []netip.Addr
}

// maxAddresses limits the names and IPs in one certificate.
const maxAddresses = 100

// purpose has the parts of a certificate that differ between client and serving certificates.
type purpose struct {
	usage    x509.ExtKeyUsage
	dnsNames []string
	ips      []net.IP
}

// Limits are the operator's limits of certificates. The zero value allows nothing.
type Limits struct {
	// Default is the lifetime if the request wishes none.
	Default time.Duration
	// Min and Max limit the lifetime. A wish outside these limits is shortened or lengthened, as
	// kube-controller-manager does.
	Min, Max time.Duration
	// Backdate is how far in the past a certificate begins, for nodes whose clock is behind. It is
	// not part of the lifetime.
	Backdate time.Duration
}

// DefaultLimits returns the limits that apply if the operator sets none. Max is 30 days, since a
// revoked certificate takes its place in the policies until it ends.
func DefaultLimits() Limits {
	return Limits{Default: 168 * time.Hour, Min: minLifetime, Max: 720 * time.Hour, Backdate: 5 * time.Minute}
}

// Check returns an error unless 10m <= Min <= Default <= Max <= 2160h and 0 <= Backdate <= 1h.
func (l Limits) Check() error {
	switch {
	case l.Min < minLifetime:
		return fmt.Errorf("the shortest lifetime %s is less than %s", l.Min, minLifetime)
	case l.Max > maxLifetime:
		return fmt.Errorf("the longest lifetime %s is more than %s", l.Max, maxLifetime)
	case l.Default < l.Min || l.Default > l.Max:
		return fmt.Errorf("the default lifetime %s is not between %s and %s", l.Default, l.Min, l.Max)
	case l.Backdate < 0 || l.Backdate > maxBackdate:
		return fmt.Errorf("certificates begin %s in the past, not 0s to %s", l.Backdate, maxBackdate)
	}
	return nil
}

// Issue returns a client certificate for the node in PEM, followed by the CAs that are not roots.
// The certificate begins Backdate before now, but not before the CA. Its end is bounded by Limits
// and by the CA's end. The error is a *CAError if another CA could sign.
func Issue(ca *CA, grant Grant, limits Limits, now time.Time, random io.Reader) ([]byte, error) {
	return sign(ca, grant, purpose{usage: x509.ExtKeyUsageClientAuth}, limits, now, random)
}

// IssueServing returns a serving certificate for the node, with the names and IPs of the grant and
// no others. Otherwise it works like Issue.
func IssueServing(ca *CA, grant ServingGrant, limits Limits, now time.Time, random io.Reader) ([]byte, error) {
	for _, name := range grant.DNSNames {
		last := name[strings.LastIndexByte(name, '.')+1:]
		if len(validation.IsDNS1123Subdomain(name)) > 0 || strings.Trim(last, "0123456789") == "" {
			return nil, &grantError{fmt.Sprintf("%.253q is not a DNS-1123 subdomain, or looks like an IP", name)}
		}
	}
	serving := purpose{usage: x509.ExtKeyUsageServerAuth, dnsNames: grant.DNSNames}
	for _, ip := range grant.IPs {
		if !ip.IsGlobalUnicast() || ip.Is4In6() || ip.Zone() != "" {
			return nil, &grantError{fmt.Sprintf("%.64q is not an address of one machine, or has a zone or two forms", ip)}
		}
		serving.ips = append(serving.ips, ip.AsSlice())
	}
	count := len(grant.DNSNames) + len(grant.IPs)
	if count == 0 || count > maxAddresses || repeats(grant.DNSNames) || repeats(grant.IPs) {
		return nil, &grantError{fmt.Sprintf("there are %d names and IPs, not 1 to %d, or one is listed twice", count, maxAddresses)}
	}
	return sign(ca, grant.Grant, serving, limits, now, random)
}

func repeats[T comparable](list []T) bool {
	seen := map[T]bool{}
	for _, item := range list {
		seen[item] = true
	}
	return len(seen) < len(list)
}

// sign returns a certificate for that purpose.
func sign(ca *CA, grant Grant, use purpose, limits Limits, now time.Time, random io.Reader) ([]byte, error) {
	if err := ca.checkTime(now); err != nil {
		return nil, err
	}
	if err := limits.Check(); err != nil {
		return nil, err
	}
	wanted, err := plan(ca, grant, use, limits, now)
	if err != nil {
		return nil, err
	}
	if wanted.SerialNumber, err = newSerial(random); err != nil {
		return nil, err
	}
	// The algorithm follows from the CA's key: SHA-256 with RSA and P-256, SHA-384 with P-384,
	// SHA-512 with P-521, or Ed25519.
	der, err := x509.CreateCertificate(random, wanted, ca.chain[0], grant.PublicKey, ca.key)
	if err != nil {
		return nil, fmt.Errorf("sign certificate for node %s: %w", grant.NodeName, err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("sign certificate for node %s: the signed certificate does not parse: %w", grant.NodeName, err)
	}
	if err := verify(leaf, wanted, ca, now); err != nil {
		if invalid := (x509.CertificateInvalidError{}); errors.As(err, &invalid) && invalid.Reason == x509.CANotAuthorizedForThisName {
			return nil, &CAError{"its name constraints leave out a name or IP of node " + grant.NodeName}
		}
		return nil, fmt.Errorf("sign certificate for node %s: the signed certificate differs from the template: %w", grant.NodeName, err)
	}
	var out bytes.Buffer
	for _, c := range append([]*x509.Certificate{leaf}, ca.issuersForNode()...) {
		if err := pem.Encode(&out, &pem.Block{Type: "CERTIFICATE", Bytes: c.Raw}); err != nil {
			return nil, err
		}
	}
	return out.Bytes(), nil
}

// plan returns the template of the certificate, without its serial number.
func plan(ca *CA, grant Grant, use purpose, limits Limits, now time.Time) (*x509.Certificate, error) {
	if len(validation.IsDNS1123Subdomain(grant.NodeName)) > 0 {
		return nil, &grantError{fmt.Sprintf("the node name %.253q is not a DNS-1123 subdomain", grant.NodeName)}
	}
	if err := checkNodeKey(grant.PublicKey); err != nil {
		return nil, &grantError{"the key cannot be used: " + err.Error()}
	}
	spki, err := x509.MarshalPKIXPublicKey(grant.PublicKey)
	if err != nil {
		return nil, &grantError{"the key does not encode"}
	}
	subjectID, err := keyID(spki)
	if err != nil {
		return nil, &grantError{"the key does not encode"}
	}
	issuerID := ca.chain[0].SubjectKeyId
	// an old CA has no key identifier, but RFC 5280, section 4.2.1.1 requires one in the node's
	// certificate
	if len(issuerID) == 0 {
		if issuerID, err = keyID(ca.chain[0].RawSubjectPublicKeyInfo); err != nil {
			return nil, &CAError{"its key does not encode"}
		}
	}
	for i, c := range ca.chain { // parseCA already checked this for client certificates
		if !allows(c, use.usage) {
			return nil, &CAError{fmt.Sprintf("certificate %d has extended key usages without server authentication", i+1)}
		}
	}
	lifetime, err := limits.lifetime(grant.ExpirationSeconds)
	if err != nil {
		return nil, err
	}
	begin := now.UTC().Truncate(time.Second) // certificates have whole seconds
	notBefore, notAfter := begin.Add(-limits.Backdate), begin.Add(lifetime)
	for _, c := range ca.chain {
		if c.NotBefore.After(notBefore) {
			notBefore = c.NotBefore.UTC()
		}
	}
	if end := ca.NotAfter().UTC(); end.Before(notAfter) {
		notAfter = end
	}
	if notAfter.Sub(begin) < minLifetime {
		return nil, &CAError{fmt.Sprintf("it ends at %s, and a certificate needs %s", notAfter.Format(time.RFC3339), minLifetime)}
	}
	usage := x509.KeyUsageDigitalSignature
	if _, ok := grant.PublicKey.(*rsa.PublicKey); ok {
		usage |= x509.KeyUsageKeyEncipherment // the request must have this usage (rule S6)
	}
	return &x509.Certificate{
		RawSubjectPublicKeyInfo: spki, // for verify; CreateCertificate ignores it
		Subject:                 pkix.Name{Organization: []string{nodesGroup}, CommonName: nodePrefix + grant.NodeName},
		NotBefore:               notBefore,
		NotAfter:                notAfter,
		KeyUsage:                usage,
		ExtKeyUsage:             []x509.ExtKeyUsage{use.usage},
		DNSNames:                use.dnsNames,
		IPAddresses:             use.ips,
		BasicConstraintsValid:   true, // not a CA
		SubjectKeyId:            subjectID,
		AuthorityKeyId:          issuerID,
	}, nil
}

// lifetime returns the lifetime for a wish, as kube-controller-manager's signer does. The API
// server refuses a wish below 10 minutes.
func (l Limits) lifetime(expirationSeconds *int32) (time.Duration, error) {
	if expirationSeconds == nil {
		return l.Default, nil
	}
	wish := time.Duration(*expirationSeconds) * time.Second
	if wish < minLifetime {
		return 0, &grantError{fmt.Sprintf("the requested lifetime of %s is less than %s", wish, minLifetime)}
	}
	return min(max(wish, l.Min), l.Max), nil
}

// checkNodeKey applies rule S3.
func checkNodeKey(key crypto.PublicKey) error {
	switch k := key.(type) {
	case *rsa.PublicKey:
	case *ecdsa.PublicKey:
		if k != nil && k.Curve != elliptic.P256() && k.Curve != elliptic.P384() {
			return errors.New("ECDSA on a curve other than P-256, P-384")
		}
	default:
		return errors.New("neither RSA nor ECDSA")
	}
	return checkKey(key, maxNodeRSA)
}

// newSerial returns a positive serial number of 128 random bits. It has at most 17 octets; RFC
// 5280, section 4.1.2.2 allows 20.
func newSerial(random io.Reader) (*big.Int, error) {
	if random == nil {
		return nil, errors.New("serial number: there is no source of randomness")
	}
	var octets [16]byte
	if _, err := io.ReadFull(random, octets[:]); err != nil {
		return nil, fmt.Errorf("serial number: %w", err)
	}
	serial := new(big.Int).SetBytes(octets[:])
	if serial.Sign() <= 0 {
		return nil, errors.New("serial number: the source of randomness returned only zeros")
	}
	return serial, nil
}

// keyID returns a key identifier (RFC 7093, section 2, method 1).
func keyID(spki []byte) ([]byte, error) {
	var info struct {
		Algorithm pkix.AlgorithmIdentifier
		PublicKey asn1.BitString
	}
	if rest, err := asn1.Unmarshal(spki, &info); err != nil || len(rest) > 0 {
		return nil, errors.New("not a SubjectPublicKeyInfo")
	}
	sum := sha256.Sum256(info.PublicKey.Bytes)
	return sum[:20], nil
}

// extensionSAN is the subject alternative name.
const extensionSAN = "2.5.29.17"

// extensions returns the OID of each allowed extension of a node's certificate, and whether it is
// critical (RFC 5280, section 4.2.1). Only a serving certificate has a subject alternative name.
func extensions(wanted *x509.Certificate) []string {
	all := []string{"2.5.29.14 false", "2.5.29.15 true", "2.5.29.19 true", "2.5.29.35 false", "2.5.29.37 false"}
	if len(wanted.DNSNames)+len(wanted.IPAddresses) > 0 {
		all = slices.Insert(all, 2, extensionSAN+" false")
	}
	return all
}

// alternativeNames returns the names and IPs in DER (RFC 5280, section 4.2.1.6). verify compares
// these bytes, since crypto/x509 skips kinds of names that it does not know.
func alternativeNames(names []string, ips []net.IP) ([]byte, error) {
	var all []asn1.RawValue
	for _, name := range names {
		all = append(all, asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: 2, Bytes: []byte(name)})
	}
	for _, ip := range ips {
		all = append(all, asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: 7, Bytes: ip})
	}
	return asn1.Marshal(all)
}

// verify checks the new certificate as its verifiers will. It trusts no byte of it.
func verify(leaf, wanted *x509.Certificate, ca *CA, now time.Time) error {
	subject, err := asn1.Marshal(wanted.Subject.ToRDNSequence())
	if err != nil {
		return err
	}
	names, err := alternativeNames(wanted.DNSNames, wanted.IPAddresses)
	if err != nil {
		return err
	}
	var found []string
	for _, e := range leaf.Extensions {
		found = append(found, fmt.Sprint(e.Id, e.Critical))
		if e.Id.String() == extensionSAN && !bytes.Equal(e.Value, names) {
			return errors.New("its alternative names")
		}
	}
	slices.Sort(found)
	switch {
	case leaf.Version != 3:
		return errors.New("its version")
	case !bytes.Equal(leaf.RawSubject, subject):
		return errors.New("its subject")
	case !bytes.Equal(leaf.RawSubjectPublicKeyInfo, wanted.RawSubjectPublicKeyInfo):
		return errors.New("its key")
	case leaf.SerialNumber.Cmp(wanted.SerialNumber) != 0 || leaf.SerialNumber.Sign() <= 0:
		return errors.New("its serial number")
	case !leaf.NotBefore.Equal(wanted.NotBefore) || !leaf.NotAfter.Equal(wanted.NotAfter):
		return errors.New("its validity")
	case !slices.Equal(found, extensions(wanted)):
		return fmt.Errorf("its extensions: %v", found)
	case leaf.KeyUsage != wanted.KeyUsage || !slices.Equal(leaf.ExtKeyUsage, wanted.ExtKeyUsage) || len(leaf.UnknownExtKeyUsage) > 0:
		return errors.New("its usages")
	case leaf.IsCA || !leaf.BasicConstraintsValid:
		return errors.New("its basic constraints")
	case !bytes.Equal(leaf.SubjectKeyId, wanted.SubjectKeyId) || !bytes.Equal(leaf.AuthorityKeyId, wanted.AuthorityKeyId):
		return errors.New("its key identifiers")
	}
	if err := leaf.CheckSignatureFrom(ca.chain[0]); err != nil {
		return err
	}
	options := x509.VerifyOptions{
		Roots: x509.NewCertPool(), Intermediates: x509.NewCertPool(),
		CurrentTime: now, KeyUsages: wanted.ExtKeyUsage,
	}
	top := len(ca.chain) - 1
	options.Roots.AddCert(ca.chain[top])
	for _, c := range ca.chain[:top] {
		options.Intermediates.AddCert(c)
	}
	_, err = leaf.Verify(options)
	return err
}

// Fingerprint returns the SHA-256 of the first certificate in status.certificate, in hex, the
// format of records. Other signers may write text around the PEM blocks (certificates.k8s.io/v1,
// CertificateSigningRequestStatus).
func Fingerprint(chain []byte) (string, error) {
	block, _ := pem.Decode(chain)
	if block == nil || block.Type != "CERTIFICATE" {
		return "", errors.New("certificate: does not begin with one in PEM")
	}
	if _, err := x509.ParseCertificate(block.Bytes); err != nil {
		return "", errors.New("certificate: does not parse")
	}
	return fingerprint(block.Bytes), nil
}

func fingerprint(der []byte) string {
	sum := sha256.Sum256(der)
	return hex.EncodeToString(sum[:])
}

// Leaf returns the first certificate of a chain in PEM.
func Leaf(chain []byte) (*x509.Certificate, error) {
	block, _ := pem.Decode(chain)
	if block == nil {
		return nil, errors.New("the certificate is not PEM")
	}
	return x509.ParseCertificate(block.Bytes)
}
