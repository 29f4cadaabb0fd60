// SPDX-License-Identifier: Apache-2.0

package ec2

import (
	"bytes"
	"crypto/elliptic"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	imitation "github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/nitrotpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation/nitrotpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/cloud"
)

const (
	clusterUID = "some-cluster"
	signerName = "cluster.x-k8s.io/kube-apiserver-client-kubelet-ec2"
	someID     = "i-0123456789abcdef0"
	otherID    = "i-0123456789abcdef1"
	someRegion = "eu-west-1"
)

var created = time.Date(2026, 11, 28, 12, 0, 1, 0, time.UTC)

// realDocument was made by an EC2 instance on 2026-08-13, and published by its owner.
func realDocument(t testing.TB) []byte {
	t.Helper()
	text, err := os.ReadFile("testdata/nitrotpm-document.b64")
	if err != nil {
		t.Fatal(err)
	}
	document, err := base64.StdEncoding.DecodeString(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	return document
}

func newVerifier(t testing.TB, c Config) *Verifier {
	t.Helper()
	v, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func newMaker(t testing.TB, id string) *imitation.Maker {
	t.Helper()
	m, err := imitation.New(id, someRegion, created)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// wantReason fails unless err refuses for exactly that reason, and for none if it is empty.
func wantReason(t *testing.T, err error, want verifier.Reason) {
	t.Helper()
	refusals, refused := errors.AsType[verifier.Refusals](err)
	switch {
	case want == "" && err != nil:
		t.Errorf("refused: %v", err)
	case want != "" && (!refused || len(refusals) != 1 || refusals[0].Reason != want):
		t.Errorf("got %v, want a refusal for %s", err, want)
	}
}

func TestRoot(t *testing.T) {
	block, rest := pem.Decode(rootPEM)
	if block == nil || len(bytes.TrimSpace(rest)) != 0 {
		t.Fatal("not one PEM block")
	}
	sum := sha256.Sum256(block.Bytes)
	if got, want := hex.EncodeToString(sum[:]), "641a0321a3e244efe456463195d606317ed7cdcc3c1756e09893f3c68f79bb5b"; got != want {
		t.Errorf("the root's SHA-256 is %s, not %s as AWS publishes", got, want)
	}
}

func TestRealDocument(t *testing.T) {
	signed, i, err := newVerifier(t, Config{ClusterUID: clusterUID}).open(realDocument(t))
	if err != nil {
		t.Fatal(err)
	}
	if want := (instance{"i-000fa553dad58a9f1", "us-west-2"}); i != want {
		t.Errorf("it is of %v, want %v", i, want)
	}
	if got, want := string(signed.Nonce), "be4c5b7d743ff7808cf107a64a8de6d907823adccef58c366d3d4cc6a2b2f767"; got != want {
		t.Errorf("nonce %q, want %q", got, want)
	}
	if got, want := signed.Timestamp, uint64(1786642608432); got != want {
		t.Errorf("time %d, want %d", got, want)
	}
	if got, want := hex.EncodeToString(signed.PCRs[4][:8]), "3c428daf639a8665"; got != want {
		t.Errorf("PCR 4 begins with %s, want %s", got, want)
	}
}

// A bit of the real document is changed. AWS's own signature covers the payload. The rest
// has one encoding.
func TestNoBitOfTheRealDocumentMayChange(t *testing.T) {
	v, document := newVerifier(t, Config{ClusterUID: clusterUID}), realDocument(t)
	for at := 0; at < len(document); at += 11 { // not each, for speed
		changed := bytes.Clone(document)
		changed[at] ^= 1 << (at % 8)
		if _, _, err := v.open(changed); err == nil {
			t.Errorf("accepted with another bit in byte %d", at)
		}
	}
}

// The real document is changed without a new signature. Each fault has to be found before or by the
// check of the signature.
func TestRealDocumentChanged(t *testing.T) {
	document := realDocument(t)
	replace := func(old, with string) func([]byte) []byte {
		return func(b []byte) []byte {
			if bytes.Count(b, []byte(old)) == 0 {
				t.Errorf("the document has no %q", old)
			}
			return bytes.Replace(b, []byte(old), []byte(with), 1)
		}
	}
	content := func(change func(*nitrotpm.Document)) func([]byte) []byte {
		return func(b []byte) []byte {
			signed, err := nitrotpm.Parse(b)
			if err != nil {
				t.Fatal(err)
			}
			change(&signed.Document)
			return nitrotpm.Assemble(signed.Document.Payload(), signed.Signature)
		}
	}
	for _, test := range []struct {
		name   string
		change func([]byte) []byte
		want   verifier.Reason
	}{
		{"module_id: another instance", content(func(d *nitrotpm.Document) { d.ModuleID = "i-000fa553dad58a9f2-tpm0000000000000000" }), cloud.ReasonSignature},
		{"timestamp: a second later", content(func(d *nitrotpm.Document) { d.Timestamp += 1000 }), cloud.ReasonSignature},
		{"timestamp: certificates expired", content(func(d *nitrotpm.Document) { d.Timestamp += 4 * 3600 * 1000 }), cloud.ReasonSignature},
		{"timestamp: certificates not valid yet", content(func(d *nitrotpm.Document) { d.Timestamp -= 4 * 3600 * 1000 }), cloud.ReasonSignature},
		{"timestamp: beyond the year 9999", content(func(d *nitrotpm.Document) { d.Timestamp = 1 << 63 }), cloud.ReasonMalformed},
		{"PCR 4", content(func(d *nitrotpm.Document) { d.PCRs[4] = make([]byte, 48) }), cloud.ReasonSignature},
		{"PCR 23", content(func(d *nitrotpm.Document) { d.PCRs[23] = bytes.Repeat([]byte{1}, 48) }), cloud.ReasonSignature},
		{"PCR of another size", content(func(d *nitrotpm.Document) { d.PCRs[0] = make([]byte, 32) }), cloud.ReasonMalformed},
		{"nonce", content(func(d *nitrotpm.Document) { d.Nonce = make([]byte, 32) }), cloud.ReasonSignature},
		{"no nonce", content(func(d *nitrotpm.Document) { d.Nonce = nil }), cloud.ReasonSignature},
		{"public_key", content(func(d *nitrotpm.Document) { d.PublicKey = nil }), cloud.ReasonSignature},
		{"user_data", content(func(d *nitrotpm.Document) { d.UserData = []byte{} }), cloud.ReasonSignature},
		{"certificate: not one", content(func(d *nitrotpm.Document) { d.Certificate = []byte("no") }), cloud.ReasonSignature},
		{"certificate: the instance's CA", content(func(d *nitrotpm.Document) { d.Certificate = d.CABundle[3] }), cloud.ReasonSignature},
		{"cabundle: none", content(func(d *nitrotpm.Document) { d.CABundle = nil }), cloud.ReasonMalformed},
		{"cabundle: the root alone", content(func(d *nitrotpm.Document) { d.CABundle = d.CABundle[:1] }), cloud.ReasonSignature},
		{"cabundle: without the region's", content(func(d *nitrotpm.Document) { d.CABundle = append(d.CABundle[:1:1], d.CABundle[2:]...) }), cloud.ReasonSignature},
		{"cabundle: without the zone's", content(func(d *nitrotpm.Document) { d.CABundle = append(d.CABundle[:2:2], d.CABundle[3:]...) }), cloud.ReasonSignature},
		{"cabundle: without the instance's", content(func(d *nitrotpm.Document) { d.CABundle = d.CABundle[:3] }), cloud.ReasonSignature},
		{"cabundle: one that cannot be parsed", content(func(d *nitrotpm.Document) { d.CABundle = append(d.CABundle, []byte("no")) }), cloud.ReasonSignature},
		{"cabundle: nine", content(func(d *nitrotpm.Document) {
			d.CABundle = append(d.CABundle, d.CABundle...)
			d.CABundle = append(d.CABundle, d.CABundle[0])
		}), cloud.ReasonMalformed},
		{"digest: another algorithm", replace("\x66SHA384", "\x66SHA512"), cloud.ReasonMalformed},
		{"algorithm ES256", replace("\x44\xa1\x01\x38\x22", "\x43\xa1\x01\x26"), cloud.ReasonMalformed},
		{"algorithm ES512", replace("\x44\xa1\x01\x38\x22", "\x44\xa1\x01\x38\x23"), cloud.ReasonMalformed},
		{"protected header with a key ID", replace("\x44\xa1\x01\x38\x22", "\x47\xa2\x01\x38\x22\x04\x41\x00"), cloud.ReasonMalformed},
		{"unprotected header", replace("\x22\xa0\x59", "\x22\xa1\x04\x41\x00\x59"), cloud.ReasonMalformed},
		{"tag of COSE_Sign1", func(b []byte) []byte { return append([]byte{0xd2}, b...) }, cloud.ReasonMalformed},
		{"tag of self-described CBOR", func(b []byte) []byte { return append([]byte{0xd9, 0xd9, 0xf7}, b...) }, cloud.ReasonMalformed},
		{"trailing byte", func(b []byte) []byte { return append(b, 0) }, cloud.ReasonMalformed},
		{"second document after it", func(b []byte) []byte { return append(b, b...) }, cloud.ReasonMalformed},
		{"cut short", func(b []byte) []byte { return b[:len(b)-1] }, cloud.ReasonMalformed},
		{"empty", func([]byte) []byte { return nil }, cloud.ReasonMalformed},
		{"longer than the limit", content(func(d *nitrotpm.Document) { d.PublicKey = make([]byte, 17<<10) }), cloud.ReasonMalformed},
		{"array of five", func(b []byte) []byte { return append([]byte{0x85}, append(b[1:], 0xf6)...) }, cloud.ReasonMalformed},
		{"array of no definite length", func(b []byte) []byte { return append([]byte{0x9f}, append(b[1:], 0xff)...) }, cloud.ReasonMalformed},
		{"array's length in two bytes", func(b []byte) []byte { return append([]byte{0x98, 4}, b[1:]...) }, cloud.ReasonMalformed},
		{"payload's length in four bytes", replace("\x22\xa0\x59", "\x22\xa0\x5a\x00\x00"), cloud.ReasonMalformed},
		{"signature as chunks", func(b []byte) []byte {
			at := len(b) - 98
			return append(append(bytes.Clone(b[:at]), 0x5f), append(b[at:len(b):len(b)], 0xff)...)
		}, cloud.ReasonMalformed},
		{"signature too short", func(b []byte) []byte {
			at := len(b) - 98
			return append(append(bytes.Clone(b[:at]), 0x58, 95), b[at+2:len(b)-1]...)
		}, cloud.ReasonMalformed},
		{"signature of zeros", func(b []byte) []byte { return append(b[:len(b)-96], make([]byte, 96)...) }, cloud.ReasonSignature},
		{"r and s exchanged", func(b []byte) []byte {
			at := len(b)
			return append(append(bytes.Clone(b[:at-96]), b[at-48:]...), b[at-96:at-48]...)
		}, cloud.ReasonSignature},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, _, err := newVerifier(t, Config{ClusterUID: clusterUID}).open(test.change(bytes.Clone(document)))
			wantReason(t, err, test.want)
		})
	}
	t.Run("another root", func(t *testing.T) {
		_, _, err := newVerifier(t, Config{ClusterUID: clusterUID, Roots: []*x509.Certificate{newMaker(t, someID).Root()}}).open(document)
		wantReason(t, err, cloud.ReasonSignature)
	})
	t.Run("an imitation with AWS's root", func(t *testing.T) {
		imitated, err := newMaker(t, someID).Document(nil, created)
		if err != nil {
			t.Fatal(err)
		}
		_, _, err = newVerifier(t, Config{ClusterUID: clusterUID}).open(imitated)
		wantReason(t, err, cloud.ReasonSignature)
	})
}

// attempt is one request with its evidence, and how it is judged. A test changes one part of it.
type attempt struct {
	maker *imitation.Maker
	// node is the request as the node knows it: the document is bound to it.
	node    verifier.Filed
	pkcs10  string
	cluster string
	made    time.Time
	// content changes the document before it is signed, payload its encoding.
	content func(*nitrotpm.Document)
	payload func([]byte) []byte
	// identity changes the DATA document, and file the request as it was filed.
	identity func(*attestation.Identity)
	file     func(*attestation.Request, *verifier.Filed)
	config   Config
}

func someAttempt(t testing.TB) *attempt {
	t.Helper()
	lifetime, maker := int32(86400), newMaker(t, someID)
	return &attempt{
		maker: maker, pkcs10: "PKCS#10", cluster: clusterUID, made: created.Add(-time.Second),
		node: verifier.Filed{
			Name: "node-csr-a", UID: "u", SignerName: signerName, Created: created,
			Usages: []string{"client auth", "digital signature"}, ExpirationSeconds: &lifetime,
		},
		config: Config{ClusterUID: clusterUID, Roots: []*x509.Certificate{maker.Root()}},
	}
}

func (a *attempt) filed(t testing.TB) verifier.Filed {
	t.Helper()
	nonce := attestation.Binding{
		Version: attestation.VersionEC2, ClusterUID: a.cluster, SignerName: a.node.SignerName, Name: a.node.Name,
		PKCS10: []byte(a.pkcs10), Usages: a.node.Usages, ExpirationSeconds: a.node.ExpirationSeconds,
	}.Nonce()
	content := a.maker.Content(nonce[:], a.made)
	if a.content != nil {
		a.content(&content)
	}
	payload := content.Payload()
	if a.payload != nil {
		payload = a.payload(payload)
	}
	statement, err := a.maker.Sign(payload)
	if err != nil {
		t.Fatal(err)
	}
	identity := attestation.Identity{Version: attestation.VersionEC2, ClusterUID: a.cluster, Statement: statement}
	if a.identity != nil {
		a.identity(&identity)
	}
	data, err := identity.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	content10, filed := attestation.Request{PKCS10: []byte(a.pkcs10), Provider: Name, Data: data}, a.node
	if a.file != nil {
		a.file(&content10, &filed)
	}
	if filed.Request, err = content10.Marshal(); err != nil {
		t.Fatal(err)
	}
	return filed
}

func (a *attempt) verify(t testing.TB) (*cloud.Verified, error) {
	t.Helper()
	return newVerifier(t, a.config).Verify(a.filed(t))
}

func TestAccepted(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*attempt)
	}{
		{"as the node files it", func(*attempt) {}},
		{"the node has no clusterUID setting", func(a *attempt) { a.cluster = "" }},
		{"no lifetime", func(a *attempt) { a.node.ExpirationSeconds = nil }},
		{"filed ten minutes later", func(a *attempt) { a.made = created.Add(-cloud.MaxAge) }},
		{"AWS's clock is two minutes ahead", func(a *attempt) { a.made = created.Add(cloud.MaxAhead) }},
		{"the bundle's own root is ignored", func(a *attempt) {
			a.content = func(d *nitrotpm.Document) { d.CABundle[0] = []byte("not a certificate") }
		}},
		{"PCRs as the policy allows", func(a *attempt) {
			a.config.PCRValues = map[int][][]byte{4: {make([]byte, 48), a.maker.PCRs[4]}, 7: {a.maker.PCRs[7]}}
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			a := someAttempt(t)
			test.change(a)
			got, err := a.verify(t)
			if err != nil {
				t.Fatal(err)
			}
			if want := (attestation.Instance{Platform: "ec2", ID: someID}); got.Instance != want {
				t.Errorf("instance %v, want %v", got.Instance, want)
			}
			if got.PCRBank != "sha384" || len(got.PCRs) != 24 || got.PCRs[7].Index != 7 || !bytes.Equal(got.PCRs[7].Value, a.maker.PCRs[7]) {
				t.Errorf("PCRs of bank %s: %v", got.PCRBank, got.PCRs)
			}
		})
	}
}

