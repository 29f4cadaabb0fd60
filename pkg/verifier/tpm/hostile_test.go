// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"math/big"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// row is a hostile input and the reasons for which it must be refused: exactly these. Without the
// one rule that a row is about, it would be accepted: all else of it is consistent.
type row struct {
	name string
	bend bend
	// hello says that the hello alone is refused already, for the same reasons. Otherwise it must
	// pass.
	hello bool
	want  []verifier.Reason
}

func reasons(list ...verifier.Reason) []verifier.Reason { return list }

func reasonsOf(err error) []verifier.Reason {
	var refusals verifier.Refusals
	if !errors.As(err, &refusals) {
		return nil
	}
	list := refusals.Reasons()
	slices.Sort(list)
	return list
}

func replaced(old, new string) func([]byte) []byte {
	return func(data []byte) []byte {
		if !bytes.Contains(data, []byte(old)) {
			panic("nothing to replace: " + old)
		}
		return bytes.Replace(data, []byte(old), []byte(new), 1)
	}
}

func appended(tail ...byte) func([]byte) []byte {
	return func(data []byte) []byte { return append(data, tail...) }
}

// secondBase64 gives the field another spelling that decodes to the same bytes: the bits of padding
// are not zero.
func secondBase64(field string) func([]byte) []byte {
	return func(data []byte) []byte {
		start := bytes.Index(data, []byte(`"`+field+`":"`)) + len(field) + 4
		end := start + bytes.IndexByte(data[start:], '"')
		value := string(data[start:end])
		last := strings.TrimRight(value, "=")
		if last == value {
			panic("no padding in " + field)
		}
		alphabet := "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
		other := last[:len(last)-1] + string(alphabet[strings.IndexByte(alphabet, last[len(last)-1])+1]) + value[len(last):]
		if a, b := must(base64.StdEncoding.DecodeString(value)), must(base64.StdEncoding.DecodeString(other)); !bytes.Equal(a, b) {
			panic("not the same bytes")
		}
		return slices.Concat(data[:start], []byte(other), data[end:])
	}
}

// akBytes changes the AK's public area; the forger goes on with the changed one, Name included.
func akBytes(change func([]byte) []byte) func(*attestation.Hello) {
	return func(h *attestation.Hello) { h.AKPublic = change(bytes.Clone(h.AKPublic)) }
}

func ekBytes(change func([]byte) []byte) func(*attestation.Hello) {
	return func(h *attestation.Hello) { h.EKPublic = change(bytes.Clone(h.EKPublic)) }
}

// put writes b at offset.
func put(offset int, b ...byte) func([]byte) []byte {
	return func(data []byte) []byte { copy(data[offset:], b); return data }
}

func insert(offset int, b ...byte) func([]byte) []byte {
	return func(data []byte) []byte { return slices.Insert(data, offset, b...) }
}

// certificates replaces the chain of the hello.
func certificates(list ...[]byte) func(*attestation.Hello) {
	return func(h *attestation.Hello) { h.EKCertificates = list }
}

// issued is a certificate of the EK, changed.
func issued(change func(*x509.Certificate)) func(*attestation.Hello) {
	k := theKit()
	return certificates(k.intermediate.issue(k.ekKeys["ecc-p256"], change))
}

func extensions(list ...pkix.Extension) func(*attestation.Hello) {
	return issued(func(c *x509.Certificate) { c.ExtraExtensions = list })
}

