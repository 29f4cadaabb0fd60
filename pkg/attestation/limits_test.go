// SPDX-License-Identifier: Apache-2.0

package attestation

import (
	"bytes"
	"encoding/pem"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
)

func someHello() Hello {
	return Hello{Version: VersionTPM, Versions: Versions{VersionTPM}, SignerName: "example.com/tpm", EKTemplate: "ecc-p256", EKPublic: []byte("EK"), AKPublic: []byte("AK")}
}

func someChallenge() Challenge {
	return Challenge{Version: VersionTPM, KeyID: "a", Expires: 1, CredentialBlob: []byte("blob"), EncryptedSecret: []byte("secret"), PCRs: PCRSelection{"sha256", []int{0}}}
}

func someProof() Proof {
	return Proof{Version: VersionTPM, HelloName: "a", HelloUID: "b", KeyID: "c", Expires: 1, PCRBank: "sha256", PCRs: []PCR{{0, make([]byte, 32)}}, Quote: []byte("quote"), Signature: []byte("signature")}
}

func someOrigin() Origin {
	return Origin{Version: VersionTPM, AKPublic: []byte("AK"), Quote: []byte("quote"), Signature: []byte("signature")}
}

func upTo(n int) []int {
	var indexes []int
	for i := range n {
		indexes = append(indexes, i)
	}
	return indexes
}

func values(bank string, n int) []PCR {
	var pcrs []PCR
	for i := range n {
		pcrs = append(pcrs, PCR{i, make([]byte, BankSize(bank))})
	}
	return pcrs
}

func manyVersions(n int) Versions {
	var v Versions
	for ; n > 0; n-- {
		v = append(v, Version(fmt.Sprintf("tpm/v%d", n)))
	}
	return v
}