func TestRefused(t *testing.T) {
	edit := func(old, with string) func([]byte) []byte {
		return func(payload []byte) []byte {
			if bytes.Count(payload, []byte(old)) == 0 {
				t.Errorf("the payload has no %q", old)
			}
			return bytes.Replace(payload, []byte(old), []byte(with), 1)
		}
	}
	type change = func(*testing.T, *attempt)
	content := func(f func(*nitrotpm.Document)) change { return func(_ *testing.T, a *attempt) { a.content = f } }
	encoding := func(f func([]byte) []byte) change { return func(_ *testing.T, a *attempt) { a.payload = f } }
	file := func(f func(*attestation.Request, *verifier.Filed)) change {
		return func(_ *testing.T, a *attempt) { a.file = f }
	}
	// reissue changes one certificate, and issues those below it anew.
	reissue := func(i int, f func(*x509.Certificate)) change {
		return func(t *testing.T, a *attempt) {
			for level := i; level < len(a.maker.Chain); level++ {
				template := *a.maker.Chain[level].Certificate
				if level == i {
					f(&template)
				}
				if err := a.maker.Issue(level, &template, elliptic.P384()); err != nil {
					t.Fatal(err)
				}
			}
			if i == 0 {
				a.config.Roots = []*x509.Certificate{a.maker.Root()}
			}
		}
	}
	// module changes the module ID in the document and in its certificate alike, as if AWS's PKI
	// had issued both: the root is also that of Nitro Enclaves.
	module := func(id string) change {
		return func(t *testing.T, a *attempt) {
			a.content = func(d *nitrotpm.Document) { d.ModuleID = id }
			reissue(4, func(c *x509.Certificate) { c.Subject.CommonName = id + "." + someRegion + ".aws" })(t, a)
		}
	}
	early := func(c *x509.Certificate) { c.NotAfter = created.Add(-2 * time.Second) }
	late := func(c *x509.Certificate) { c.NotBefore = created }
	for _, test := range []struct {
		name   string
		want   verifier.Reason
		change change
	}{
		// the request
		{"another name", cloud.ReasonRequest, file(func(_ *attestation.Request, f *verifier.Filed) { f.Name = "node-csr-b" })},
		{"another signer", cloud.ReasonRequest, file(func(_ *attestation.Request, f *verifier.Filed) { f.SignerName += "-role" })},
		{"another key", cloud.ReasonRequest, file(func(r *attestation.Request, _ *verifier.Filed) { r.PKCS10 = []byte("another") })},
		{"other usages", cloud.ReasonRequest, file(func(_ *attestation.Request, f *verifier.Filed) { f.Usages = f.Usages[:1] })},
		{"another lifetime", cloud.ReasonRequest, file(func(_ *attestation.Request, f *verifier.Filed) { f.ExpirationSeconds = nil })},
		{"another provider", cloud.ReasonMalformed, file(func(r *attestation.Request, _ *verifier.Filed) { r.Provider = "ec2-role" })},
		{"no creation time", cloud.ReasonAge, file(func(_ *attestation.Request, f *verifier.Filed) { f.Created = time.Time{} })},
		{"another version", cloud.ReasonMalformed, func(_ *testing.T, a *attempt) {
			a.identity = func(i *attestation.Identity) { i.Version = attestation.VersionEC2Role }
		}},
		{"another cluster", cloud.ReasonCluster, func(_ *testing.T, a *attempt) { a.cluster = "another" }},
		{"the cluster was removed", cloud.ReasonRequest, func(_ *testing.T, a *attempt) {
			a.identity = func(i *attestation.Identity) { i.ClusterUID = "" }
		}},
		// the content
		{"another nonce", cloud.ReasonRequest, content(func(d *nitrotpm.Document) { d.Nonce[31] ^= 1 })},
		{"no nonce", cloud.ReasonRequest, content(func(d *nitrotpm.Document) { d.Nonce = nil })},
		{"a longer nonce", cloud.ReasonRequest, content(func(d *nitrotpm.Document) { d.Nonce = append(d.Nonce, 0) })},
		{"user data", cloud.ReasonRequest, content(func(d *nitrotpm.Document) { d.UserData = []byte("x") })},
		{"empty user data", cloud.ReasonRequest, content(func(d *nitrotpm.Document) { d.UserData = []byte{} })},
		{"a public key", cloud.ReasonRequest, content(func(d *nitrotpm.Document) { d.PublicKey = []byte("x") })},
		{"too old", cloud.ReasonAge, func(_ *testing.T, a *attempt) { a.made = created.Add(-cloud.MaxAge - time.Millisecond) }},
		{"of the future", cloud.ReasonAge, func(_ *testing.T, a *attempt) { a.made = created.Add(cloud.MaxAhead + time.Millisecond) }},
		{"another instance than the certificate's", cloud.ReasonInstance, content(func(d *nitrotpm.Document) { d.ModuleID = otherID + "-tpm0000000000000000" })},
		{"an enclave's module", cloud.ReasonInstance, module(someID + "-enc0123456789abcde")},
		{"a module in upper case", cloud.ReasonInstance, module("i-0123456789ABCDEF0-tpm0000000000000000")},
		{"a module without TPM", cloud.ReasonInstance, module(someID)},
		{"a module with more behind it", cloud.ReasonInstance, module(someID + "-tpm00000000000000000")},
		{"a module with more before it", cloud.ReasonInstance, module("x" + someID + "-tpm0000000000000000")},
		{"a module with a short instance ID", cloud.ReasonInstance, module("i-0123456-tpm0000000000000000")},
		{"a module with a line break", cloud.ReasonInstance, module(someID + "-tpm0000000000000000\n")},
		{"a PCR that the policy does not allow", cloud.ReasonPCR, func(_ *testing.T, a *attempt) {
			a.config.PCRValues = map[int][][]byte{7: {make([]byte, 48)}}
		}},
		{"two PCRs, one not allowed", cloud.ReasonPCR, func(_ *testing.T, a *attempt) {
			a.config.PCRValues = map[int][][]byte{4: {a.maker.PCRs[4]}, 23: {a.maker.PCRs[4]}}
		}},
		// the certificates
		{"root expired", cloud.ReasonSignature, reissue(0, early)},
		{"region's CA expired", cloud.ReasonSignature, reissue(1, early)},
		{"zone's CA expired", cloud.ReasonSignature, reissue(2, early)},
		{"instance's CA expired", cloud.ReasonSignature, reissue(3, early)},
		{"certificate expired", cloud.ReasonSignature, reissue(4, early)},
		{"region's CA not valid yet", cloud.ReasonSignature, reissue(1, late)},
		{"zone's CA not valid yet", cloud.ReasonSignature, reissue(2, late)},
		{"instance's CA not valid yet", cloud.ReasonSignature, reissue(3, late)},
		{"certificate not valid yet", cloud.ReasonSignature, reissue(4, late)},
		{"instance's CA is none", cloud.ReasonSignature, reissue(3, func(c *x509.Certificate) { c.IsCA, c.MaxPathLen, c.MaxPathLenZero = false, -1, false })},
		{"instance's CA may not sign certificates", cloud.ReasonSignature, reissue(3, func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageDigitalSignature })},
		{"zone's CA allows no CA below", cloud.ReasonSignature, reissue(2, func(c *x509.Certificate) { c.MaxPathLen, c.MaxPathLenZero = 0, true })},
		{"certificate is a CA's", cloud.ReasonSignature, reissue(4, func(c *x509.Certificate) { c.IsCA, c.MaxPathLen = true, -1 })},
		{"certificate may not sign", cloud.ReasonSignature, reissue(4, func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageKeyAgreement })},
		{"certificate without usages", cloud.ReasonSignature, reissue(4, func(c *x509.Certificate) { c.KeyUsage = 0 })},
		{"certificate of another module", cloud.ReasonInstance, reissue(4, func(c *x509.Certificate) { c.Subject.CommonName = otherID + "-tpm0000000000000000.eu-west-1.aws" })},
		{"certificate of a region alone", cloud.ReasonInstance, reissue(4, func(c *x509.Certificate) { c.Subject.CommonName = "eu-west-1.aws" })},
		{"certificate of no region", cloud.ReasonInstance, reissue(4, func(c *x509.Certificate) { c.Subject.CommonName = someID + "-tpm0000000000000000.aws" })},
		{"certificate of a longer module", cloud.ReasonInstance, reissue(4, func(c *x509.Certificate) { c.Subject.CommonName = someID + "-tpm00000000000000000.eu-west-1.aws" })},
		{"key of P-256", cloud.ReasonSignature, func(t *testing.T, a *attempt) {
			template := *a.maker.Chain[4].Certificate
			if err := a.maker.Issue(4, &template, elliptic.P256()); err != nil {
				t.Fatal(err)
			}
		}},
		{"a further CA with a key of P-256", cloud.ReasonSignature, func(t *testing.T, a *attempt) {
			other := newMaker(t, otherID)
			template := *other.Chain[1].Certificate
			if err := other.Issue(1, &template, elliptic.P256()); err != nil {
				t.Fatal(err)
			}
			a.maker.Chain = slices.Insert(a.maker.Chain, 1, other.Chain[1])
		}},
		{"another root of the same name", cloud.ReasonSignature, func(t *testing.T, a *attempt) { a.config.Roots = []*x509.Certificate{newMaker(t, someID).Root()} }},
		{"signed with another instance's key", cloud.ReasonSignature, func(t *testing.T, a *attempt) { a.maker.Chain[4].Key = newMaker(t, otherID).Chain[4].Key }},
		// the encoding, signed: AWS's root could sign no other, but an error in CBOR would be ours
		{"map of definite length", cloud.ReasonMalformed, encoding(func(p []byte) []byte { return append([]byte{0xa9}, p[1:len(p)-1]...) })},
		{"an unknown key", cloud.ReasonMalformed, encoding(func(p []byte) []byte { return append(p[:len(p)-1], "\x61x\xf6\xff"...) })},
		{"a key twice", cloud.ReasonMalformed, encoding(func(p []byte) []byte {
			return append(p[:len(p)-1], "\x69module_id\x78\x27"+otherID+"-tpm0000000000000000\xff"...)
		})},
		{"a key missing", cloud.ReasonMalformed, encoding(edit("\x69user_data\xf6", ""))},
		{"keys in another order", cloud.ReasonMalformed, encoding(func(p []byte) []byte {
			return append([]byte("\xbf\x69user_data\xf6"), bytes.Replace(p, []byte("\x69user_data\xf6"), nil, 1)[1:]...)
		})},
		{"a key in upper case", cloud.ReasonMalformed, encoding(edit("user_data", "User_Data"))},
		{"a key's length in two bytes", cloud.ReasonMalformed, encoding(edit("\x66digest", "\x78\x06digest"))},
		{"a PCR's index in two bytes", cloud.ReasonMalformed, encoding(edit("\x02\x58\x30", "\x18\x02\x58\x30"))},
		{"a PCR's length in three bytes", cloud.ReasonMalformed, encoding(edit("\x02\x58\x30", "\x02\x59\x00\x30"))},
		{"a PCR twice", cloud.ReasonMalformed, encoding(edit("\x02\x58\x30", "\x01\x58\x30"))},
		{"a PCR of another index", cloud.ReasonMalformed, encoding(edit("\x02\x58\x30", "\x18\x18\x58\x30"))},
		{"23 PCRs", cloud.ReasonMalformed, encoding(edit("\xb8\x18\x00\x58\x30"+strings.Repeat("\x00", 48), "\xb7"))},
		{"the PCRs' map of no definite length", cloud.ReasonMalformed, encoding(func(p []byte) []byte {
			return bytes.Replace(edit("\xb8\x18\x00\x58", "\xbf\x00\x58")(p), []byte("\x6bcertificate"), []byte("\xff\x6bcertificate"), 1)
		})},
		{"PCRs of an enclave", cloud.ReasonMalformed, encoding(edit("\x6dnitrotpm_pcrs", "\x64pcrs"))},
		{"time as a float", cloud.ReasonMalformed, encoding(edit("timestamp\x1b", "timestamp\xfb"))},
		{"time with a tag", cloud.ReasonMalformed, encoding(edit("timestamp\x1b", "timestamp\xc1\x1b"))},
		{"user data undefined", cloud.ReasonMalformed, encoding(edit("\x69user_data\xf6", "\x69user_data\xf7"))},
		{"text in place of bytes", cloud.ReasonMalformed, encoding(edit("\x65nonce\x58\x20", "\x65nonce\x78\x20"))},
		{"digest of another hash", cloud.ReasonMalformed, encoding(edit("SHA384", "SHA256"))},
		{"trailing byte in the payload", cloud.ReasonMalformed, encoding(func(p []byte) []byte { return append(p, 0) })},
	} {
		t.Run(test.name, func(t *testing.T) {
			a := someAttempt(t)
			test.change(t, a)
			_, err := a.verify(t)
			wantReason(t, err, test.want)
		})
	}
}