func helloRows() []row {
	k := theKit()
	p256 := k.ekKeys["ecc-p256"]
	good := k.intermediate.issue(p256, nil)
	fingerprint := FingerprintOf(spkiOf(p256))
	other := newCA("Other Root", nil, nil)
	otherIntermediate := newCA("Other Intermediate", other, nil)
	impostor := newCA("Intermediate", nil, nil) // the right name, another key
	shown := newCA("Shown", k.root, nil)
	old := newCA("Old", k.root, func(c *x509.Certificate) { c.NotAfter = testNow.Add(-time.Hour) })
	noCA := &testCA{must(x509.ParseCertificate(good)), k.ecEKs["ecc-p256"]}
	sha1 := newCA("SHA-1", k.root, withSHA1)
	belowSHA1 := newCA("Below SHA-1", sha1, nil)
	withRSA := newCAWith(rsa2048(), "RSA Root", nil, nil)
	webCA := newCA("Web", k.root, func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} })
	weak := k.intermediate.issue(p256, withSHA1)
	off := func(at int) func([]byte) []byte {
		return func(data []byte) []byte { data[at] ^= 1; return data }
	}
	rows := []row{
		// The envelope.
		{"hello: empty request", bend{helloRequest: func(r *Request) { r.Request = nil }}, true, reasons(ReasonMalformed)},
		{"hello: no name", bend{helloAfter: func(r *Request) { r.Name = "" }}, true, reasons(ReasonMalformed, ReasonHelloMismatch)},
		{"hello: no UID", bend{helloAfter: func(r *Request) { r.UID = "" }}, true, reasons(ReasonMalformed, ReasonHelloMismatch)},
		{"hello: a fourth block", bend{helloBytes: appended([]byte("-----BEGIN X-----\nAA==\n-----END X-----\n")...)}, true, reasons(ReasonMalformed)},
		{"hello: white space after", bend{helloBytes: appended('\n')}, true, reasons(ReasonMalformed)},
		{"hello: a PEM header", bend{helloBytes: replaced("PROVIDER-----\n", "PROVIDER-----\nA: b\n\n")}, true, reasons(ReasonMalformed)},
		{"hello: carriage returns", bend{helloBytes: func(b []byte) []byte { return bytes.ReplaceAll(b, []byte("\n"), []byte("\r\n")) }}, true, reasons(ReasonMalformed)},
		{"hello: another provider's", bend{helloContent: func(r *attestation.Request) { r.Provider = "insecure" }}, true, reasons(reasonProvider)},
		{"hello: under the proof's signer", bend{helloRequest: func(r *Request) { r.SignerName = testSigner }}, true, reasons(reasonSigner)},
		{"hello: means to ask the signer of rehearsals", bend{hello: func(h *attestation.Hello) { h.SignerName = attestation.RehearsalSignerName }}, true, reasons(reasonSigner, ReasonHelloMismatch)},
		{"hello: a rehearsal's, means to ask a signer that issues", bend{helloRequest: func(r *Request) { r.SignerName = attestation.RehearsalHelloSignerName }}, true, reasons(reasonSigner)},
		{"hello: means to ask the signer of hellos", bend{hello: func(h *attestation.Hello) { h.SignerName = attestation.HelloSignerName }}, true, reasons(reasonSigner, ReasonHelloMismatch)},
		{"hello: no version", bend{helloData: replaced(`"version":"tpm/v1"`, `"version":"tpm"`)}, true, reasons(ReasonMalformed)},
		{"hello: version of the future", bend{helloData: replaced(`"version":"tpm/v1"`, `"version":"tpm/v2"`)}, true, reasons(ReasonVersion)},
		{"hello: another provider's version", bend{helloData: replaced(`"version":"tpm/v1"`, `"version":"azure/v1"`)}, true, reasons(ReasonVersion)},
		{"hello: an older version than both know", bend{
			policy: func(c *Config) { c.Versions = attestation.Versions{"tpm/v2", "tpm/v1"} },
			hello:  func(h *attestation.Hello) { h.Versions = attestation.Versions{"tpm/v2", "tpm/v1"} },
		}, true, reasons(reasonVersionDowngrade)},
		{"hello: a proof", bend{helloData: replaced(`"kind":"hello"`, `"kind":"proof"`)}, true, reasons(ReasonKind)},
		{"hello: a challenge", bend{helloData: replaced(`"kind":"hello"`, `"kind":"challenge"`)}, true, reasons(ReasonKind)},
		{"hello: no kind", bend{helloData: replaced(`"kind":"hello",`, ``)}, true, reasons(ReasonMalformed)},
		{"hello: a doubled key", bend{helloData: replaced(`"ekTemplate"`, `"ekTemplate":"rsa-2048","ekTemplate"`)}, true, reasons(ReasonMalformed)},
		{"hello: a key in another case", bend{helloData: replaced(`"ekTemplate"`, `"EKTemplate"`)}, true, reasons(ReasonMalformed)},
		{"hello: a doubled key in another case", bend{helloData: replaced(`"akPublic"`, `"AKPublic":"AAAA","akPublic"`)}, true, reasons(ReasonMalformed)},
		{"hello: an unknown field", bend{helloData: replaced(`"ekTemplate"`, `"x":1,"ekTemplate"`)}, true, reasons(ReasonMalformed)},
		{"hello: white space in JSON", bend{helloData: replaced(`,"kind"`, `, "kind"`)}, true, reasons(ReasonMalformed)},
		{"hello: fields in another order", bend{helloData: func(b []byte) []byte {
			b = replaced(`"signerName":"`+testSigner+`",`, ``)(b)
			return replaced(`"akPublic"`, `"signerName":"`+testSigner+`","akPublic"`)(b)
		}}, true, reasons(ReasonMalformed)},
		{"hello: bytes after the JSON", bend{helloData: appended('\n')}, true, reasons(ReasonMalformed)},
		{"hello: a second JSON document", bend{helloData: appended([]byte(`{}`)...)}, true, reasons(ReasonMalformed)},
		{"hello: an escaped letter", bend{helloData: replaced(`ecc-p256`, `\u0065cc-p256`)}, true, reasons(ReasonMalformed)},
		{"hello: second base64 of the AK", bend{helloData: secondBase64("akPublic")}, true, reasons(ReasonMalformed)},
		{"hello: second base64 of the EK", bend{ek: "rsa-2048", helloData: secondBase64("ekPublic")}, true, reasons(ReasonMalformed)},

		// The EK's public area.
		{"EK: unknown template", bend{hello: func(h *attestation.Hello) { h.EKTemplate = "rsa-3072" }}, true, reasons(reasonEKTemplateUnknown)},
		{"EK: another template of the same kind", bend{hello: func(h *attestation.Hello) { h.EKTemplate = "ecc-p256-high" }}, true, reasons(reasonEKPublicMismatch)},
		{"EK: another template's name for RSA", bend{ek: "rsa-2048", hello: func(h *attestation.Hello) { h.EKTemplate = "rsa-2048-high" }}, true, reasons(reasonEKPublicMismatch)},
		{"EK: type", bend{hello: ekBytes(put(0, 0, 1))}, true, reasons(reasonEKPublicMismatch)},
		{"EK: nameAlg", bend{hello: ekBytes(put(2, 0, 0x0c))}, true, reasons(reasonEKPublicMismatch)},
		{"EK: authPolicy", bend{hello: ekBytes(off(12))}, true, reasons(reasonEKPublicMismatch)},
		{"EK: no authPolicy", bend{hello: ekBytes(func(b []byte) []byte { return slices.Concat(b[:8], []byte{0, 0}, b[42:]) })}, true, reasons(reasonEKPublicMismatch)},
		{"EK: symmetric algorithm", bend{hello: ekBytes(put(42, 0, 0x26))}, true, reasons(reasonEKPublicMismatch)},
		{"EK: symmetric key bits", bend{hello: ekBytes(put(44, 1, 0))}, true, reasons(reasonEKPublicMismatch)},
		{"EK: symmetric mode", bend{hello: ekBytes(put(46, 0, 0x42))}, true, reasons(reasonEKPublicMismatch)},
		{"EK: scheme", bend{hello: ekBytes(put(48, 0, 0x19))}, true, reasons(reasonEKPublicMismatch)},
		{"EK: curve", bend{hello: ekBytes(put(50, 0, 4))}, true, reasons(reasonEKPublicMismatch)},
		{"EK: kdf", bend{hello: ekBytes(put(52, 0, 0x20))}, true, reasons(reasonEKPublicMismatch)},
		{"EK: bytes after", bend{hello: ekBytes(appended(0))}, true, reasons(reasonEKPublicMismatch)},
		{"EK: cut short", bend{hello: ekBytes(func(b []byte) []byte { return b[:len(b)-1] })}, true, reasons(reasonEKPublicMismatch)},
		{"EK: one byte", bend{hello: ekBytes(func([]byte) []byte { return []byte{0} })}, true, reasons(reasonEKPublicMismatch)},
		{"EK: an AK's public area", bend{hello: func(h *attestation.Hello) { h.EKPublic = h.AKPublic }}, true, reasons(reasonEKPublicMismatch)},
		{"EK: point off the curve", bend{hello: ekBytes(func(b []byte) []byte { b[len(b)-1] ^= 1; return b })}, true, reasons(reasonEKPoint)},
		{"EK: point at infinity", bend{hello: ekBytes(func(b []byte) []byte { return append(b[:54], 0, 0, 0, 0) })}, true, reasons(reasonEKPoint)},
		{"EK: a coordinate too long", bend{hello: ekBytes(func(b []byte) []byte { return insert(56, 0)(put(54, 0, 33)(b)) })}, true, reasons(reasonEKPoint)},
		{"EK: RSA exponent 3", bend{ek: "rsa-2048", hello: ekBytes(put(52, 0, 0, 0, 3))}, true, reasons(reasonEKPublicMismatch)},
		{"EK: RSA exponent 65537 spelt out", bend{ek: "rsa-2048", hello: ekBytes(put(52, 0, 1, 0, 1))}, true, reasons(reasonEKPublicMismatch)},
		{"EK: RSA key bits 1024", bend{ek: "rsa-2048", hello: ekBytes(func(b []byte) []byte {
			return slices.Concat(put(50, 4, 0)(b)[:56], sized(rsa1024().N.Bytes()))
		})}, true, reasons(reasonEKPublicMismatch)},
		{"EK: RSA 1024 as 2048", bend{ek: "rsa-2048", hello: ekBytes(func(b []byte) []byte {
			return slices.Concat(b[:56], sized(rsa1024().N.Bytes()))
		})}, true, reasons(reasonEKWeak)},
		{"EK: RSA 1024 padded to 2048", bend{ek: "rsa-2048", hello: ekBytes(func(b []byte) []byte {
			return slices.Concat(b[:56], sized(rsa1024().N.FillBytes(make([]byte, 256))))
		})}, true, reasons(reasonEKWeak)},
		{"EK: RSA modulus even", bend{ek: "rsa-2048", hello: ekBytes(func(b []byte) []byte { b[len(b)-1] &^= 1; return b })}, true, reasons(reasonEKWeak)},
		{"EK: ROCA", bend{ek: "rsa-2048", hello: func(h *attestation.Hello) {
			h.EKPublic = ekPublic("rsa-2048", rocaKey())
			h.EKCertificates = [][]byte{k.intermediate.issue(rocaKey(), nil)}
		}, secret: func(i *attestation.SecretInfo) { i.EKPublicKey = spkiOf(rocaKey()) }}, true, reasons(reasonEKWeak)},

		// The EK's certificate.
		{"certificate: bytes after", bend{hello: certificates(append(bytes.Clone(good), 0))}, true, reasons(reasonEKCertMalformed)},
		{"certificate: NV padding after", bend{hello: certificates(append(bytes.Clone(good), bytes.Repeat([]byte{0xff}, 100)...))}, true, reasons(reasonEKCertMalformed)},
		{"certificate: bytes after, though the EK is named", bend{
			policy: func(c *Config) { c.NamedEKs = true }, named: []Fingerprint{fingerprint}, hello: certificates(append(bytes.Clone(good), 0)),
		}, true, reasons(reasonEKCertMalformed)},
		{"certificate: none, though the EK is named", bend{
			policy: func(c *Config) { c.NamedEKs = true }, named: []Fingerprint{fingerprint}, hello: certificates([]byte{5}),
		}, true, reasons(reasonEKCertMalformed)},
		{"certificate: NV wrapper before", bend{hello: certificates(append([]byte{0x10, 0x01, 0x00}, good...))}, true, reasons(reasonEKCertMalformed)},
		{"certificate: two in one", bend{hello: certificates(slices.Concat(good, good))}, true, reasons(reasonEKCertMalformed)},
		{"certificate: cut short", bend{hello: certificates(good[:len(good)-1])}, true, reasons(reasonEKCertMalformed)},
		{"certificate: none", bend{hello: certificates([]byte{5})}, true, reasons(reasonEKCertMalformed)},
		{"certificate: long form of a length", bend{hello: certificates(longForm(good))}, true, reasons(reasonEKCertMalformed)},
		{"certificate: an issuer with bytes after", bend{hello: certificates(shown.issue(p256, nil), append(bytes.Clone(shown.certificate.Raw), 0))}, true, reasons(reasonEKChainUnknown)},
		{"certificate: an issuer with a huge key", bend{hello: certificates(shown.issue(p256, nil), hugeCA())}, true, reasons(reasonEKChainUnknown)},
		{"certificate: of another TPM", bend{hello: certificates(k.intermediate.issue(newKey(elliptic.P256()).Public(), nil))}, true, reasons(reasonEKCertMismatch)},
		{"certificate: of another kind of key", bend{hello: certificates(k.intermediate.issue(rsa2048().Public(), nil))}, true, reasons(reasonEKCertMismatch)},
		{"certificate: issuer first", bend{hello: certificates(k.intermediate.certificate.Raw, good)}, true, reasons(reasonEKCertMismatch)},
		{"certificate: same modulus, exponent 3", bend{ek: "rsa-2048", hello: certificates(k.intermediate.issue(&rsa.PublicKey{N: rsa2048().N, E: 3}, nil))}, true, reasons(reasonEKCertMismatch)},
		{"certificate: another key's, though the EK is named", bend{
			policy: func(c *Config) { c.AllowedEKs = []Fingerprint{fingerprint} },
			hello:  certificates(k.intermediate.issue(newKey(elliptic.P256()).Public(), nil)),
		}, true, reasons(reasonEKCertMismatch)},
		{"certificate: a CA's", bend{hello: issued(func(c *x509.Certificate) { c.IsCA = true })}, true, reasons(reasonEKIsCA)},
		{"certificate: may sign certificates", bend{hello: issued(func(c *x509.Certificate) { c.KeyUsage |= x509.KeyUsageCertSign })}, true, reasons(reasonEKIsCA)},
		{"certificate: may sign CRLs", bend{hello: issued(func(c *x509.Certificate) { c.KeyUsage |= x509.KeyUsageCRLSign })}, true, reasons(reasonEKIsCA)},
		{"certificate: no extended key usage", bend{hello: issued(func(c *x509.Certificate) { c.UnknownExtKeyUsage = nil })}, true, reasons(reasonEKUsage)},
		{"certificate: a web server's", bend{hello: issued(func(c *x509.Certificate) {
			c.UnknownExtKeyUsage, c.ExtKeyUsage = nil, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
		})}, true, reasons(reasonEKUsage)},
		{"certificate: any usage", bend{hello: issued(func(c *x509.Certificate) {
			c.UnknownExtKeyUsage, c.ExtKeyUsage = nil, []x509.ExtKeyUsage{x509.ExtKeyUsageAny}
		})}, true, reasons(reasonEKUsage)},
		{"certificate: of a platform", bend{hello: issued(func(c *x509.Certificate) {
			c.UnknownExtKeyUsage = []asn1.ObjectIdentifier{{2, 23, 133, 8, 2}}
		})}, true, reasons(reasonEKUsage)},
		{"certificate: of an AK", bend{hello: issued(func(c *x509.Certificate) {
			c.UnknownExtKeyUsage = []asn1.ObjectIdentifier{{2, 23, 133, 8, 3}}
		})}, true, reasons(reasonEKUsage)},
		{"certificate: signs only", bend{hello: issued(func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageDigitalSignature })}, true, reasons(reasonEKUsage)},
		{"certificate: unknown critical extension", bend{hello: extensions(goodSAN(), pkix.Extension{Id: asn1.ObjectIdentifier{1, 2, 3}, Critical: true, Value: []byte{5, 0}})}, true, reasons(reasonEKCriticalExtension)},
		{"certificate: critical name of a host", bend{hello: issued(func(c *x509.Certificate) { c.ExtraExtensions, c.DNSNames = nil, []string{"a.example"} })}, true, reasons(reasonEKSubjectAltName)},
		{"certificate: name of a host beside a TPM's", bend{hello: extensions(withDNS(goodSAN()))}, true, reasons(reasonEKSubjectAltName)},
		{"certificate: two directory names", bend{hello: extensions(twice(goodSAN()))}, true, reasons(reasonEKSubjectAltName)},
		{"certificate: no maker", bend{hello: extensions(san(true, attribute(2, "M"), attribute(3, "id:1")))}, true, reasons(reasonEKSubjectAltName)},
		{"certificate: no model", bend{hello: extensions(san(true, attribute(1, "id:49465800"), attribute(3, "id:1")))}, true, reasons(reasonEKSubjectAltName)},
		{"certificate: no version", bend{hello: extensions(san(true, attribute(1, "id:49465800"), attribute(2, "M")))}, true, reasons(reasonEKSubjectAltName)},
		{"certificate: two makers", bend{hello: extensions(san(true, attribute(1, "id:49465800"), attribute(1, "id:53544D20"), attribute(2, "M"), attribute(3, "id:1")))}, true, reasons(reasonEKSubjectAltName)},
		{"certificate: maker in words", bend{hello: extensions(san(true, attribute(1, "Infineon"), attribute(2, "M"), attribute(3, "id:1")))}, true, reasons(reasonEKSubjectAltName)},
		{"certificate: maker too long", bend{hello: extensions(san(true, attribute(1, "id:4946580000"), attribute(2, "M"), attribute(3, "id:1")))}, true, reasons(reasonEKSubjectAltName)},
		{"certificate: version in words", bend{hello: extensions(san(true, attribute(1, "id:49465800"), attribute(2, "M"), attribute(3, "one")))}, true, reasons(reasonEKSubjectAltName)},
		{"certificate: version with a sign", bend{hello: extensions(san(true, attribute(1, "id:49465800"), attribute(2, "M"), attribute(3, "id:-1")))}, true, reasons(reasonEKSubjectAltName)},
		{"certificate: model too long", bend{hello: extensions(san(true, attribute(1, "id:49465800"), attribute(2, strings.Repeat("M", 65)), attribute(3, "id:1")))}, true, reasons(reasonEKSubjectAltName)},
		{"certificate: model with a line feed", bend{hello: extensions(san(true, attribute(1, "id:49465800"), attribute(2, "M\nN"), attribute(3, "id:1")))}, true, reasons(reasonEKSubjectAltName)},
		{"certificate: another attribute", bend{hello: extensions(san(true, attribute(1, "id:49465800"), attribute(2, "M"), attribute(3, "id:1"), attribute(4, "x")))}, true, reasons(reasonEKSubjectAltName)},
		{"certificate: bytes after the name", bend{hello: extensions(func() pkix.Extension { e := goodSAN(); e.Value = append(e.Value, 0); return e }())}, true, reasons(reasonEKSubjectAltName)},
		{"certificate: an empty name", bend{hello: extensions(pkix.Extension{Id: asn1.ObjectIdentifier{2, 5, 29, 17}, Value: []byte{0x30, 0}})}, true, reasons(reasonEKSubjectAltName)},
		{"certificate: expired", bend{hello: issued(func(c *x509.Certificate) { c.NotAfter = testNow.Add(-time.Minute) })}, true, reasons(reasonEKChainExpired)},
		{"certificate: not yet valid", bend{hello: issued(func(c *x509.Certificate) { c.NotBefore = testNow.Add(time.Hour) })}, true, reasons(reasonEKChainExpired)},
		{"certificate: its issuer expired", bend{hello: certificates(old.issue(p256, nil), old.certificate.Raw)}, true, reasons(reasonEKChainExpired)},
		{"certificate: valid, but not at the policy's time", bend{policy: func(c *Config) { c.ChainTime = testNow.AddDate(-3, 0, 0) }}, true, reasons(reasonEKChainExpired)},
		{"certificate: expired and of an unknown root", bend{hello: certificates(other.issue(p256, func(c *x509.Certificate) { c.NotAfter = testNow.Add(-time.Minute) }))}, true, reasons(reasonEKChainUnknown)},
		{"certificate: of an unknown root", bend{hello: certificates(other.issue(p256, nil), other.certificate.Raw)}, true, reasons(reasonEKChainUnknown)},
		{"certificate: of an unknown root, the intermediate shown", bend{hello: certificates(otherIntermediate.issue(p256, nil), otherIntermediate.certificate.Raw, other.certificate.Raw)}, true, reasons(reasonEKChainUnknown)},
		{"certificate: of an impostor with the issuer's name", bend{hello: certificates(impostor.issue(p256, nil), impostor.certificate.Raw)}, true, reasons(reasonEKChainUnknown)},
		{"certificate: chain without its intermediate", bend{hello: certificates(shown.issue(p256, nil))}, true, reasons(reasonEKChainUnknown)},
		{"certificate: self-signed", bend{hello: certificates(selfSigned(k.ecEKs["ecc-p256"]))}, true, reasons(reasonEKChainUnknown)},
		{"certificate: issued by an EK", bend{hello: certificates(noCA.issue(p256, nil), good)}, true, reasons(reasonEKChainUnknown)},
		{"certificate: signature altered", bend{hello: certificates(put(len(good)-1, good[len(good)-1]^1)(bytes.Clone(good)))}, true, reasons(reasonEKChainUnknown)},
		{"certificate: only through a denied intermediate", bend{policy: func(c *Config) {
			c.DeniedEKs = []Fingerprint{FingerprintOf(k.intermediate.certificate.RawSubjectPublicKeyInfo)}
		}}, true, reasons(reasonEKChainDenied)},
		{"certificate: only through a denied root", bend{policy: func(c *Config) {
			c.DeniedEKs = []Fingerprint{FingerprintOf(k.root.certificate.RawSubjectPublicKeyInfo)}
		}}, true, reasons(reasonEKChainDenied)},
		{"certificate: signed with SHA-1", bend{hello: issued(withSHA1)}, true, reasons(reasonEKChainSHA1)},
		{"certificate: a CA signed with SHA-1", bend{hello: certificates(sha1.issue(p256, nil), sha1.certificate.Raw)}, true, reasons(reasonEKChainSHA1)},
		{"certificate: a CA of the policy signed with SHA-1", bend{policy: func(c *Config) { c.Intermediates = append(c.Intermediates, sha1.certificate) }, hello: certificates(sha1.issue(p256, nil))}, true, reasons(reasonEKChainSHA1)},
		{"certificate: a CA of a CA signed with SHA-1", bend{hello: certificates(belowSHA1.issue(p256, nil), belowSHA1.certificate.Raw, sha1.certificate.Raw)}, true, reasons(reasonEKChainSHA1)},
		{"certificate: signed with SHA-1 and RSA", bend{policy: func(c *Config) { c.Roots = append(c.Roots, withRSA.certificate) }, hello: certificates(withRSA.issue(p256, func(c *x509.Certificate) { c.SignatureAlgorithm = x509.SHA1WithRSA }))}, true, reasons(reasonEKChainSHA1)},
		{"certificate: signed with SHA-1, and expired", bend{hello: issued(func(c *x509.Certificate) { withSHA1(c); c.NotAfter = testNow.Add(-time.Minute) })}, true, reasons(reasonEKChainSHA1)},
		{"certificate: signed with SHA-1, without a usage", bend{hello: issued(func(c *x509.Certificate) { withSHA1(c); c.UnknownExtKeyUsage = nil })}, true, reasons(reasonEKUsage, reasonEKChainSHA1)},
		{"certificate: signed with SHA-1, altered", bend{hello: certificates(put(len(weak)-1, weak[len(weak)-1]^1)(bytes.Clone(weak)))}, true, reasons(reasonEKChainUnknown)},
		{"certificate: signed with SHA-1, of an unknown root", bend{hello: certificates(other.issue(p256, withSHA1), other.certificate.Raw)}, true, reasons(reasonEKChainUnknown)},
		{"certificate: signed with SHA-1, of an impostor with the issuer's name", bend{hello: certificates(impostor.issue(p256, withSHA1), impostor.certificate.Raw)}, true, reasons(reasonEKChainUnknown)},
		{"certificate: signed with SHA-1, self-signed", bend{hello: certificates(selfSigned(k.ecEKs["ecc-p256"], withSHA1))}, true, reasons(reasonEKChainUnknown)},
		{"certificate: signed with SHA-1, issued by an EK", bend{hello: certificates(noCA.issue(p256, withSHA1), good)}, true, reasons(reasonEKChainUnknown)},
		{"certificate: signed with SHA-1, by a CA that is not for EKs", bend{hello: certificates(webCA.issue(p256, withSHA1), webCA.certificate.Raw)}, true, reasons(reasonEKChainUnknown)},
		{"certificate: signed with SHA-1, by a denied CA", bend{policy: func(c *Config) {
			c.DeniedEKs = []Fingerprint{FingerprintOf(k.intermediate.certificate.RawSubjectPublicKeyInfo)}
		}, hello: issued(withSHA1)}, true, reasons(reasonEKChainUnknown)},
		{"certificate: signed with SHA-1, though another EK is named", bend{policy: func(c *Config) { c.NamedEKs = true }, named: []Fingerprint{{1}}, hello: issued(withSHA1)}, true, reasons(reasonEKChainSHA1)},
		{"certificate: no roots, and not the system's", bend{policy: func(c *Config) {
			c.Roots, c.Intermediates, c.NamedEKs = nil, nil, true
		}}, true, reasons(reasonEKUntrusted)},

		// Trust in the EK.
		{"EK: bare", bend{hello: certificates()}, true, reasons(reasonEKUntrusted)},
		{"EK: bare, another is allowed", bend{hello: certificates(), policy: func(c *Config) { c.AllowedEKs = []Fingerprint{{1}} }}, true, reasons(reasonEKUntrusted)},
		{"EK: bare, another is named", bend{hello: certificates(), policy: func(c *Config) { c.NamedEKs = true }, named: []Fingerprint{{1}}}, true, reasons(reasonEKUntrusted)},
		{"EK: bare, named, but names do not count", bend{hello: certificates(), named: []Fingerprint{fingerprint}}, true, reasons(reasonEKUntrusted)},
		{"EK: denied", bend{policy: func(c *Config) { c.DeniedEKs = []Fingerprint{fingerprint} }}, true, reasons(ReasonEKDenied)},
		{"EK: denied and allowed", bend{policy: func(c *Config) {
			c.DeniedEKs, c.AllowedEKs = []Fingerprint{fingerprint}, []Fingerprint{fingerprint}
		}}, true, reasons(ReasonEKDenied)},
		{"EK: denied and named", bend{policy: func(c *Config) {
			c.DeniedEKs, c.NamedEKs = []Fingerprint{fingerprint}, true
		}, named: []Fingerprint{fingerprint}}, true, reasons(ReasonEKDenied)},
		{"EK: denied and bare", bend{hello: certificates(), policy: func(c *Config) { c.DeniedEKs = []Fingerprint{fingerprint} }}, true, reasons(ReasonEKDenied, reasonEKUntrusted)},

		// The AK.
		{"AK: type", bend{hello: akBytes(put(0, 0, 1))}, true, reasons(reasonAKTemplateMismatch)},
		{"AK: a keyed hash", bend{hello: akBytes(put(0, 0, 8))}, true, reasons(reasonAKTemplateMismatch)},
		{"AK: nameAlg SHA-384", bend{hello: akBytes(put(2, 0, 0x0c))}, true, reasons(reasonAKTemplateMismatch)},
		{"AK: nameAlg SHA-1", bend{hello: akBytes(put(2, 0, 4))}, true, reasons(reasonAKTemplateMismatch)},
		{"AK: nameAlg null", bend{hello: akBytes(put(2, 0, 0x10))}, true, reasons(reasonAKTemplateMismatch)},
		{"AK: a policy", bend{hello: akBytes(func(b []byte) []byte { return insert(10, make([]byte, 32)...)(put(8, 0, 32)(b)) })}, true, reasons(reasonAKTemplateMismatch)},
		{"AK: symmetric AES", bend{hello: akBytes(func(b []byte) []byte { return insert(12, 0, 0x80, 0, 0x43)(put(10, 0, 6)(b)) })}, true, reasons(reasonAKTemplateMismatch)},
		{"AK: no scheme", bend{hello: akBytes(func(b []byte) []byte { return slices.Delete(put(12, 0, 0x10)(b), 14, 16) })}, true, reasons(reasonAKTemplateMismatch)},
		{"AK: scheme ECSchnorr", bend{hello: akBytes(put(12, 0, 0x1c))}, true, reasons(reasonAKTemplateMismatch)},
		{"AK: scheme ECDAA", bend{hello: akBytes(func(b []byte) []byte { return insert(16, 0, 0)(put(12, 0, 0x1a)(b)) })}, true, reasons(reasonAKTemplateMismatch)},
		{"AK: hash SHA-1", bend{hello: akBytes(put(14, 0, 4))}, true, reasons(reasonAKTemplateMismatch)},
		{"AK: hash SHA-384", bend{hello: akBytes(put(14, 0, 0x0c))}, true, reasons(reasonAKTemplateMismatch)},
		{"AK: curve P-384", bend{hello: akBytes(put(16, 0, 4))}, true, reasons(reasonAKTemplateMismatch)},
		{"AK: curve P-224", bend{hello: akBytes(put(16, 0, 2))}, true, reasons(reasonAKTemplateMismatch)},
		{"AK: a KDF", bend{hello: akBytes(func(b []byte) []byte { return insert(20, 0, 0x0b)(put(18, 0, 0x20)(b)) })}, true, reasons(reasonAKTemplateMismatch)},
		{"AK: bytes after", bend{hello: akBytes(appended(0))}, true, reasons(reasonAKTemplateMismatch)},
		{"AK: cut short", bend{hello: akBytes(func(b []byte) []byte { return b[:len(b)-1] })}, true, reasons(reasonAKTemplateMismatch)},
		{"AK: a TPM2B", bend{hello: akBytes(sized)}, true, reasons(reasonAKTemplateMismatch)},
		{"AK: the EK", bend{hello: func(h *attestation.Hello) { h.AKPublic = h.EKPublic }}, true, reasons(reasonAKTemplateMismatch)},
		{"AK: an RSA key", bend{hello: func(h *attestation.Hello) { h.AKPublic = ekPublic("rsa-2048", rsa2048().Public()) }}, true, reasons(reasonAKTemplateMismatch)},
		{"AK: point off the curve", bend{hello: akBytes(func(b []byte) []byte { b[len(b)-1] ^= 1; return b })}, true, reasons(reasonAKPoint)},
		{"AK: point at infinity", bend{hello: akBytes(func(b []byte) []byte { return append(b[:20], 0, 0, 0, 0) })}, true, reasons(reasonAKPoint)},
		{"AK: point of zeros", bend{hello: akBytes(put(22, make([]byte, 32)...))}, true, reasons(reasonAKPoint)},
		{"AK: a coordinate too long", bend{hello: akBytes(func(b []byte) []byte { return insert(22, 0)(put(20, 0, 33)(b)) })}, true, reasons(reasonAKPoint)},
		{"AK: a coordinate beyond the field", bend{hello: akBytes(put(22, bytes.Repeat([]byte{0xff}, 32)...))}, true, reasons(reasonAKPoint)},
		{"AK: a software key as TPM2_LoadExternal takes it", bend{hello: akBytes(put(4, 0, 4, 0, 0x40))}, true, reasons(reasonAKTemplateMismatch)},
		{"AK: a software key as TPM2_Import takes it", bend{hello: akBytes(put(4, 0, 5, 4, 0x40))}, true, reasons(reasonAKTemplateMismatch)},

		// Several rules at once are all told.
		{"EK and AK off", bend{hello: func(h *attestation.Hello) { h.EKTemplate = "x"; h.AKPublic[0] ^= 1 }}, true, reasons(reasonEKTemplateUnknown, reasonAKTemplateMismatch)},
		{"certificate: of an unknown root, no usage, a CA's", bend{hello: certificates(other.issue(p256, func(c *x509.Certificate) {
			c.UnknownExtKeyUsage, c.IsCA = nil, true
		}))}, true, reasons(reasonEKIsCA, reasonEKUsage, reasonEKChainUnknown)},
	}
	// Each attribute of the AK, and each of the EK, set where it must be clear and clear where it
	// must be set.
	for bit := range 32 {
		flip := func(data []byte) []byte {
			binary.BigEndian.PutUint32(data[4:], binary.BigEndian.Uint32(data[4:])^1<<bit)
			return data
		}
		rows = append(rows,
			row{fmt.Sprintf("AK: attribute %d flipped", bit), bend{hello: akBytes(flip)}, true, reasons(reasonAKTemplateMismatch)},
			row{fmt.Sprintf("EK: attribute %d flipped", bit), bend{hello: ekBytes(flip)}, true, reasons(reasonEKPublicMismatch)},
		)
	}
	return rows
}

