// SPDX-License-Identifier: Apache-2.0

// Package signing builds and signs a node's certificates. Its inputs are verified values only. It
// never reads a request's subject or extensions. It uses no Kubernetes API and reads no clock. Its
// only I/O is in the type Files, which reads two files.
package signing

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Limits that are checked before anything is decoded.
const (
	// maxPEM limits the certificates and the key, in bytes each. The chain that a node gets must
	// stay below the limit of the plugin.
	maxPEM = 64 << 10
	// maxChain limits the certificates of a CA, its own included.
	maxChain = 8
)

// Limits of a modulus, in bits. Go's TLS, which the API server uses, refuses certificates with a
// larger modulus.
const (
	minRSA   = 2048
	maxCARSA = 8192
)

// CAError says why no CA is available to sign. The operator has to fix that. Requests may wait
// until then.
type CAError struct {
	Problem string
}

func (e *CAError) Error() string { return "signing CA: " + e.Problem }

// CA is a key pair that may sign, and the chain above it. Only parseCA and parseBundle make one. A
// CA is immutable. The zero value signs nothing.
type CA struct {
	// chain has the CA's own certificate, then the issuers that the input had, each after the
	// certificate that it issued.
	chain []*x509.Certificate
	key   crypto.Signer
}

// parseCA parses a CA in PEM. certificates has its certificate, then the chain above it, each the
// issuer of the one before. key is its private key in PKCS #1, PKCS #8 or SEC 1, not encrypted. If
// the CA cannot sign at the time now, the error is a *CAError. The error quotes nothing of the key.
func parseCA(certificates, key []byte, now time.Time) (*CA, error) {
	chain, err := parseChain(certificates)
	if err != nil {
		return nil, err
	}
	signer, err := parseKey(key)
	if err != nil {
		return nil, err
	}
	ca := &CA{chain, signer}
	if err := ca.check(); err != nil {
		return nil, err
	}
	if err := ca.checkTime(now); err != nil {
		return nil, err
	}
	return ca, nil
}

// NotAfter returns the time when the first certificate of the chain expires. No node's certificate
// outlives it.
func (ca *CA) NotAfter() time.Time {
	if ca == nil || len(ca.chain) == 0 {
		return time.Time{}
	}
	end := ca.chain[0].NotAfter
	for _, c := range ca.chain {
		if c.NotAfter.Before(end) {
			end = c.NotAfter
		}
	}
	return end
}

// Fingerprint returns the SHA-256 of the CA's certificate, in hex, "" for the zero value.
func (ca *CA) Fingerprint() string {
	if ca == nil || len(ca.chain) == 0 {
		return ""
	}
	return fingerprint(ca.chain[0].Raw)
}

// String does not print the key.
func (ca CA) String() string { return "signing CA " + ca.Fingerprint() }

// GoString is String.
func (ca CA) GoString() string { return ca.String() }

// check checks everything that does not depend on the time.
func (ca *CA) check() error {
	for i, c := range ca.chain {
		if problem := checkAuthority(c, i); problem != "" {
			return &CAError{fmt.Sprintf("certificate %d %s", i+1, problem)}
		}
		if i == 0 {
			continue
		}
		// A file with the old and the new root is a trust bundle. It does not say which root signs.
		if selfSigned(ca.chain[i-1]) {
			return &CAError{fmt.Sprintf("certificate %d follows a self-signed one, which has nothing above it", i+1)}
		}
		if err := ca.chain[i-1].CheckSignatureFrom(c); err != nil || !bytes.Equal(ca.chain[i-1].RawIssuer, c.RawSubject) {
			return &CAError{fmt.Sprintf("certificate %d is not the issuer of the one before", i+1)}
		}
	}
	public, ok := ca.key.Public().(interface{ Equal(crypto.PublicKey) bool })
	if !ok || !public.Equal(ca.chain[0].PublicKey) {
		return &CAError{"the key is not the certificate's"}
	}
	return nil
}

// checkAuthority returns what is wrong with a CA's certificate, "" if nothing is. below is the
// number of other CAs between it and a node's certificate.
func checkAuthority(c *x509.Certificate, below int) string {
	switch {
	case !c.BasicConstraintsValid || !c.IsCA: // RFC 5280, section 4.2.1.9
		return "is not a CA's"
	case c.KeyUsage&x509.KeyUsageCertSign == 0: // section 4.2.1.3
		return "lacks the key usage keyCertSign"
	case c.MaxPathLen >= 0 && c.MaxPathLen < below: // section 4.2.1.9
		return fmt.Sprintf("allows %d CAs below itself, and has %d", c.MaxPathLen, below)
	case len(c.UnhandledCriticalExtensions) > 0: // section 4.2
		return "has a critical extension that is not known"
	case !allows(c, x509.ExtKeyUsageClientAuth):
		return "has extended key usages without client authentication"
	case len(c.RawSubject) <= len("\x30\x00"): // section 4.1.2.6
		return "has no subject"
	}
	if err := checkKey(c.PublicKey, maxCARSA); err != nil {
		return "has a key that cannot be used: " + err.Error()
	}
	return ""
}

// allows reports whether a CA's extended key usages permit a usage. They bind all certificates
// below the CA, as in the API server's verification.
func allows(c *x509.Certificate, usage x509.ExtKeyUsage) bool {
	if len(c.ExtKeyUsage) == 0 && len(c.UnknownExtKeyUsage) == 0 {
		return true
	}
	return slices.Contains(c.ExtKeyUsage, usage) || slices.Contains(c.ExtKeyUsage, x509.ExtKeyUsageAny)
}