// Each limit: what is exactly at it is accepted, both ways; one beyond it is refused, and the field
// is named.
func TestLimitsOfDocuments(t *testing.T) {
	hello := func(change func(h *Hello, n int)) func(int) document {
		return func(n int) document { h := someHello(); change(&h, n); return h }
	}
	challenge := func(change func(c *Challenge, n int)) func(int) document {
		return func(n int) document { c := someChallenge(); change(&c, n); return c }
	}
	proof := func(change func(p *Proof, n int)) func(int) document {
		return func(n int) document { p := someProof(); change(&p, n); return p }
	}
	origin := func(change func(o *Origin, n int)) func(int) document {
		return func(n int) document { o := someOrigin(); change(&o, n); return o }
	}
	a := func(n int) string { return strings.Repeat("a", n) }
	for _, c := range []struct {
		kind, field string
		least, most int
		make        func(int) document
	}{
		{KindHello, "versions", 1, 8, hello(func(h *Hello, n int) { h.Versions = manyVersions(n) })},
		{KindHello, "signerName", 1, MaxSignerName, hello(func(h *Hello, n int) { h.SignerName = a(n) })},
		{KindHello, "ekTemplate", 1, 32, hello(func(h *Hello, n int) { h.EKTemplate = a(n) })},
		{KindHello, "ekPublic", 1, MaxPublic, hello(func(h *Hello, n int) { h.EKPublic = make([]byte, n) })},
		{KindHello, "akPublic", 1, MaxPublic, hello(func(h *Hello, n int) { h.AKPublic = make([]byte, n) })},
		{KindHello, "ekCertificates", 0, MaxCertificates, hello(func(h *Hello, n int) {
			for range n {
				h.EKCertificates = append(h.EKCertificates, []byte{1})
			}
		})},
		{KindHello, "ekCertificates", 1, MaxCertificate, hello(func(h *Hello, n int) { h.EKCertificates = [][]byte{{1}, make([]byte, n)} })},
		{KindChallenge, "kid", 1, 64, challenge(func(c *Challenge, n int) { c.KeyID = a(n) })},
		{KindChallenge, "expires", 1, math.MaxInt64, challenge(func(c *Challenge, n int) { c.Expires = int64(n) })},
		{KindChallenge, "credentialBlob", 1, 256, challenge(func(c *Challenge, n int) { c.CredentialBlob = make([]byte, n) })},
		{KindChallenge, "encryptedSecret", 1, 1 << 10, challenge(func(c *Challenge, n int) { c.EncryptedSecret = make([]byte, n) })},
		{KindChallenge, "pcrs", 1, 24, challenge(func(c *Challenge, n int) { c.PCRs.Indexes = upTo(n) })},
		{KindChallenge, "pcrs", 0, 23, challenge(func(c *Challenge, n int) { c.PCRs.Indexes = []int{n} })},
		{KindProof, "helloName", 1, 253, proof(func(p *Proof, n int) { p.HelloName = a(n) })},
		{KindProof, "helloUID", 1, 64, proof(func(p *Proof, n int) { p.HelloUID = a(n) })},
		{KindProof, "kid", 1, 64, proof(func(p *Proof, n int) { p.KeyID = a(n) })},
		{KindProof, "expires", 1, math.MaxInt64, proof(func(p *Proof, n int) { p.Expires = int64(n) })},
		{KindProof, "pcrs", 1, 24, proof(func(p *Proof, n int) { p.PCRs = values("sha256", n) })},
		{KindProof, "pcrs", 0, 23, proof(func(p *Proof, n int) { p.PCRs[0].Index = n })},
		{KindProof, "pcrs", 32, 32, proof(func(p *Proof, n int) { p.PCRs[0].Value = make([]byte, n) })},
		{KindProof, "pcrs", 48, 48, proof(func(p *Proof, n int) { p.PCRBank, p.PCRs[0].Value = "sha384", make([]byte, n) })},
		{KindProof, "pcrs", 64, 64, proof(func(p *Proof, n int) { p.PCRBank, p.PCRs[0].Value = "sha512", make([]byte, n) })},
		{KindProof, "quote", 1, 1 << 10, proof(func(p *Proof, n int) { p.Quote = make([]byte, n) })},
		{KindProof, "signature", 1, 1 << 10, proof(func(p *Proof, n int) { p.Signature = make([]byte, n) })},
		{KindOrigin, "akPublic", 1, MaxPublic, origin(func(o *Origin, n int) { o.AKPublic = make([]byte, n) })},
		{KindOrigin, "quote", 1, 1 << 10, origin(func(o *Origin, n int) { o.Quote = make([]byte, n) })},
		{KindOrigin, "signature", 1, 1 << 10, origin(func(o *Origin, n int) { o.Signature = make([]byte, n) })},
		{KindProof, "eventLog", 0, MaxEventLog, proof(func(p *Proof, n int) { p.EventLog = make([]byte, n) })},
	} {
		t.Run(fmt.Sprintf("%s %s %d to %d", c.kind, c.field, c.least, c.most), func(t *testing.T) {
			for _, n := range []int{c.least, c.most} {
				data, err := c.make(n).Marshal()
				if err != nil {
					t.Fatalf("%d: %v", n, err)
				}
				parsed, err := parseKind(t, c.kind, data)
				if err != nil {
					t.Fatalf("%d: %v", n, err)
				}
				if again, err := parsed.Marshal(); err != nil || !bytes.Equal(again, data) {
					t.Errorf("%d: comes back otherwise, %v", n, err)
				}
			}
			var beyond []int
			if c.most < math.MaxInt64 {
				beyond = append(beyond, c.most+1)
			}
			if c.least > 0 || c.field == "pcrs" {
				beyond = append(beyond, c.least-1)
			}
			for _, n := range beyond {
				_, err := c.make(n).Marshal()
				var malformed *DocumentError
				if !errors.As(err, &malformed) || malformed.Kind != c.kind || malformed.Field != c.field {
					t.Errorf("%d: %v", n, err)
				}
			}
		})
	}
}