// longForm spells a DER length in more bytes than it needs.
func longForm(der []byte) []byte {
	if der[1] != 0x82 {
		panic("another length")
	}
	return slices.Concat([]byte{0x30, 0x83, 0}, der[2:])
}

func hugeCA() []byte {
	n := new(big.Int).Lsh(big.NewInt(1), maxRSA)
	key := &rsa.PublicKey{N: n.Add(n, big.NewInt(1)), E: 65537}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), IsCA: true, BasicConstraintsValid: true, NotBefore: testNow, NotAfter: testNow}
	k := theKit()
	return must(x509.CreateCertificate(rand.Reader, c, k.root.certificate, key, k.root.key))
}

func selfSigned(key *ecdsa.PrivateKey, changes ...func(*x509.Certificate)) []byte {
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: testNow.AddDate(-1, 0, 0), NotAfter: testNow.AddDate(1, 0, 0),
		UnknownExtKeyUsage: []asn1.ObjectIdentifier{{2, 23, 133, 8, 1}}, ExtraExtensions: []pkix.Extension{goodSAN()},
	}
	for _, change := range changes {
		change(c)
	}
	return must(x509.CreateCertificate(rand.Reader, c, c, key.Public(), key))
}

func withDNS(e pkix.Extension) pkix.Extension {
	var list []asn1.RawValue
	must(asn1.Unmarshal(e.Value, &list))
	list = append(list, asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: 2, Bytes: []byte("a.example")})
	e.Value = must(asn1.Marshal(list))
	return e
}