// A document stays valid evidence of its request, however late it is judged. Time is an argument,
// so there is nothing to wait for. A copy in another request is refused.
func TestCopiedEvidence(t *testing.T) {
	a := someAttempt(t)
	filed := a.filed(t)
	v := newVerifier(t, a.config)
	for range 2 {
		if _, err := v.Verify(filed); err != nil {
			t.Errorf("judged again: %v", err)
		}
	}
	filed.Name = "node-csr-of-another"
	_, err := v.Verify(filed)
	wantReason(t, err, cloud.ReasonRequest)
	filed.Name, filed.Created = a.node.Name, created.Add(time.Hour)
	_, err = v.Verify(filed)
	wantReason(t, err, cloud.ReasonAge)
}

func TestHasProviderID(t *testing.T) {
	verified, err := someAttempt(t).verify(t)
	if err != nil {
		t.Fatal(err)
	}
	for providerID, want := range map[string]bool{
		"aws:///eu-west-1a/" + someID:              true,
		"aws:///eu-west-1-ham-1a/" + someID:        true,
		"aws:///eu-west-1-wl1-dub-wlz-1/" + someID: true,
		"aws:///eu-west-1a/" + otherID:             false,
		"aws:///us-west-2a/" + someID:              false,
		"aws:///eu-west-1/" + someID:               false,
		"aws:///eu-west-10a/" + someID:             false,
		"aws:///eu-west-1a/" + someID + "/":        false,
		"aws:///eu-west-1a/x/" + someID:            false,
		"aws:////" + someID:                        false,
		"aws:///a/" + someID:                       false,
		"aws:///" + someID:                         false,
		"aws://eu-west-1a/" + someID:               false,
		"AWS:///eu-west-1a/" + someID:              false,
		"aws:///eu-west-1a/I-0123456789abcdef0":    false,
		"aws:///eu-west-1a/" + someID + "\n":       false,
		"eu-west-1a/" + someID:                     false,
		someID:                                     false,
		"":                                         false,
	} {
		if got := verified.HasProviderID(providerID); got != want {
			t.Errorf("%q: %t, want %t", providerID, got, want)
		}
	}
}

