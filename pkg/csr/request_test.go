// SPDX-License-Identifier: Apache-2.0

package csr

import (
	"bytes"
	"crypto"
	"crypto/ecdh"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"regexp"
	"slices"
	"strings"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
)

// certificationRequest is RFC 2986 without interpretation: crypto/x509 shows a projection of it.
type certificationRequest struct {
	Info struct {
		Version    int
		Subject    asn1.RawValue
		PublicKey  asn1.RawValue
		Attributes []asn1.RawValue `asn1:"tag:0"`
	}
	Algorithm asn1.RawValue
	Signature asn1.BitString
}

// buildRequest returns a request in both forms. It has been checked that its signature verifies and
// that nothing follows it.
func buildRequest(t *testing.T, id Identity) (*x509.CertificateRequest, certificationRequest) {
	t.Helper()
	key, _, err := NewKey()
	if err != nil {
		t.Fatal(err)
	}
	der, err := PKCS10(id, key)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := x509.ParseCertificateRequest(der)
	if err != nil {
		t.Fatal(err)
	}
	if err := parsed.CheckSignature(); err != nil {
		t.Fatalf("signature: %v", err)
	}
	if public, ok := parsed.PublicKey.(*ecdsa.PublicKey); !ok || public.Curve != elliptic.P256() || !public.Equal(key.Public()) {
		t.Fatalf("its key is %T, not the P-256 key that signs it", parsed.PublicKey)
	}
	var raw certificationRequest
	rest, err := asn1.Unmarshal(der, &raw)
	if err != nil || len(rest) > 0 {
		t.Fatalf("not RFC 2986 to its last byte: %v, %d bytes follow", err, len(rest))
	}
	return parsed, raw
}

func TestSubjectIsTheNodeAndNothingElse(t *testing.T) {
	for _, node := range []string{"a", "node-1.example.com", strings.Repeat("a", 63) + "." + strings.Repeat("b", 189)} {
		parsed, _ := buildRequest(t, Identity{NodeName: node})
		var subject pkix.RDNSequence
		rest, err := asn1.Unmarshal(parsed.RawSubject, &subject)
		if err != nil || len(rest) > 0 {
			t.Fatalf("subject: %v, %d bytes follow", err, len(rest))
		}
		want := []pkix.AttributeTypeAndValue{
			{Type: asn1.ObjectIdentifier{2, 5, 4, 10}, Value: "system:nodes"},
			{Type: asn1.ObjectIdentifier{2, 5, 4, 3}, Value: "system:node:" + node},
		}
		if len(subject) != len(want) {
			t.Fatalf("subject has %d parts: %v", len(subject), subject)
		}
		for i, set := range subject {
			if len(set) != 1 || !set[0].Type.Equal(want[i].Type) || set[0].Value != want[i].Value {
				t.Errorf("part %d of the subject is %v, want %v", i, set, want[i])
			}
		}
	}
}

func TestProviderIDIsTheOnlyExtension(t *testing.T) {
	for name, providerID := range map[string]string{
		"as a cloud has it": "aws:///eu-central-1a/i-0123456789abcdef0",
		"not ASCII":         "metal://Süd/κόσμος",
		"one character":     "x",
		"the longest":       strings.Repeat("x", maxProviderID),
	} {
		t.Run(name, func(t *testing.T) {
			parsed, raw := buildRequest(t, Identity{NodeName: "a", ProviderID: providerID})
			if len(raw.Info.Attributes) != 1 {
				t.Fatalf("%d attributes, want the extensions alone", len(raw.Info.Attributes))
			}
			if len(parsed.Extensions) != 1 {
				t.Fatalf("%d extensions, want one", len(parsed.Extensions))
			}
			extension := parsed.Extensions[0]
			if extension.Id.String() != "1.3.6.1.4.1.11129.2.1.21" || extension.Critical {
				t.Errorf("extension %v, critical %v", extension.Id, extension.Critical)
			}
			var value asn1.RawValue
			rest, err := asn1.Unmarshal(extension.Value, &value)
			if err != nil || len(rest) > 0 {
				t.Fatalf("value: %v, %d bytes follow", err, len(rest))
			}
			// UTF8String, also where a PrintableString would do
			if extension.Value[0] != 0x0c || string(value.Bytes) != providerID {
				t.Errorf("value has tag %#02x and holds %q", extension.Value[0], value.Bytes)
			}
		})
	}
}

func TestRequestWithoutProviderIDHasNoAttribute(t *testing.T) {
	parsed, raw := buildRequest(t, Identity{NodeName: "a"})
	if len(raw.Info.Attributes) != 0 || len(parsed.Extensions) != 0 {
		t.Errorf("%d attributes, %d extensions", len(raw.Info.Attributes), len(parsed.Extensions))
	}
}

func TestRequestHasNoAlternativeName(t *testing.T) {
	parsed, _ := buildRequest(t, Identity{NodeName: "node-1.example.com", ProviderID: "x://y"})
	if n := len(parsed.DNSNames) + len(parsed.IPAddresses) + len(parsed.EmailAddresses) + len(parsed.URIs); n > 0 {
		t.Errorf("%d alternative names", n)
	}
	for _, e := range parsed.Extensions {
		if e.Id.Equal(asn1.ObjectIdentifier{2, 5, 29, 17}) {
			t.Error("it has the extension for alternative names")
		}
	}
}