func twice(e pkix.Extension) pkix.Extension {
	var list []asn1.RawValue
	must(asn1.Unmarshal(e.Value, &list))
	e.Value = must(asn1.Marshal(append(list, list[0])))
	return e
}

func proofRows() []row {
	k := theKit()
	otherKey := newKey(elliptic.P256())
	otherUID := "0d7e5e0a-3c1f-4b52-8a51-0e6f6d3f9aff"
	flip := func(p *attestation.Proof) {
		p.PCRs[1].Value = append([]byte{p.PCRs[1].Value[0] ^ 1}, p.PCRs[1].Value[1:]...)
	}
	rows := []row{
		// The envelope.
		{"proof: empty request", bend{proofRequest: func(r *Request) { r.Request = nil }}, false, reasons(ReasonMalformed)},
		{"proof: no UID", bend{proofRequest: func(r *Request) { r.UID = "" }}, false, reasons(ReasonMalformed)},
		{"proof: a fourth block", bend{proofBytes: appended([]byte("-----BEGIN X-----\nAA==\n-----END X-----\n")...)}, false, reasons(ReasonMalformed)},
		{"proof: white space after", bend{proofBytes: appended('\n')}, false, reasons(ReasonMalformed)},
		{"proof: another provider's", bend{proofContent: func(r *attestation.Request) { r.Provider = "insecure" }}, false, reasons(reasonProvider)},
		{"proof: version of the future", bend{proofData: replaced(`"version":"tpm/v1"`, `"version":"tpm/v2"`)}, false, reasons(ReasonVersion)},
		{"proof: called a hello", bend{proofData: replaced(`"kind":"proof"`, `"kind":"hello"`)}, false, reasons(ReasonKind)},
		{"proof: called a challenge", bend{proofData: replaced(`"kind":"proof"`, `"kind":"challenge"`)}, false, reasons(ReasonKind)},
		{"proof: a doubled key", bend{proofData: replaced(`"kid"`, `"kid":"k0","kid"`)}, false, reasons(ReasonMalformed)},
		{"proof: a key in another case", bend{proofData: replaced(`"helloUID"`, `"helloUid"`)}, false, reasons(ReasonMalformed)},
		{"proof: an unknown field", bend{proofData: replaced(`"kid"`, `"x":null,"kid"`)}, false, reasons(ReasonMalformed)},
		{"proof: bytes after the JSON", bend{proofData: appended(' ')}, false, reasons(ReasonMalformed)},
		{"proof: a PCR given twice", bend{proofData: replaced(`"index":4`, `"index":0`)}, false, reasons(ReasonMalformed)},
		{"proof: no PCR", bend{proofData: func(b []byte) []byte {
			start, end := bytes.Index(b, []byte(`"pcrs":[`))+8, bytes.Index(b, []byte(`],"quote"`))
			return slices.Concat(b[:start], b[end:])
		}}, false, reasons(ReasonMalformed)},
		{"proof: an expiry as a float", bend{proofData: replaced(`"expires":`, `"expires":0.1e`)}, false, reasons(ReasonMalformed)},
		{"proof: second base64 of the quote", bend{attest: func(a *attest) {}, proofData: secondBase64("quote")}, false, reasons(ReasonMalformed)},
		{"proof: a bank of SHA-1", bend{proofData: replaced(`"pcrBank":"sha256"`, `"pcrBank":"sha1"`)}, false, reasons(ReasonMalformed)},
		{"proof: under the signer of hellos", bend{proofRequest: func(r *Request) { r.SignerName = attestation.HelloSignerName }}, false, reasons(reasonSigner, ReasonQuoteMAC)},

		// Which hello, which request.
		{"copied: under another name", bend{proofRequest: func(r *Request) { r.Name = "node-csr-cccccccccccccccccccccccccc" }}, false, reasons(ReasonQuoteMAC)},
		{"copied: under another signer", bend{proofRequest: func(r *Request) { r.SignerName = "kubernetes.io/kube-apiserver-client-kubelet" }}, false, reasons(ReasonHelloMismatch)},
		{"copied: under another signer, with a hello for it", bend{
			secret:     func(i *attestation.SecretInfo) { i.SignerName = "other.example/signer" },
			transcript: func(tr *attestation.Transcript) { tr.SignerName = "other.example/signer" },
		}, false, reasons(ReasonQuoteMAC)},
		{"copied: with another certification request", bend{proofContent: func(r *attestation.Request) { r.PKCS10 = []byte("another") }}, false, reasons(reasonRequestMismatch, ReasonQuoteMAC)},
		{"proof: another certification request than the hello's", bend{
			transcript:   func(tr *attestation.Transcript) { tr.PKCS10 = []byte("another") },
			proofContent: func(r *attestation.Request) { r.PKCS10 = []byte("another") },
		}, false, reasons(reasonRequestMismatch)},
		{"proof: other usages", bend{
			transcript:   func(tr *attestation.Transcript) { tr.Usages = []string{"client auth", "server auth"} },
			proofRequest: func(r *Request) { r.Usages = []string{"client auth", "server auth"} },
		}, false, reasons(reasonRequestMismatch)},
		{"proof: usages in another order", bend{
			transcript:   func(tr *attestation.Transcript) { tr.Usages = []string{"client auth", "digital signature"} },
			proofRequest: func(r *Request) { r.Usages = []string{"client auth", "digital signature"} },
		}, false, reasons(reasonRequestMismatch)},
		{"copied: with other usages", bend{proofRequest: func(r *Request) { r.Usages = []string{"client auth"} }}, false, reasons(reasonRequestMismatch, ReasonQuoteMAC)},
		{"copied: with other usages, the hello too", bend{
			proofRequest: func(r *Request) { r.Usages = []string{"client auth"} },
			helloAfter:   func(r *Request) { r.Usages = []string{"client auth"} },
		}, false, reasons(ReasonQuoteMAC)},
		{"proof: other expirationSeconds", bend{
			transcript:   func(tr *attestation.Transcript) { tr.ExpirationSeconds = int32p(7200) },
			proofRequest: func(r *Request) { r.ExpirationSeconds = int32p(7200) },
		}, false, reasons(reasonRequestMismatch)},
		{"proof: expirationSeconds unset", bend{
			transcript:   func(tr *attestation.Transcript) { tr.ExpirationSeconds = nil },
			proofRequest: func(r *Request) { r.ExpirationSeconds = nil },
		}, false, reasons(reasonRequestMismatch)},
		{"proof: expirationSeconds set, the hello's unset", bend{
			transcript: func(tr *attestation.Transcript) { tr.ExpirationSeconds = int32p(3600) },
			helloAfter: func(r *Request) { r.ExpirationSeconds = nil },
		}, false, reasons(reasonRequestMismatch)},
		{"copied: with other expirationSeconds, the hello too", bend{
			proofRequest: func(r *Request) { r.ExpirationSeconds = int32p(31536000) },
			helloAfter:   func(r *Request) { r.ExpirationSeconds = int32p(31536000) },
		}, false, reasons(ReasonQuoteMAC)},
		{"copied: expirationSeconds unset, the hello's too", bend{
			proofRequest: func(r *Request) { r.ExpirationSeconds = nil },
			helloAfter:   func(r *Request) { r.ExpirationSeconds = nil },
		}, false, reasons(ReasonQuoteMAC)},
		{"hello: deleted and filed again", bend{helloAfter: func(r *Request) { r.UID = otherUID }}, false, reasons(ReasonHelloMismatch)},
		{"hello: deleted and filed again, and the proof says so", bend{
			helloAfter: func(r *Request) { r.UID = otherUID },
			proof:      func(p *attestation.Proof) { p.HelloUID = otherUID },
		}, false, reasons(ReasonQuoteMAC)},
		{"hello: another object", bend{helloAfter: func(r *Request) { r.Name, r.UID = "other", otherUID }}, false, reasons(ReasonHelloMismatch)},
		{"hello: another name, same UID", bend{
			helloAfter: func(r *Request) { r.Name = "other" },
			proof:      func(p *attestation.Proof) { p.HelloName = "other" },
		}, false, reasons(ReasonQuoteMAC)},
		{"hello: altered since", bend{helloAfter: func(r *Request) {
			c := must(attestation.Parse(r.Request))
			h := must(attestation.ParseHello(c.Data))
			h.Versions = attestation.Versions{"tpm/v9", "tpm/v1"}
			c.Data = must(h.Marshal())
			r.Request = must(c.Marshal())
		}}, false, reasons(ReasonQuoteMAC)},
		{"hello: of another TPM with this AK", bend{helloAfter: func(r *Request) {
			c := must(attestation.Parse(r.Request))
			h := must(attestation.ParseHello(c.Data))
			key := newKey(elliptic.P256()).Public()
			h.EKPublic, h.EKCertificates = ekPublic("ecc-p256", key), [][]byte{k.intermediate.issue(key, nil)}
			c.Data = must(h.Marshal())
			r.Request = must(c.Marshal())
		}}, false, reasons(ReasonQuoteMAC)},
		{"hello: with another AK", bend{helloAfter: func(r *Request) {
			c := must(attestation.Parse(r.Request))
			h := must(attestation.ParseHello(c.Data))
			h.AKPublic = akPublic(&otherKey.PublicKey)
			c.Data = must(h.Marshal())
			r.Request = must(c.Marshal())
		}}, false, reasons(reasonQuoteSigner, reasonQuoteSignature, ReasonQuoteMAC)},

		// The challenge.
		{"challenge: key unknown", bend{keyID: func(id *string, key *[]byte) { *id = "k7" }}, false, reasons(reasonChallengeKeyUnknown)},
		{"challenge: said to be of another key", bend{proof: func(p *attestation.Proof) { p.KeyID = "k0" }}, false, reasons(ReasonQuoteMAC)},
		{"challenge: of another controller's key", bend{keyID: func(id *string, key *[]byte) { *key = bytes.Repeat([]byte("x"), 32) }}, false, reasons(ReasonQuoteMAC)},
		{"challenge: expired", bend{now: testNow.Add(defaultChallengeLifetime)}, false, reasons(reasonChallengeExpired)},
		{"challenge: expired long ago", bend{now: testNow.AddDate(1, 0, 0)}, false, reasons(reasonChallengeExpired)},
		{"challenge: the proof came late", bend{
			now:          testNow.AddDate(0, 0, 1),
			proofRequest: func(r *Request) { r.Created = testNow.Add(defaultChallengeLifetime) },
		}, false, reasons(reasonChallengeExpired)},
		{"challenge: the proof is said to have come later than now", bend{
			now:          testNow.Add(defaultChallengeLifetime),
			proofRequest: func(r *Request) { r.Created = testNow.AddDate(1, 0, 0) },
		}, false, reasons(reasonChallengeExpired)},
		{"challenge: expired, and said to be later", bend{
			now:   testNow.Add(defaultChallengeLifetime),
			proof: func(p *attestation.Proof) { p.Expires += 300 },
		}, false, reasons(ReasonQuoteMAC)},
		{"challenge: expiry earlier", bend{proof: func(p *attestation.Proof) { p.Expires-- }}, false, reasons(ReasonQuoteMAC)},
		{"challenge: expiry later", bend{proof: func(p *attestation.Proof) { p.Expires++ }}, false, reasons(ReasonQuoteMAC)},
		{"challenge: ends later than any", bend{expires: func(e *int64) { *e += 3600 }}, false, reasons(reasonChallengeAhead)},
		{"challenge: never ends", bend{expires: func(e *int64) { *e = 1<<63 - 1 }}, false, reasons(reasonChallengeAhead)},
		{"challenge: for another cluster", bend{secret: func(i *attestation.SecretInfo) { i.ClusterUID = otherUID }}, false, reasons(ReasonQuoteMAC)},
		{"challenge: for another EK", bend{secret: func(i *attestation.SecretInfo) { i.EKPublicKey = spkiOf(otherKey.Public()) }}, false, reasons(ReasonQuoteMAC)},
		{"challenge: for another AK", bend{secret: func(i *attestation.SecretInfo) { i.AKName = nameOf([]byte("x")) }}, false, reasons(ReasonQuoteMAC)},
		{"challenge: for another hello", bend{secret: func(i *attestation.SecretInfo) { i.HelloRequest = []byte("x") }}, false, reasons(ReasonQuoteMAC)},
		{"challenge: for another signer", bend{secret: func(i *attestation.SecretInfo) { i.SignerName = "x.example/y" }}, false, reasons(ReasonQuoteMAC)},
		{"challenge: for other PCRs", bend{secret: func(i *attestation.SecretInfo) { i.PCRs.Indexes = []int{0} }}, false, reasons(ReasonQuoteMAC)},
		{"challenge: of another version", bend{secret: func(i *attestation.SecretInfo) { i.Version = "tpm/v2" }}, false, reasons(ReasonQuoteMAC)},

		// The quote.
		{"quote: no magic", bend{attest: func(a *attest) { a.magic = 0 }}, false, reasons(reasonQuoteMagic)},
		{"quote: magic in the other order", bend{attest: func(a *attest) { a.magic = 0x474354ff }}, false, reasons(reasonQuoteMagic)},
		{"quote: one byte", bend{quote: func([]byte) []byte { return []byte{0xff} }}, false, reasons(reasonQuoteMagic)},
		{"quote: magic alone", bend{quote: func(b []byte) []byte { return b[:4] }}, false, reasons(reasonQuoteType)},
		{"quote: unknown type", bend{attest: func(a *attest) { a.kind = 0x8019 }}, false, reasons(reasonQuoteType)},
		{"quote: bytes after", bend{quote: appended(0)}, false, reasons(reasonQuoteMalformed)},
		{"quote: cut short", bend{quote: func(b []byte) []byte { return b[:len(b)-1] }}, false, reasons(reasonQuoteMalformed)},
		{"quote: cut within the clock", bend{quote: func(b []byte) []byte { return b[:80] }}, false, reasons(reasonQuoteMalformed)},
		{"quote: safe is 2", bend{attest: func(a *attest) { a.safe = 2 }}, false, reasons(reasonQuoteMalformed)},
		{"quote: a signer too long", bend{attest: func(a *attest) { a.signer = make([]byte, 67) }}, false, reasons(reasonQuoteMalformed)},
		{"quote: a million banks", bend{attest: func(a *attest) { a.body = []byte{0, 0x0f, 0x42, 0x40} }}, false, reasons(reasonQuoteMalformed)},
		{"quote: of a foreign AK", bend{sign: func(q []byte) []byte { return sign(otherKey, q) }, name: func([]byte) []byte { return nameOf(akPublic(&otherKey.PublicKey)) }}, false, reasons(reasonQuoteSigner, reasonQuoteSignature)},
		{"quote: in the name of a foreign AK", bend{name: func([]byte) []byte { return nameOf(akPublic(&otherKey.PublicKey)) }}, false, reasons(reasonQuoteSigner)},
		{"quote: no signer", bend{attest: func(a *attest) { a.signer = nil }}, false, reasons(reasonQuoteSigner)},
		{"quote: the Name as its signer", bend{attest: func(a *attest) { a.signer = nameOf(akPublic(&k.ak.PublicKey)) }}, false, reasons(reasonQuoteSigner)},
		{"quote: signer of another hash", bend{attest: func(a *attest) { a.signer[1] = 0x0c }}, false, reasons(reasonQuoteSigner)},
		{"quote: MAC cut short", bend{attest: func(a *attest) { a.extra = a.extra[:31] }}, false, reasons(ReasonQuoteMAC)},
		{"quote: MAC too long", bend{attest: func(a *attest) { a.extra = append(a.extra, 0) }}, false, reasons(ReasonQuoteMAC)},
		{"quote: MAC of zeros", bend{attest: func(a *attest) { a.extra = make([]byte, 32) }}, false, reasons(ReasonQuoteMAC)},
		{"quote: no MAC", bend{attest: func(a *attest) { a.extra = nil }}, false, reasons(ReasonQuoteMAC)},
		{"quote: MAC one bit off", bend{attest: func(a *attest) { a.extra[31] ^= 1 }}, false, reasons(ReasonQuoteMAC)},
		{"quote: altered after it was signed", bend{proof: func(p *attestation.Proof) { p.Quote[len(p.Quote)-60] ^= 1 }}, false, nil},

		// The signature.
		{"signature: by another key", bend{sign: func(q []byte) []byte { return sign(otherKey, q) }}, false, reasons(reasonQuoteSignature)},
		{"signature: over something else", bend{sign: func(q []byte) []byte { return sign(k.ak, append(q, 0)) }}, false, reasons(reasonQuoteSignature)},
		{"signature: r zero", bend{sign: func(q []byte) []byte { return put(6, make([]byte, 32)...)(sign(k.ak, q)) }}, false, reasons(reasonQuoteSignature)},
		{"signature: s zero", bend{sign: func(q []byte) []byte { return put(40, make([]byte, 32)...)(sign(k.ak, q)) }}, false, reasons(reasonQuoteSignature)},
		{"signature: r and s empty", bend{sign: func([]byte) []byte { return signatureOf(0x18, 0x0b, nil, nil) }}, false, reasons(reasonQuoteSignature)},
		{"signature: r and s the order", bend{sign: func([]byte) []byte {
			n := elliptic.P256().Params().N.Bytes()
			return signatureOf(0x18, 0x0b, n, n)
		}}, false, reasons(reasonQuoteSignature)},
		{"signature: r of 33 bytes", bend{sign: func(q []byte) []byte { return insert(6, 0)(put(4, 0, 33)(sign(k.ak, q))) }}, false, reasons(reasonQuoteMalformed)},
		{"signature: bytes after", bend{sign: func(q []byte) []byte { return append(sign(k.ak, q), 0) }}, false, reasons(reasonQuoteMalformed)},
		{"signature: cut short", bend{sign: func(q []byte) []byte { return sign(k.ak, q)[:71] }}, false, reasons(reasonQuoteMalformed)},
		{"signature: one byte", bend{sign: func([]byte) []byte { return []byte{0} }}, false, reasons(reasonQuoteMalformed)},
		{"signature: ASN.1", bend{sign: func(q []byte) []byte {
			digest := sha256.Sum256(q)
			return must(ecdsa.SignASN1(rand.Reader, k.ak, digest[:]))
		}}, false, reasons(reasonQuoteScheme)},
		{"signature: RSASSA", bend{sign: func([]byte) []byte { return append([]byte{0, 0x14, 0, 0x0b}, sized(make([]byte, 256))...) }}, false, reasons(reasonQuoteScheme)},
		{"signature: ECSchnorr", bend{sign: func(q []byte) []byte { return put(0, 0, 0x1c)(sign(k.ak, q)) }}, false, reasons(reasonQuoteScheme)},
		{"signature: ECDSA with SHA-1", bend{sign: func(q []byte) []byte { return put(2, 0, 4)(sign(k.ak, q)) }}, false, reasons(reasonQuoteScheme)},
		{"signature: ECDSA with SHA-384", bend{sign: func(q []byte) []byte { return put(2, 0, 0x0c)(sign(k.ak, q)) }}, false, reasons(reasonQuoteScheme)},
		{"signature: HMAC", bend{sign: func(q []byte) []byte { return append([]byte{0, 5, 0, 0x0b}, make([]byte, 32)...) }}, false, reasons(reasonQuoteScheme)},
		{"signature: null", bend{sign: func([]byte) []byte { return []byte{0, 0x10} }}, false, reasons(reasonQuoteMalformed)},
		{"signature: null, padded", bend{sign: func([]byte) []byte { return []byte{0, 0x10, 0, 0x0b, 0, 0} }}, false, reasons(reasonQuoteScheme)},

		// The PCRs.
		{"PCRs: quote over another bank", bend{attest: func(a *attest) { a.selections[0].bank = 0x000c }}, false, reasons(reasonPCRSelection)},
		{"PCRs: quote over a bank of SHA-1", bend{attest: func(a *attest) { a.selections[0].bank = 0x0004 }}, false, reasons(reasonPCRSelection)},
		{"PCRs: quote over an unknown bank", bend{attest: func(a *attest) { a.selections[0].bank = 0xffff }}, false, reasons(reasonPCRSelection)},
		{"PCRs: quote over no bank", bend{attest: func(a *attest) { a.selections = nil }}, false, reasons(reasonPCRSelection)},
		{"PCRs: quote over no PCR", bend{attest: func(a *attest) { a.selections[0].bits = []byte{0, 0, 0} }}, false, reasons(reasonPCRSelection)},
		{"PCRs: quote over two banks", bend{attest: func(a *attest) { a.selections = append(a.selections, selectionOf(0x000c, 0)) }}, false, reasons(reasonPCRSelection)},
		{"PCRs: quote over one bank twice", bend{attest: func(a *attest) { a.selections = append(a.selections, a.selections[0]) }}, false, reasons(reasonPCRSelection)},
		{"PCRs: quote over fewer", bend{attest: func(a *attest) { a.selections = []selection{selectionOf(0x0b, 0, 4)} }}, false, reasons(reasonPCRSelection)},
		{"PCRs: quote over more", bend{attest: func(a *attest) { a.selections = []selection{selectionOf(0x0b, 0, 4, 7, 23)} }}, false, reasons(reasonPCRSelection)},
		{"PCRs: quote over others", bend{attest: func(a *attest) { a.selections = []selection{selectionOf(0x0b, 16, 17, 23)} }}, false, reasons(reasonPCRSelection)},
		{"PCRs: a bitmap of four bytes", bend{attest: func(a *attest) { a.selections[0].bits = append(a.selections[0].bits, 0) }}, false, reasons(reasonPCRSelection)},
		{"PCRs: a bitmap of one byte", bend{attest: func(a *attest) { a.selections[0].bits = a.selections[0].bits[:1] }}, false, reasons(reasonPCRSelection)},
		{"PCRs: other than wanted", bend{pcrs: []attestation.PCR{{Index: 23, Value: make([]byte, 32)}}}, false, reasons(reasonPCRSelection)},
		{"PCRs: fewer than wanted", bend{pcrs: testPCRs()[:2]}, false, reasons(reasonPCRSelection)},
		{"PCRs: more than wanted", bend{pcrs: append(testPCRs(), attestation.PCR{Index: 8, Value: make([]byte, 32)})}, false, reasons(reasonPCRSelection)},
		{"PCRs: another bank than wanted", bend{
			policy:     func(c *Config) { c.PCRs.Bank = "sha384" },
			secret:     func(i *attestation.SecretInfo) { i.PCRs.Bank = "sha256" },
			pcrs:       []attestation.PCR{{Index: 0, Value: make([]byte, 48)}, {Index: 4, Value: make([]byte, 48)}, {Index: 7, Value: make([]byte, 48)}},
			transcript: func(tr *attestation.Transcript) { tr.PCRs.Bank = "sha256" },
			proof: func(p *attestation.Proof) {
				p.PCRBank = "sha256"
				for i := range p.PCRs {
					p.PCRs[i].Value = make([]byte, 32)
				}
			},
		}, false, reasons(reasonPCRSelection)},
		{"PCRs: a value altered", bend{proof: flip}, false, reasons(reasonPCRDigest)},
		{"PCRs: two values swapped", bend{proof: func(p *attestation.Proof) {
			p.PCRs[0].Value, p.PCRs[1].Value = p.PCRs[1].Value, p.PCRs[0].Value
		}}, false, reasons(reasonPCRDigest)},
		{"PCRs: digest empty", bend{attest: func(a *attest) { a.digest = nil }}, false, reasons(reasonPCRDigest)},
		{"PCRs: digest with another hash", bend{attest: func(a *attest) { a.digest = make([]byte, 48) }}, false, reasons(reasonPCRDigest)},
		{"PCRs: a value altered to one allowed", bend{
			policy: func(c *Config) { c.PCRValues = map[int][][]byte{4: {make([]byte, 32)}} },
			proof:  func(p *attestation.Proof) { p.PCRs[1].Value = make([]byte, 32) },
		}, false, reasons(reasonPCRDigest)},
		{"PCRs: a value not allowed", bend{policy: func(c *Config) {
			c.PCRValues = map[int][][]byte{0: {testPCRs()[0].Value}, 4: {make([]byte, 32), testPCRs()[0].Value}}
		}}, false, reasons(ReasonPCRPolicy)},

		// The firmware.
		{"firmware: too old", bend{policy: func(c *Config) { c.MinimumFirmware = map[string]uint64{"IFX": 0x0007003d_00000002} }}, false, reasons(reasonFirmwareTooOld)},
		{"firmware: maker unknown, EK allowed", bend{
			policy: func(c *Config) {
				c.MinimumFirmware = map[string]uint64{"IFX": 1}
				c.AllowedEKs = []Fingerprint{FingerprintOf(spkiOf(k.ekKeys["ecc-p256"]))}
			},
			hello: certificates(),
		}, false, reasons(reasonFirmwareUnknown)},
		{"firmware: maker unknown, certificate without it", bend{
			policy: func(c *Config) { c.MinimumFirmware = map[string]uint64{"IFX": 1} },
			hello:  extensions(),
		}, false, reasons(reasonFirmwareUnknown)},
		{"firmware: maker in a certificate nobody vouches for", bend{
			policy: func(c *Config) {
				c.MinimumFirmware = map[string]uint64{"IFX": 1}
				c.AllowedEKs = []Fingerprint{FingerprintOf(spkiOf(k.ekKeys["ecc-p256"]))}
			},
			hello: certificates(selfSigned(k.ecEKs["ecc-p256"])),
		}, false, reasons(reasonFirmwareUnknown)},

		// Several rules at once are all told; what hangs on a signature is not judged without it.
		{"PCRs not allowed and firmware too old", bend{policy: func(c *Config) {
			c.MinimumFirmware = map[string]uint64{"IFX": 1 << 63}
			c.PCRValues = map[int][][]byte{7: {make([]byte, 32)}}
		}}, false, reasons(ReasonPCRPolicy, reasonFirmwareTooOld)},
		{"the same, unsigned", bend{policy: func(c *Config) {
			c.MinimumFirmware = map[string]uint64{"IFX": 1 << 63}
			c.PCRValues = map[int][][]byte{7: {make([]byte, 32)}}
		}, sign: func(q []byte) []byte { return sign(otherKey, q) }}, false, reasons(reasonQuoteSignature)},
		{"expired and another MAC", bend{now: testNow.AddDate(0, 1, 0), attest: func(a *attest) { a.extra[0] ^= 1 }}, false, reasons(reasonChallengeExpired, ReasonQuoteMAC)},
	}
	for i := range rows {
		// the firmware version, which no other rule looks at
		if rows[i].name == "quote: altered after it was signed" {
			rows[i].bend.proof = func(p *attestation.Proof) {
				at := 4 + 2 + 2 + 34 + 2 + 32 + 17
				p.Quote[at] ^= 1
			}
			rows[i].want = reasons(reasonQuoteSignature)
		}
	}
	for _, hierarchy := range []struct {
		name   string
		handle uint32
	}{{"owner", 0x40000001}, {"null", 0x40000007}, {"platform", 0x4000000c}, {"lockout", 0x4000000a}} {
		rows = append(rows, row{"quote: by the AK in the " + hierarchy.name + " hierarchy", bend{attest: func(a *attest) {
			a.signer = qualified(hierarchy.handle, nameOf(akPublic(&k.ak.PublicKey)))
		}}, false, reasons(reasonQuoteSigner)})
	}
	for name, body := range otherAttests() {
		rows = append(rows, row{"quote: it is " + name, bend{attest: func(a *attest) { a.kind, a.body = body.kind, body.bytes }}, false, reasons(reasonQuoteType)})
	}
	return rows
}