func TestConfig(t *testing.T) {
	leaf := newMaker(t, someID).Chain[4].Certificate
	for name, c := range map[string]Config{
		"no cluster":            {},
		"not a cluster's UID":   {ClusterUID: "a b"},
		"root: none":            {ClusterUID: "u", Roots: []*x509.Certificate{nil}},
		"root: not a CA's":      {ClusterUID: "u", Roots: []*x509.Certificate{leaf}},
		"PCR 24":                {ClusterUID: "u", PCRValues: map[int][][]byte{24: {make([]byte, 48)}}},
		"PCR -1":                {ClusterUID: "u", PCRValues: map[int][][]byte{-1: {make([]byte, 48)}}},
		"PCR without a value":   {ClusterUID: "u", PCRValues: map[int][][]byte{4: {}}},
		"PCR of another bank":   {ClusterUID: "u", PCRValues: map[int][][]byte{4: {make([]byte, 32)}}},
		"PCR: the second value": {ClusterUID: "u", PCRValues: map[int][][]byte{4: {make([]byte, 48), nil}}},
	} {
		if _, err := New(c); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

// The policy is copied: a caller that changes its slices afterwards changes no verdict.
func TestConfigIsCopied(t *testing.T) {
	a := someAttempt(t)
	value := bytes.Clone(a.maker.PCRs[7])
	values := map[int][][]byte{7: {value}}
	a.config.PCRValues = values
	v := newVerifier(t, a.config)
	value[0] ^= 1
	values[8] = [][]byte{make([]byte, 48)}
	if _, err := v.Verify(a.filed(t)); err != nil {
		t.Error(err)
	}
}

func BenchmarkVerify(b *testing.B) {
	a := someAttempt(b)
	filed, v := a.filed(b), newVerifier(b, a.config)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := v.Verify(filed); err != nil {
			b.Fatal(err)
		}
	}
}

// FuzzDocument: no input panics the parser, and what it accepts is the one encoding of what it
// says. The signature is left out: that is the standard library's, and slow.
func FuzzDocument(f *testing.F) {
	f.Add(realDocument(f))
	imitated, err := newMaker(f, someID).Document(make([]byte, 32), created)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(imitated)
	f.Fuzz(func(t *testing.T, data []byte) {
		signed, err := nitrotpm.Parse(data)
		if err != nil {
			return
		}
		if again := nitrotpm.Assemble(signed.Document.Payload(), signed.Signature); !bytes.Equal(again, data) {
			t.Errorf("accepted %x, but writes %x", data, again)
		}
	})
}