// The limits of the fields leave no valid document that is too long as a whole, nor one that does
// not fit into a request.
func TestTheLongestDocumentsFit(t *testing.T) {
	hello := someHello()
	hello.SignerName, hello.EKTemplate = strings.Repeat("a", MaxSignerName), strings.Repeat("a", 32)
	hello.Versions = nil
	for n := 9999; len(hello.Versions) < 7; n-- {
		hello.Versions = append(hello.Versions, Version(fmt.Sprintf("tpm/v%d", n)))
	}
	hello.Versions = append(hello.Versions, VersionTPM)
	hello.EKPublic, hello.AKPublic = make([]byte, MaxPublic), make([]byte, MaxPublic)
	for range MaxCertificates {
		hello.EKCertificates = append(hello.EKCertificates, make([]byte, MaxCertificate))
	}
	proof := someProof()
	proof.HelloName, proof.HelloUID, proof.KeyID, proof.Expires = strings.Repeat("a", 253), strings.Repeat("a", 64), strings.Repeat("a", 64), math.MaxInt64
	proof.PCRBank, proof.PCRs = "sha512", values("sha512", 24)
	proof.Quote, proof.Signature, proof.EventLog = make([]byte, 1<<10), make([]byte, 1<<10), make([]byte, MaxEventLog)
	challenge := someChallenge()
	challenge.KeyID, challenge.Expires, challenge.PCRs = strings.Repeat("a", 64), math.MaxInt64, PCRSelection{"sha512", upTo(24)}
	challenge.CredentialBlob, challenge.EncryptedSecret = make([]byte, 256), make([]byte, 1<<10)

	origin := someOrigin()
	origin.AKPublic, origin.Quote, origin.Signature = make([]byte, MaxPublic), make([]byte, 1<<10), make([]byte, 1<<10)

	for _, d := range []document{hello, proof, challenge, origin} {
		data, err := d.Marshal()
		if err != nil {
			t.Errorf("%T: %v", d, err)
			continue
		}
		t.Logf("%T: %d bytes", d, len(data))
	}
	// Beside a document of maximum length there is room for the largest certification request. That
	// has the longest name, an RSA-4096 key and a provider ID of 1 KiB.
	if _, err := (Request{PKCS10: make([]byte, 4<<10), Provider: strings.Repeat("a", MaxProviderName), Data: make([]byte, MaxDocument)}).Marshal(); err != nil {
		t.Error(err)
	}
}

func TestLengthIsLookedAtFirst(t *testing.T) {
	for kind, limit := range map[string]int{KindHello: MaxDocument, KindProof: MaxDocument, KindChallenge: MaxChallenge, KindOrigin: MaxOrigin} {
		for n, want := range map[int]string{limit: "not the JSON", limit + 1: "longer than"} {
			_, err := parseKind(t, kind, bytes.Repeat([]byte{'['}, n))
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s of %d bytes: %v", kind, n, err)
			}
		}
	}
}

// pemSize is the length of a PEM block with a content of n bytes.
func pemSize(label string, n int) int {
	characters := (n + 2) / 3 * 4
	return len("-----BEGIN -----\n-----END -----\n") + 2*len(label) + characters + (characters+63)/64
}

func TestLimitsOfRequest(t *testing.T) {
	// A request of exactly size bytes. Base64 and lines grow in steps, and not every length can be
	// had.
	exactly := func(size int) (Request, bool) {
		for provider := 1; provider <= MaxProviderName; provider += 3 {
			for pkcs10 := 1; pkcs10 < 60; pkcs10 += 3 {
				rest := size - pemSize(BlockRequest, pkcs10) - pemSize(BlockProvider, provider)
				for data := (rest - 300) / 65 * 48; pemSize(BlockData, data) <= rest; data++ {
					if pemSize(BlockData, data) == rest {
						return Request{PKCS10: make([]byte, pkcs10), Provider: strings.Repeat("a", provider), Data: make([]byte, data)}, true
					}
				}
			}
		}
		return Request{}, false
	}
	encode := func(r Request) []byte {
		var out bytes.Buffer
		for _, block := range r.blocks() {
			if err := pem.Encode(&out, block); err != nil {
				t.Fatal(err)
			}
		}
		return out.Bytes()
	}
	at, ok := exactly(MaxRequestSize)
	if !ok {
		t.Fatalf("no request has %d bytes", MaxRequestSize)
	}
	size := MaxRequestSize + 1
	beyond, ok := exactly(size)
	for ; !ok; beyond, ok = exactly(size) {
		size++
	}
	data, err := at.Marshal()
	if err != nil || len(data) != MaxRequestSize {
		t.Fatalf("%d bytes: %v", len(data), err)
	}
	if _, err := Parse(data); err != nil {
		t.Errorf("at the limit: %v", err)
	}
	var malformed *FormatError
	if _, err := beyond.Marshal(); !errors.As(err, &malformed) {
		t.Errorf("Marshal beyond the limit: %v", err)
	}
	if data := encode(beyond); len(data) != size || size > MaxRequestSize+4 {
		t.Errorf("%d bytes, not %d", len(data), size)
	} else if _, err := Parse(data); !errors.As(err, &malformed) {
		t.Errorf("Parse beyond the limit: %v", err)
	}

	for n, good := range map[int]bool{0: false, 1: true, MaxProviderName: true, MaxProviderName + 1: false} {
		r := sample()
		r.Provider = strings.Repeat("a", n)
		if _, err := r.Marshal(); (err == nil) != good {
			t.Errorf("provider of %d bytes: %v", n, err)
		}
		if _, err := Parse(encode(r)); (err == nil) != good {
			t.Errorf("Parse of a provider of %d bytes: %v", n, err)
		}
	}
}