type attestBody struct {
	kind  uint16
	bytes []byte
}

// otherAttests are what else an AK signs, by its type (TPM 2.0 Part 2, 6.9): the body is a good one
// of its kind.
func otherAttests() map[string]attestBody {
	name := tpm2.TPM2BName{Buffer: make([]byte, 34)}
	digest := tpm2.TPM2BDigest{Buffer: make([]byte, 32)}
	return map[string]attestBody{
		"TPM_ST_ATTEST_CERTIFY":        {0x8017, tpm2.Marshal(tpm2.TPMSCertifyInfo{Name: name, QualifiedName: name})},
		"TPM_ST_ATTEST_CREATION":       {0x801a, tpm2.Marshal(tpm2.TPMSCreationInfo{ObjectName: name, CreationHash: digest})},
		"TPM_ST_ATTEST_NV":             {0x8014, tpm2.Marshal(tpm2.TPMSNVCertifyInfo{IndexName: name})},
		"TPM_ST_ATTEST_COMMAND_AUDIT":  {0x8015, tpm2.Marshal(tpm2.TPMSCommandAuditInfo{AuditDigest: digest, CommandDigest: digest})},
		"TPM_ST_ATTEST_SESSION_AUDIT":  {0x8016, tpm2.Marshal(tpm2.TPMSSessionAuditInfo{SessionDigest: digest})},
		"TPM_ST_ATTEST_TIME":           {0x8019, tpm2.Marshal(tpm2.TPMSTimeAttestInfo{})},
		"TPM_ST_ATTEST_NV_DIGEST":      {0x801c, tpm2.Marshal(tpm2.TPMSNVDigestCertifyInfo{IndexName: name, NVDigest: digest})},
		"a certify with a quote's end": {0x8017, nil},
	}
}