func TestCheckProviderID(t *testing.T) {
	for name, c := range map[string]struct {
		id string
		ok bool
	}{
		"of AWS":             {"aws:///eu-central-1a/i-0123", true},
		"not ASCII":          {"metal://Süd", true},
		"the longest":        {strings.Repeat("x", maxProviderID), true},
		"empty":              {"", false},
		"a byte too long":    {strings.Repeat("x", maxProviderID+1), false},
		"too long in bytes":  {strings.Repeat("ü", maxProviderID/2+1), false},
		"a space":            {"a b", false},
		"a newline at last":  {"a\n", false},
		"a no-break space":   {"a\u00a0b", false},
		"a NUL":              {"a\x00b", false},
		"an escape":          {"\x1b[31m", false},
		"right to left":      {"a\u202eb", false},
		"zero width":         {"a\u200bb", false},
		"not UTF-8":          {"a\xffb", false},
		"a surrogate's half": {"a\xed\xa0\x80b", false},
	} {
		t.Run(name, func(t *testing.T) {
			err := CheckProviderID(c.id)
			if (err == nil) != c.ok {
				t.Errorf("got %v, want accepted %v", err, c.ok)
			}
			if err != nil && len(err.Error()) > 200 {
				t.Errorf("the error is %d bytes long", len(err.Error()))
			}
			key, _, keyErr := NewKey()
			if keyErr != nil {
				t.Fatal(keyErr)
			}
			if der, err := PKCS10(Identity{NodeName: "a", ProviderID: c.id}, key); c.id != "" && (err == nil) != c.ok || err != nil && der != nil {
				t.Errorf("a request with it: %d bytes, %v", len(der), err)
			}
		})
	}
}

func TestKeyIsReadBack(t *testing.T) {
	key, data, err := NewKey()
	if err != nil {
		t.Fatal(err)
	}
	again, err := ParseKey(data)
	if err != nil {
		t.Fatal(err)
	}
	if !again.(*ecdsa.PrivateKey).Equal(key) {
		t.Error("another key came back")
	}
	other, _, err := NewKey()
	if err != nil || other.(*ecdsa.PrivateKey).Equal(key) {
		t.Errorf("the next key is the same, %v", err)
	}
}

func TestParseKeyRefusesAndQuotesNothing(t *testing.T) {
	key, good, err := NewKey()
	if err != nil {
		t.Fatal(err)
	}
	sec1, err := x509.MarshalECPrivateKey(key.(*ecdsa.PrivateKey))
	if err != nil {
		t.Fatal(err)
	}
	exchange, err := ecdh.X25519().GenerateKey(rand.Reader) // cannot sign
	if err != nil {
		t.Fatal(err)
	}
	exchangeDER, err := x509.MarshalPKCS8PrivateKey(exchange)
	if err != nil {
		t.Fatal(err)
	}
	block := func(kind string, der []byte) []byte {
		return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
	}
	const secret = "c2VjcmV0c2VjcmV0"
	for name, data := range map[string][]byte{
		"nothing":            nil,
		"garbage":            []byte(secret),
		"half of it":         good[:len(good)/2],
		"SEC 1":              block("EC PRIVATE KEY", sec1),
		"SEC 1 as PKCS #8":   block("PRIVATE KEY", sec1),
		"not PKCS #8":        block("PRIVATE KEY", []byte(secret)),
		"cannot sign":        block("PRIVATE KEY", exchangeDER),
		"another block":      block("CERTIFICATE", []byte(secret)),
		"two keys":           append(bytes.Clone(good), good...),
		"something after it": append(bytes.Clone(good), secret...),
	} {
		t.Run(name, func(t *testing.T) {
			key, err := ParseKey(data)
			if err == nil || key != nil {
				t.Fatalf("was accepted: %v", err)
			}
			for _, line := range strings.Fields(string(data)) {
				if len(line) > 10 && strings.Contains(err.Error(), line[:10]) || strings.Contains(err.Error(), "BEGIN") {
					t.Errorf("the error quotes it: %v", err)
				}
			}
		})
	}
}

func TestNewNameIsRandomAndValid(t *testing.T) {
	// also a DNS-1123 subdomain, as object names must be
	form := regexp.MustCompile(`^node-csr-[a-z2-7]{26}$`)
	seen := map[string]bool{}
	last := map[byte]bool{} // of 128 bits in base32, the last character carries three
	for range 1000 {
		name := NewName()
		if !form.MatchString(name) {
			t.Fatalf("%q", name)
		}
		if seen[name] {
			t.Fatalf("%q came twice", name)
		}
		seen[name] = true
		last[name[len(name)-1]] = true
	}
	if len(last) != 8 {
		t.Errorf("the last character has %d values, want 8: not all of the 128 bits are random", len(last))
	}
}

func TestUsagesFollowFromTheKey(t *testing.T) {
	seconds := int32(3600)
	for name, c := range map[string]struct {
		key  crypto.PublicKey
		want []certificatesv1.KeyUsage
	}{
		"EC":  {&ecdsa.PublicKey{}, []certificatesv1.KeyUsage{"digital signature", "client auth"}},
		"RSA": {&rsa.PublicKey{}, []certificatesv1.KeyUsage{"digital signature", "key encipherment", "client auth"}},
	} {
		t.Run(name, func(t *testing.T) {
			o := Object("node-csr-x", "example.com/signer", []byte("request"), c.key, &seconds)
			if !slices.Equal(o.Spec.Usages, c.want) {
				t.Errorf("usages %q, want %q", o.Spec.Usages, c.want)
			}
			if o.Name != "node-csr-x" || o.GenerateName != "" || o.Spec.SignerName != "example.com/signer" || string(o.Spec.Request) != "request" || *o.Spec.ExpirationSeconds != 3600 {
				t.Errorf("object %+v", o)
			}
		})
	}
}