// A document that nobody has filled in says nothing.
func TestZeroValuesAreRefused(t *testing.T) {
	for _, d := range []document{Hello{}, Challenge{}, Proof{}, Origin{}, &Hello{}, &Challenge{}, &Proof{}, &Origin{}} {
		_, err := d.Marshal()
		var malformed *DocumentError
		if !errors.As(err, &malformed) {
			t.Errorf("%T: %v", d, err)
		}
	}
	if _, err := (Request{}).Marshal(); err == nil {
		t.Error("Request")
	}
	if (Versions{}).Check() == nil || Versions(nil).Check() == nil || (Versions{""}).Check() == nil {
		t.Error("Versions")
	}
	if (PCRSelection{}).Check() == nil {
		t.Error("PCRSelection")
	}
	if got := (Versions{}).Common(Versions{VersionTPM}); got != "" {
		t.Errorf("common with nothing: %s", got)
	}
	for _, c := range []struct {
		key []byte
		uid string
	}{{nil, "a"}, {make([]byte, 31), "a"}, {make([]byte, 32), ""}} {
		if secret, err := Secret(c.key, c.uid, SecretInfo{}); err == nil || secret != nil {
			t.Errorf("a secret of %d bytes for UID %q", len(c.key), c.uid)
		}
	}
}

// Marshal sets the kind, and the document it was called on keeps its own.
func TestMarshalSetsTheKind(t *testing.T) {
	h, c, p, o := someHello(), someChallenge(), someProof(), someOrigin()
	h.Kind, c.Kind, p.Kind, o.Kind = KindProof, KindHello, KindChallenge, KindHello
	for want, d := range map[string]document{KindHello: &h, KindChallenge: &c, KindProof: &p, KindOrigin: &o} {
		data, err := d.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		if _, kind := Head(data); kind != want {
			t.Errorf("%s instead of %s", kind, want)
		}
	}
	if h.Kind != KindProof || c.Kind != KindHello || p.Kind != KindChallenge || o.Kind != KindHello {
		t.Error("Marshal changed its document")
	}
}

// No error quotes what a peer wrote.
func TestErrorsQuoteNothing(t *testing.T) {
	const secret = "xyzzy"
	h, c, p := someHello(), someChallenge(), someProof()
	h.SignerName, c.KeyID, p.HelloName = strings.ToUpper(secret), strings.ToUpper(secret), strings.ToUpper(secret)
	for _, d := range []document{h, c, p} {
		if _, err := d.Marshal(); err == nil || strings.Contains(strings.ToLower(err.Error()), secret) {
			t.Errorf("%T: %v", d, err)
		}
	}
	for _, v := range loadVectors(t).RefusedDocuments {
		_, err := parseKind(t, v.Kind, v.data())
		if err == nil || len(err.Error()) > 200 {
			t.Errorf("%s %s: %v", v.Kind, v.Name, err)
		}
	}
}

func TestBankSize(t *testing.T) {
	for bank, want := range map[string]int{"sha256": 32, "sha384": 48, "sha512": 64, "sha1": 0, "SHA256": 0, "": 0, "sha256 ": 0} {
		if got := BankSize(bank); got != want {
			t.Errorf("%q: %d", bank, got)
		}
		if err := (PCRSelection{bank, []int{0}}).Check(); (err == nil) != (want > 0) {
			t.Errorf("%q: %v", bank, err)
		}
	}
}