// TestGoodCasesAreAccepted is what makes the rows of TestHostile mean something.
func TestGoodCasesAreAccepted(t *testing.T) {
	k := theKit()
	p256 := FingerprintOf(spkiOf(k.ekKeys["ecc-p256"]))
	shown := newCA("Shown", k.root, nil)
	for name, b := range map[string]bend{
		"untouched":        {},
		"judged late":      {now: testNow.Add(time.Hour), proofRequest: func(r *Request) { r.Created = testNow.Add(defaultChallengeLifetime - time.Second) }},
		"EK ecc-p256-high": {ek: "ecc-p256-high"}, "EK ecc-p384-high": {ek: "ecc-p384-high"},
		"EK rsa-2048": {ek: "rsa-2048"}, "EK rsa-2048-high": {ek: "rsa-2048-high"},
		"intermediate shown":   {hello: certificates(shown.issue(k.ekKeys["ecc-p256"], nil), shown.certificate.Raw)},
		"issued by the root":   {hello: certificates(k.root.issue(k.ekKeys["ecc-p256"], nil))},
		"too many issuers":     {hello: certificates(k.intermediate.issue(k.ekKeys["ecc-p256"], nil), shown.certificate.Raw, k.root.certificate.Raw)},
		"name not critical":    {hello: extensions(san(false, attribute(1, "id:49465800"), attribute(2, "SLB9670"), attribute(3, "id:0D0B")))},
		"odd things beside it": {hello: certificates(k.intermediate.issue(k.ekKeys["ecc-p256"], nil), []byte("odd"), hugeCA())},
		"no alternative name":  {hello: extensions()},
		"no key usage":         {hello: issued(func(c *x509.Certificate) { c.KeyUsage = 0 })},
		"expired, policy's time": {
			hello:  issued(func(c *x509.Certificate) { c.NotAfter = testNow.Add(-time.Minute) }),
			policy: func(c *Config) { c.ChainTime = testNow.Add(-time.Hour) },
		},
		"bare, allowed": {hello: certificates(), policy: func(c *Config) { c.AllowedEKs = []Fingerprint{p256} }},
		"bare, named":   {hello: certificates(), policy: func(c *Config) { c.NamedEKs = true }, named: []Fingerprint{{1}, p256}},
		"no roots, named": {
			policy: func(c *Config) { c.Roots, c.Intermediates, c.NamedEKs = nil, nil, true }, named: []Fingerprint{p256},
		},
		"older key":                         {keyID: func(id *string, key *[]byte) { *id, *key = "k0", bytes.Repeat([]byte("old key."), 4) }},
		"last second":                       {now: testNow.Add(defaultChallengeLifetime - time.Nanosecond)},
		"another replica's clock is behind": {now: testNow.Add(-maxSkew)},
		"expirationSeconds unset":           {helloRequest: func(r *Request) { r.ExpirationSeconds = nil }},
		"PCR values allowed":                {policy: func(c *Config) { c.PCRValues = map[int][][]byte{4: {make([]byte, 32), testPCRs()[1].Value}} }},
		"firmware new enough":               {policy: func(c *Config) { c.MinimumFirmware = map[string]uint64{"IFX": 0x0007003d_00000001, "STM": 1 << 63} }},
		"node knows newer versions":         {hello: func(h *attestation.Hello) { h.Versions = attestation.Versions{"tpm/v3", "tpm/v1"} }},
		"signature without leading zeros": {sign: func(q []byte) []byte {
			for {
				s := sign(k.ak, q)
				if s[6] == 0 {
					return signatureOf(0x18, 0x0b, s[7:38], s[40:])
				}
			}
		}},
		"event log that nobody asked for": {eventLog: []byte("anything")},
	} {
		t.Run(name, func(t *testing.T) {
			p := k.play(t, b)
			if _, err := p.verifier.VerifyHello(p.hello, p.named, p.now); err != nil {
				t.Errorf("hello: %v", err)
			}
			if _, err := p.verifier.VerifyProof(p.proof, p.hello, p.named, p.now); err != nil {
				t.Errorf("proof: %v", err)
			}
		})
	}
}