// checkKey refuses weak keys, and keys that are too costly to verify with.
func checkKey(key crypto.PublicKey, maxRSA int) error {
	switch key := key.(type) {
	case *rsa.PublicKey:
		if key == nil || key.N == nil {
			return errors.New("it is empty")
		}
		if bits := key.N.BitLen(); bits < minRSA || bits > maxRSA {
			return fmt.Errorf("RSA with %d bits, not %d to %d", bits, minRSA, maxRSA)
		}
		// NIST SP 800-56B, section 6.2. Signatures with smaller exponents were forged in the past.
		if key.E < 65537 || key.E%2 == 0 || key.N.Bit(0) == 0 {
			return errors.New("RSA with an even modulus, or an exponent that is even or less than 65537")
		}
		return nil
	case *ecdsa.PublicKey:
		if key == nil || key.X == nil || key.Y == nil { //nolint:staticcheck // ECDH panics without a point
			return errors.New("it is empty")
		}
		switch key.Curve {
		case elliptic.P256(), elliptic.P384(), elliptic.P521():
		default:
			return errors.New("ECDSA on a curve other than P-256, P-384, P-521")
		}
		if _, err := key.ECDH(); err != nil {
			return errors.New("ECDSA with a point that is not on the curve")
		}
		return nil
	case ed25519.PublicKey:
		if len(key) != ed25519.PublicKeySize {
			return errors.New("Ed25519 of another size")
		}
		return nil
	}
	return errors.New("neither RSA, ECDSA nor Ed25519")
}

// checkTime refuses the zero value, and a chain with a certificate that is not valid at the time
// now.
func (ca *CA) checkTime(now time.Time) error {
	if ca == nil || len(ca.chain) == 0 || ca.key == nil {
		return &CAError{"there is none"}
	}
	for i, c := range ca.chain {
		switch {
		case now.Before(c.NotBefore):
			return &CAError{fmt.Sprintf("certificate %d is not valid before %s", i+1, c.NotBefore.UTC().Format(time.RFC3339))}
		case !now.Before(c.NotAfter):
			return &CAError{fmt.Sprintf("certificate %d expired at %s", i+1, c.NotAfter.UTC().Format(time.RFC3339))}
		}
	}
	return nil
}

// issuersForNode returns the certificates that follow a node's certificate: all but a root, which
// the verifier must have (RFC 8446, section 4.4.2).
func (ca *CA) issuersForNode() []*x509.Certificate {
	return slices.DeleteFunc(slices.Clone(ca.chain), selfSigned)
}

func selfSigned(c *x509.Certificate) bool {
	return bytes.Equal(c.RawSubject, c.RawIssuer) && c.CheckSignatureFrom(c) == nil
}

func parseChain(data []byte) ([]*x509.Certificate, error) {
	found, err := blocks(data)
	if err != nil {
		return nil, &CAError{"certificate: " + err.Error()}
	}
	if len(found) == 0 || len(found) > maxChain {
		return nil, &CAError{fmt.Sprintf("there are %d certificates, not 1 to %d", len(found), maxChain)}
	}
	var chain []*x509.Certificate
	for i, block := range found {
		if block.Type != "CERTIFICATE" {
			return nil, &CAError{fmt.Sprintf("certificate %d is a PEM block of type %.40q", i+1, block.Type)}
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, &CAError{fmt.Sprintf("certificate %d does not parse", i+1)}
		}
		chain = append(chain, c)
	}
	return chain, nil
}

// parseKey parses a private key. Its errors quote neither the key nor a library's error.
func parseKey(data []byte) (crypto.Signer, error) {
	found, err := blocks(data)
	if err != nil {
		return nil, &CAError{"key: " + err.Error()}
	}
	// The output of openssl ecparam -genkey begins with a block for the curve's name. The key has
	// the name, too.
	if len(found) == 2 && found[0].Type == "EC PARAMETERS" && found[1].Type == "EC PRIVATE KEY" {
		found = found[1:]
	}
	if len(found) != 1 {
		return nil, &CAError{fmt.Sprintf("key: there are %d PEM blocks, not 1", len(found))}
	}
	var key any
	switch block := found[0]; block.Type {
	case "RSA PRIVATE KEY": // PKCS #1
		key, err = x509.ParsePKCS1PrivateKey(block.Bytes)
	case "EC PRIVATE KEY": // SEC 1
		key, err = x509.ParseECPrivateKey(block.Bytes)
	case "PRIVATE KEY": // PKCS #8
		key, err = x509.ParsePKCS8PrivateKey(block.Bytes)
	case "ENCRYPTED PRIVATE KEY":
		return nil, &CAError{"key: it is encrypted"}
	default:
		return nil, &CAError{"key: the PEM block is not of type PRIVATE KEY, RSA PRIVATE KEY or EC PRIVATE KEY"}
	}
	signer, ok := key.(crypto.Signer)
	if err != nil || !ok {
		return nil, &CAError{"key: it does not parse"}
	}
	return signer, nil
}

// blocks splits PEM. Only white space may be between the blocks: pem.Decode alone would skip text,
// and broken blocks.
func blocks(data []byte) ([]*pem.Block, error) {
	if len(data) > maxPEM {
		return nil, fmt.Errorf("longer than %d bytes", maxPEM)
	}
	var found []*pem.Block
	marker := []byte("-----BEGIN ")
	count := bytes.Count(data, marker)
	for rest := bytes.TrimSpace(data); len(rest) > 0; rest = bytes.TrimSpace(rest) {
		if !bytes.HasPrefix(rest, marker) {
			return nil, errors.New("there is text outside the PEM blocks")
		}
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			return nil, errors.New("there is a broken PEM block")
		}
		if len(block.Headers) > 0 {
			return nil, errors.New("there is a PEM block with headers, or an encrypted one")
		}
		found = append(found, block)
	}
	if len(found) != count {
		return nil, errors.New("there is a broken PEM block")
	}
	return found, nil
}
