// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"bytes"
	"crypto/x509"
	"encoding/asn1"
	"encoding/pem"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

func certificatesIn(t *testing.T, path string) (list []*x509.Certificate) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for block, rest := pem.Decode(data); block != nil; block, rest = pem.Decode(rest) {
		certificate, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, certificate)
	}
	return list
}

// CAs of STMicroelectronics and AMD, and their three roots, as the manufacturers publish them. 16
// of 31 CAs write their issuer's name with other string types than the issuer does. Each CA leads
// to its root, whether the operator configured the CAs or the node sends them.
func TestRealCAsLeadToTheirRoots(t *testing.T) {
	roots, cas := certificatesIn(t, "testdata/ek-roots.pem"), certificatesIn(t, "testdata/ek-cas.pem")
	if len(roots) != 3 || len(cas) != 31 {
		t.Fatalf("%d roots and %d CAs", len(roots), len(cas))
	}
	at := time.Date(2026, 11, 26, 0, 0, 0, 0, time.UTC)
	verify := func(configured []*x509.Certificate) (unknown int) {
		config := theKit().config()
		config.Roots, config.Intermediates = roots, configured
		v := must(New(config))
		var sent [][]byte
		for _, ca := range cas {
			sent = append(sent, ca.Raw)
		}
		for _, ca := range cas {
			if problem := v.verifyChain(withFoldedNames(ca), usableIssuers(sent), at); problem != nil {
				t.Errorf("%s: %s", ca.Subject, problem.Message)
				unknown++
			}
		}
		return unknown
	}
	if unknown := verify(cas) + verify(nil); unknown != 0 {
		t.Errorf("%d of 62 lead to no root", unknown)
	}
	odd := slices.DeleteFunc(slices.Clone(cas), func(ca *x509.Certificate) bool {
		return slices.ContainsFunc(slices.Concat(roots, cas), func(issuer *x509.Certificate) bool {
			return bytes.Equal(ca.RawIssuer, issuer.RawSubject) && ca.CheckSignatureFrom(issuer) == nil
		})
	})
	if len(odd) != 16 {
		t.Errorf("%d CAs have their issuer's name in another form", len(odd))
	}
}

// textAttribute makes an attribute of a name: CN with a value of a string type.
func textAttribute(tag int, value string) []byte {
	return must(asn1.Marshal(struct {
		Type  asn1.ObjectIdentifier
		Value asn1.RawValue
	}{asn1.ObjectIdentifier{2, 5, 4, 3}, asn1.RawValue{Tag: tag, Bytes: []byte(value)}}))
}

// nameWith makes a name with one attribute in each set.
func nameWith(attributes ...[]byte) []byte {
	var sets []byte
	for _, a := range attributes {
		sets = append(sets, must(asn1.Marshal(asn1.RawValue{Tag: asn1.TagSet, IsCompound: true, Bytes: a}))...)
	}
	return must(asn1.Marshal(asn1.RawValue{Tag: asn1.TagSequence, IsCompound: true, Bytes: sets}))
}

func TestFoldName(t *testing.T) {
	const printable, utf8String, teletex, ia5, bmp, octets = asn1.TagPrintableString, asn1.TagUTF8String, asn1.TagT61String, asn1.TagIA5String, asn1.TagBMPString, asn1.TagOctetString
	base := nameWith(textAttribute(printable, "Maker CA 1"))
	for name, other := range map[string][]byte{
		"UTF8String":    nameWith(textAttribute(utf8String, "Maker CA 1")),
		"TeletexString": nameWith(textAttribute(teletex, "Maker CA 1")),
		"IA5String":     nameWith(textAttribute(ia5, "Maker CA 1")),
		"BMPString":     nameWith(textAttribute(bmp, "\x00M\x00a\x00k\x00e\x00r\x00 \x00C\x00A\x00 \x001")),
		"case":          nameWith(textAttribute(printable, "MAKER ca 1")),
		"blanks":        nameWith(textAttribute(printable, "  Maker   CA 1 ")),
	} {
		if !bytes.Equal(foldName(base), foldName(other)) {
			t.Errorf("%s: another name", name)
		}
	}
	for name, other := range map[string][]byte{
		"another text":        nameWith(textAttribute(printable, "Maker CA 2")),
		"without a blank":     nameWith(textAttribute(printable, "MakerCA 1")),
		"a similar letter":    nameWith(textAttribute(utf8String, "Mаker CA 1")), // Cyrillic
		"a wide letter":       nameWith(textAttribute(utf8String, "Ｍaker CA 1")),
		"a zero-width letter": nameWith(textAttribute(utf8String, "Maker CA 1\u200b")),
		"a NUL":               nameWith(textAttribute(utf8String, "Maker CA 1\x00")),
		"not UTF-8":           nameWith(textAttribute(utf8String, "Maker CA 1\xff")),
		"no string":           nameWith(textAttribute(octets, "maker ca 1")),
		"twice":               nameWith(textAttribute(printable, "Maker CA 1"), textAttribute(printable, "Maker CA 1")),
		"in one set":          nameWith(slices.Concat(textAttribute(printable, "Maker CA 1"), textAttribute(printable, "Maker CA 1"))),
		"empty":               nameWith(),
		"odd BMPString":       nameWith(textAttribute(bmp, "\x00M\x00a\x00k\x00e\x00r\x00 \x00C\x00A\x00 \x001\x00")),
	} {
		if bytes.Equal(foldName(base), foldName(other)) {
			t.Errorf("%s: the same name", name)
		}
	}
	first, second := textAttribute(printable, "a"), textAttribute(printable, "b")
	if bytes.Equal(foldName(nameWith(first, second)), foldName(nameWith(second, first))) {
		t.Error("the order does not matter")
	}
	for name, odd := range map[string][]byte{
		"nothing": nil, "bytes behind": append(bytes.Clone(base), 0), "cut": base[:len(base)-1], "no sequence": {4, 1, 0}, "a set without attributes": nameWith(nil),
		"an attribute without a value": nameWith([]byte{0x30, 5, 6, 3, 0x55, 4, 3}), "a long length": {0x30, 0x81, 2, 0x31, 0},
	} {
		if got := foldName(odd); !bytes.Equal(got, odd) {
			t.Errorf("%s: %x became %x", name, odd, got)
		}
	}
}