func TestHostile(t *testing.T) {
	k := theKit()
	names := map[string]bool{}
	reported := map[verifier.Reason]bool{}
	for _, r := range slices.Concat(helloRows(), proofRows(), eventLogRows()) {
		if names[r.name] {
			t.Errorf("two rows are called %q", r.name)
		}
		names[r.name] = true
		t.Run(r.name, func(t *testing.T) {
			p := k.play(t, r.bend)
			want := slices.Clone(r.want)
			slices.Sort(want)
			evidence, err := p.verifier.VerifyProof(p.proof, p.hello, p.named, p.now)
			if err == nil || evidence != nil {
				t.Fatal("accepted")
			}
			if got := reasonsOf(err); !slices.Equal(got, want) {
				t.Errorf("proof: refused for %v, want %v: %v", got, want, err)
			}
			for _, reason := range want {
				reported[reason] = true
			}
			var refusals verifier.Refusals
			if errors.As(err, &refusals) && len(want) > 1 && refusals.Reason() == reasonChallengeExpired {
				t.Error("the node would believe that a new hello helps")
			}
			if strings.Contains(err.Error(), string(k.key)) || len(err.Error()) > 1000 {
				t.Errorf("the message is too long: %v", err)
			}
			claim, err := p.verifier.VerifyHello(p.hello, p.named, p.now)
			if r.hello {
				want = slices.DeleteFunc(want, func(reason verifier.Reason) bool { return reason == ReasonHelloMismatch })
				if got := reasonsOf(err); claim != nil || !slices.Equal(got, want) {
					t.Errorf("hello: refused for %v, want %v: %v", got, want, err)
				}
			} else if err != nil {
				t.Errorf("hello: %v", err)
			}
		})
	}
	for reason := range reasonMeanings() {
		if !reported[reason] {
			t.Errorf("no row is refused for %s", reason)
		}
	}
	t.Logf("%d rows", len(names))
}

