// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"crypto/x509"
	"encoding/binary"
	"strings"
	"unicode/utf16"
	"unicode/utf8"

	"golang.org/x/crypto/cryptobyte"
	"golang.org/x/crypto/cryptobyte/asn1"
)

// tagBMPString is a string type (X.680, 8.4) that package asn1 has no constant for.
const tagBMPString = asn1.Tag(30)

// withFoldedNames returns a copy of a certificate with a folded subject and issuer: if two names
// are equal by RFC 5280, section 7.1, their folded bytes are equal. Manufacturers write one name
// with different string types, cases or blanks, but crypto/x509 compares names byte for byte. The
// copy adds no trust: a chain still needs the signature of each CA, and signatures cover the
// original bytes.
func withFoldedNames(c *x509.Certificate) *x509.Certificate {
	folded := *c
	folded.RawSubject, folded.RawIssuer = foldName(c.RawSubject), foldName(c.RawIssuer)
	return &folded
}

// foldName returns a distinguished name with each text as a folded UTF8String. It changes neither
// the order of the attributes nor values of other types. A name that does not parse is returned
// unchanged.
func foldName(der []byte) []byte {
	name, names := cryptobyte.String(der), cryptobyte.String(nil)
	if !name.ReadASN1(&names, asn1.SEQUENCE) || !name.Empty() {
		return der
	}
	parses := true
	var out cryptobyte.Builder
	out.AddASN1(asn1.SEQUENCE, func(out *cryptobyte.Builder) {
		for set := cryptobyte.String(nil); parses && !names.Empty(); {
			parses = names.ReadASN1(&set, asn1.SET)
			out.AddASN1(asn1.SET, func(out *cryptobyte.Builder) {
				for attribute := cryptobyte.String(nil); parses && !set.Empty(); {
					parses = set.ReadASN1(&attribute, asn1.SEQUENCE)
					out.AddASN1(asn1.SEQUENCE, func(out *cryptobyte.Builder) { parses = parses && foldAttribute(out, attribute) })
				}
			})
		}
	})
	folded, err := out.Bytes()
	if !parses || err != nil {
		return der
	}
	return folded
}

// foldAttribute adds the content of an AttributeTypeAndValue (RFC 5280, section 4.1.2.4). It
// reports whether the attribute parses.
func foldAttribute(out *cryptobyte.Builder, attribute cryptobyte.String) bool {
	var kind, value cryptobyte.String
	var tag asn1.Tag
	if !attribute.ReadASN1Element(&kind, asn1.OBJECT_IDENTIFIER) || !attribute.ReadAnyASN1(&value, &tag) || !attribute.Empty() {
		return false
	}
	out.AddBytes(kind)
	if text, ok := decodeText(tag, value); ok {
		tag, value = asn1.UTF8String, []byte(foldText(text))
	}
	out.AddASN1(tag, func(out *cryptobyte.Builder) { out.AddBytes(value) })
	return true
}

// decodeText returns the text of a DirectoryString or an IA5String (RFC 5280, section 4.1.2.4). It
// returns false for other types, and for wrong encodings. It returns false for a TeletexString with
// more than ASCII, too, because its meaning depends on the issuer.
func decodeText(tag asn1.Tag, value []byte) (string, bool) {
	switch tag {
	case asn1.UTF8String:
		return string(value), utf8.Valid(value)
	case asn1.PrintableString, asn1.IA5String, asn1.T61String: // T61String is TeletexString
		return string(value), !strings.ContainsFunc(string(value), func(r rune) bool { return r >= utf8.RuneSelf })
	case tagBMPString:
		var units []uint16
		for ; len(value) >= 2; value = value[2:] {
			units = append(units, binary.BigEndian.Uint16(value))
		}
		return string(utf16.Decode(units)), len(value) == 0
	}
	return "", false
}

// foldText prepares a text for the comparison by RFC 4518, for ASCII only, as OpenSSL does. Letters
// become lower case (section 2.2). Each run of white space becomes one blank, and none is left at
// the ends (section 2.6.1). Other characters do not change.
func foldText(text string) string {
	words := strings.FieldsFunc(text, func(r rune) bool { return strings.ContainsRune(" \t\n\v\f\r", r) })
	return strings.Map(func(r rune) rune {
		if 'A' <= r && r <= 'Z' {
			return r + ('a' - 'A')
		}
		return r
	}, strings.Join(words, " "))
}