// A certificate that names its issuer in another form leads to its root. The form helps no other
// key, and no name that differs in more than the form.
func TestIssuerIsNamedInAnotherForm(t *testing.T) {
	k := theKit()
	inForm := func(ca *testCA, change func(string) string) *testCA {
		var attributes [][]byte
		for _, part := range []struct {
			last  int
			value string
		}{{10, ca.certificate.Subject.Organization[0]}, {3, ca.certificate.Subject.CommonName}} {
			attributes = append(attributes, must(asn1.Marshal(struct {
				Type  asn1.ObjectIdentifier
				Value asn1.RawValue
			}{asn1.ObjectIdentifier{2, 5, 4, part.last}, asn1.RawValue{Tag: asn1.TagUTF8String, Bytes: []byte(change(part.value))}})))
		}
		signer := *ca.certificate
		signer.RawSubject = nameWith(attributes...)
		return &testCA{&signer, ca.key}
	}
	same := func(s string) string { return s }
	ek := k.ekKeys["ecc-p256"]
	impostor := newCA(strings.ToUpper(k.intermediate.certificate.Subject.CommonName)+" ", nil, nil)
	shown := newCA("Shown", k.root, nil)
	for name, c := range map[string]struct {
		hello [][]byte
		want  verifier.Reason
	}{
		"another string type":                  {[][]byte{inForm(k.intermediate, same).issue(ek, nil)}, ""},
		"blanks":                               {[][]byte{inForm(k.intermediate, func(s string) string { return " " + s + "  " }).issue(ek, nil)}, ""},
		"another case":                         {[][]byte{inForm(k.intermediate, strings.ToUpper).issue(ek, nil)}, ""},
		"a CA that the node sends":             {[][]byte{inForm(shown, strings.ToUpper).issue(ek, nil), shown.certificate.Raw}, ""},
		"another name":                         {[][]byte{inForm(k.intermediate, func(s string) string { return s + "x" }).issue(ek, nil)}, reasonEKChainUnknown},
		"another key under that name":          {[][]byte{impostor.issue(ek, nil), impostor.certificate.Raw}, reasonEKChainUnknown},
		"SHA-1, so that it counts for nothing": {[][]byte{inForm(k.intermediate, strings.ToUpper).issue(ek, withSHA1)}, reasonEKChainSHA1},
	} {
		hello, proof := judged(t, bend{hello: certificates(c.hello...)})
		var want []verifier.Reason
		if c.want != "" {
			want = []verifier.Reason{c.want}
		}
		if !slices.Equal(hello, want) || !slices.Equal(proof, want) {
			t.Errorf("%s: %v, %v; want %v", name, hello, proof, want)
		}
	}
	denied := func(c *Config) {
		c.DeniedEKs = []Fingerprint{FingerprintOf(k.intermediate.certificate.RawSubjectPublicKeyInfo)}
	}
	hello, _ := judged(t, bend{policy: denied, hello: certificates(inForm(k.intermediate, strings.ToUpper).issue(ek, nil))})
	if !slices.Equal(hello, []verifier.Reason{reasonEKChainDenied}) {
		t.Errorf("a denied CA in another form: %v", hello)
	}
	// One CA for each folded name: see TestAnIssuerIsTakenOnce.
	if got := usableIssuers([][]byte{newCA("Made up", nil, nil).certificate.Raw, newCA("MADE  up", nil, nil).certificate.Raw}); len(got) != 1 {
		t.Errorf("%d CAs of one folded name", len(got))
	}
}