// TestPlayedBackwards shows each document where the other belongs.
func TestPlayedBackwards(t *testing.T) {
	p := theKit().play(t, bend{})
	_, err := p.verifier.VerifyProof(p.hello, p.hello, nil, p.now)
	if got := reasonsOf(err); !slices.Equal(got, reasons(ReasonKind, reasonSigner)) {
		t.Errorf("the hello as a proof: %v", err)
	}
	_, err = p.verifier.VerifyHello(p.proof, nil, p.now)
	if got := reasonsOf(err); !slices.Equal(got, reasons(ReasonKind, reasonSigner)) {
		t.Errorf("the proof as a hello: %v", err)
	}
	_, err = p.verifier.VerifyProof(p.proof, p.proof, nil, p.now)
	if got := reasonsOf(err); !slices.Equal(got, reasons(ReasonHelloMismatch, ReasonKind, reasonSigner)) {
		t.Errorf("the proof as its own hello: %v", err)
	}
	_, err = p.verifier.VerifyProof(p.hello, p.proof, nil, p.now)
	if got := reasonsOf(err); !slices.Equal(got, reasons(ReasonKind, reasonSigner)) {
		t.Errorf("swapped: %v", err)
	}
}

// TestEveryOtherByte: no change of one bit of either request is accepted.
func TestEveryOtherByte(t *testing.T) {
	p := theKit().play(t, bend{})
	for i := range p.proof.Request {
		changed := p.proof
		changed.Request = bytes.Clone(p.proof.Request)
		changed.Request[i] ^= 1
		if _, err := p.verifier.VerifyProof(changed, p.hello, nil, p.now); err == nil {
			t.Errorf("proof: byte %d does not matter", i)
		}
	}
	for i := range p.hello.Request {
		changed := p.hello
		changed.Request = bytes.Clone(p.hello.Request)
		changed.Request[i] ^= 1
		if _, err := p.verifier.VerifyProof(p.proof, changed, nil, p.now); err == nil {
			t.Errorf("hello: byte %d does not matter", i)
		}
	}
}
