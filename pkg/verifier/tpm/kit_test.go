// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/binary"
	"math/big"
	"sync"
	"testing"
	"time"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

const (
	testSigner  = "cluster.x-k8s.io/kube-apiserver-client-kubelet-tpm"
	testCluster = "6b0d7b4c-6d0e-4d8f-9f0e-3a1f3c2c5b11"
)

var testNow = time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func newKey(curve elliptic.Curve) *ecdsa.PrivateKey {
	return must(ecdsa.GenerateKey(curve, rand.Reader))
}

// The keys that take long to make are made once.
var (
	rsa2048 = sync.OnceValue(func() *rsa.PrivateKey { return must(rsa.GenerateKey(rand.Reader, 2048)) })
	rsa1024 = sync.OnceValue(func() *rsa.PrivateKey { return must(rsa.GenerateKey(rand.Reader, 1024)) })
	rocaKey = sync.OnceValue(newROCA)
)

// newROCA makes a modulus as Infineon's RSALib did: each prime is k*M + (65537^a mod M), M the
// product of the first 39 primes.
func newROCA() *rsa.PublicKey {
	m := big.NewInt(1)
	for n, found := int64(2), 0; found < 39; n++ {
		if big.NewInt(n).ProbablyPrime(10) {
			m.Mul(m, big.NewInt(n))
			found++
		}
	}
	prime := func() *big.Int {
		// the two highest bits set, so that the product has 2048
		low := new(big.Int).Lsh(big.NewInt(3), 1022)
		least := new(big.Int).Div(low, m)
		least.Add(least, big.NewInt(1))
		span := new(big.Int).Div(new(big.Int).Lsh(big.NewInt(1), 1022), m)
		span.Sub(span, big.NewInt(2))
		for {
			k := must(rand.Int(rand.Reader, span))
			a := must(rand.Int(rand.Reader, big.NewInt(1<<40)))
			p := new(big.Int).Exp(big.NewInt(65537), a, m)
			p.Add(p, k.Add(k, least).Mul(k, m))
			if p.BitLen() == 1024 && p.ProbablyPrime(10) {
				return p
			}
		}
	}
	return &rsa.PublicKey{N: new(big.Int).Mul(prime(), prime()), E: 65537}
}

// testCA is a CA of a maker of TPMs.
type testCA struct {
	certificate *x509.Certificate
	key         crypto.Signer
}

func newCA(name string, parent *testCA, change func(*x509.Certificate)) *testCA {
	return newCAWith(newKey(elliptic.P256()), name, parent, change)
}

func newCAWith(key crypto.Signer, name string, parent *testCA, change func(*x509.Certificate)) *testCA {
	c := &x509.Certificate{
		SerialNumber:          big.NewInt(time.Now().UnixNano()),
		Subject:               pkix.Name{Organization: []string{"Maker"}, CommonName: name},
		NotBefore:             testNow.AddDate(-1, 0, 0),
		NotAfter:              testNow.AddDate(10, 0, 0),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
	}
	if change != nil {
		change(c)
	}
	signer, signerKey := c, key
	if parent != nil {
		signer, signerKey = parent.certificate, parent.key
	}
	der := must(x509.CreateCertificate(rand.Reader, c, signer, key.Public(), signerKey))
	return &testCA{must(x509.ParseCertificate(der)), key}
}

// withSHA1 has a certificate be signed as makers did until about 2016.
func withSHA1(c *x509.Certificate) { c.SignatureAlgorithm = x509.ECDSAWithSHA1 }

// san is the subject alternative name of an EK certificate, of these attributes under 2.23.133.2.
func san(critical bool, attributes ...pkix.AttributeTypeAndValue) pkix.Extension {
	var name pkix.RDNSequence
	for _, a := range attributes {
		name = append(name, pkix.RelativeDistinguishedNameSET{a})
	}
	value := must(asn1.Marshal([]asn1.RawValue{{Class: asn1.ClassContextSpecific, Tag: 4, IsCompound: true, Bytes: must(asn1.Marshal(name))}}))
	return pkix.Extension{Id: asn1.ObjectIdentifier{2, 5, 29, 17}, Critical: critical, Value: value}
}

func attribute(last int, value string) pkix.AttributeTypeAndValue {
	return pkix.AttributeTypeAndValue{Type: asn1.ObjectIdentifier{2, 23, 133, 2, last}, Value: value}
}

func goodSAN() pkix.Extension {
	return san(true, attribute(1, "id:49465800"), attribute(2, "SLB9670"), attribute(3, "id:0D0B"))
}

// issue makes an EK certificate.
func (c *testCA) issue(key crypto.PublicKey, change func(*x509.Certificate)) []byte {
	leaf := &x509.Certificate{
		SerialNumber:          big.NewInt(7),
		NotBefore:             testNow.AddDate(-1, 0, 0),
		NotAfter:              testNow.AddDate(5, 0, 0),
		KeyUsage:              x509.KeyUsageKeyAgreement,
		UnknownExtKeyUsage:    []asn1.ObjectIdentifier{{2, 23, 133, 8, 1}},
		BasicConstraintsValid: true,
		ExtraExtensions:       []pkix.Extension{goodSAN()},
	}
	if _, ok := key.(*rsa.PublicKey); ok {
		leaf.KeyUsage = x509.KeyUsageKeyEncipherment
	}
	if change != nil {
		change(leaf)
	}
	return must(x509.CreateCertificate(rand.Reader, leaf, c.certificate, key, c.key))
}

// kit is everything that takes part in the good case, with software keys: a forger's TPM, that the
// test may bend at each step. The controller's key is known to the test, as it is to nobody else.
type kit struct {
	root, intermediate *testCA
	ekKeys             map[string]crypto.PublicKey
	// ecEKs are the private keys of the EKs that are ECC.
	ecEKs map[string]*ecdsa.PrivateKey
	ak    *ecdsa.PrivateKey
	key   []byte
}

var theKit = sync.OnceValue(func() *kit {
	k := &kit{ak: newKey(elliptic.P256()), key: make([]byte, 32), ecEKs: map[string]*ecdsa.PrivateKey{}, ekKeys: map[string]crypto.PublicKey{}}
	_, _ = rand.Read(k.key)
	k.root = newCA("Root", nil, nil)
	k.intermediate = newCA("Intermediate", k.root, nil)
	for name, curve := range map[string]elliptic.Curve{"ecc-p256": elliptic.P256(), "ecc-p256-high": elliptic.P256(), "ecc-p384-high": elliptic.P384()} {
		k.ecEKs[name] = newKey(curve)
		k.ekKeys[name] = k.ecEKs[name].Public()
	}
	k.ekKeys["rsa-2048"], k.ekKeys["rsa-2048-high"] = rsa2048().Public(), rsa2048().Public()
	return k
})

func (k *kit) config() Config {
	return Config{
		Roots:         []*x509.Certificate{k.root.certificate},
		Intermediates: []*x509.Certificate{k.intermediate.certificate},
		PCRs:          attestation.PCRSelection{Bank: "sha256", Indexes: []int{0, 4, 7}},
		ClusterUID:    testCluster,
		Keys:          Keys{Current: "k1", ByID: map[string][]byte{"k1": k.key, "k0": bytes.Repeat([]byte("old key."), 4)}},
	}
}

func ekPublic(name string, key crypto.PublicKey) []byte {
	e, _ := template.EKByName(name)
	return tpm2.Marshal(must(e.PublicArea(key)))
}

func akPublic(key *ecdsa.PublicKey) []byte {
	area := template.AK()
	point := must(key.Bytes())
	area.Unique = tpm2.NewTPMUPublicID(tpm2.TPMAlgECC, &tpm2.TPMSECCPoint{
		X: tpm2.TPM2BECCParameter{Buffer: point[1:33]}, Y: tpm2.TPM2BECCParameter{Buffer: point[33:]},
	})
	return tpm2.Marshal(area)
}

func spkiOf(key crypto.PublicKey) []byte { return must(x509.MarshalPKIXPublicKey(key)) }

// selection is a TPMS_PCR_SELECTION.
type selection struct {
	bank uint16
	bits []byte
}

func selectionOf(bank uint16, indexes ...int) selection {
	s := selection{bank, make([]byte, 3)}
	for _, i := range indexes {
		s.bits[i/8] |= 1 << (i % 8)
	}
	return s
}

// attest is a TPMS_ATTEST of which every field can be a lie.
type attest struct {
	magic         uint32
	kind          uint16
	signer, extra []byte
	boot          verifier.Boot
	safe          byte
	firmware      uint64
	selections    []selection
	digest        []byte
	// body stands for selections and digest if it is not nil.
	body []byte
}

func sized(b []byte) []byte { return append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...) }

func (a attest) marshal() []byte {
	b := binary.BigEndian.AppendUint32(nil, a.magic)
	b = binary.BigEndian.AppendUint16(b, a.kind)
	b = append(append(b, sized(a.signer)...), sized(a.extra)...)
	b = binary.BigEndian.AppendUint64(b, a.boot.Clock)
	b = binary.BigEndian.AppendUint32(b, a.boot.Resets)
	b = binary.BigEndian.AppendUint32(b, a.boot.Restarts)
	b = append(b, a.safe)
	b = binary.BigEndian.AppendUint64(b, a.firmware)
	if a.body != nil {
		return append(b, a.body...)
	}
	b = binary.BigEndian.AppendUint32(b, uint32(len(a.selections)))
	for _, s := range a.selections {
		b = binary.BigEndian.AppendUint16(b, s.bank)
		b = append(append(b, byte(len(s.bits))), s.bits...)
	}
	return append(b, sized(a.digest)...)
}

// sign returns a TPMT_SIGNATURE.
func sign(key *ecdsa.PrivateKey, data []byte) []byte {
	digest := sha256.Sum256(data)
	r, s, err := ecdsa.Sign(rand.Reader, key, digest[:])
	if err != nil {
		panic(err)
	}
	return signatureOf(0x0018, 0x000b, r.FillBytes(make([]byte, 32)), s.FillBytes(make([]byte, 32)))
}

func signatureOf(scheme, hash uint16, r, s []byte) []byte {
	b := binary.BigEndian.AppendUint16(nil, scheme)
	b = binary.BigEndian.AppendUint16(b, hash)
	return append(append(b, sized(r)...), sized(s)...)
}

// bend is what a test changes of the good case. Each function is called at its step, nil for none;
// the steps after it go on honestly with what it left.
type bend struct {
	ek     string // template, "ecc-p256" if empty
	policy func(*Config)
	named  []Fingerprint
	now    time.Time // of the judgement, testNow and a minute if zero

	hello        func(*attestation.Hello)
	helloData    func([]byte) []byte        // the document
	helloContent func(*attestation.Request) // the three blocks
	helloBytes   func([]byte) []byte        // spec.request
	helloRequest func(*Request)             // the object
	expires      func(*int64)               // of the challenge, as made
	keyID        func(*string, *[]byte)     // of the challenge, as made
	secret       func(*attestation.SecretInfo)
	transcript   func(*attestation.Transcript)
	name         func([]byte) []byte // the AK's Name under which the quote is made
	attest       func(*attest)
	quote        func([]byte) []byte // before it is signed
	sign         func(quote []byte) []byte
	proof        func(*attestation.Proof) // all that is signed is made
	proofData    func([]byte) []byte
	proofContent func(*attestation.Request)
	proofBytes   func([]byte) []byte
	proofRequest func(*Request)
	helloAfter   func(*Request) // the hello's object, as it is shown beside the proof
	pcrs         []attestation.PCR
	eventLog     []byte
}

// played is what the verifier is shown.
type played struct {
	verifier     *Verifier
	hello, proof Request
	now          time.Time
	named        []Fingerprint
}

func call[T any](f func(*T), value *T) {
	if f != nil {
		f(value)
	}
}

func through(f func([]byte) []byte, data []byte) []byte {
	if f == nil {
		return data
	}
	return f(bytes.Clone(data))
}

func testPCRs() []attestation.PCR {
	var list []attestation.PCR
	for _, i := range []int{0, 4, 7} {
		value := sha256.Sum256([]byte{byte(i)})
		list = append(list, attestation.PCR{Index: i, Value: value[:]})
	}
	return list
}

func int32p(n int32) *int32 { return &n }

// play plays the protocol, bent.
func (k *kit) play(t testing.TB, b bend) played {
	t.Helper()
	config := k.config()
	call(b.policy, &config)
	v, err := New(config)
	if err != nil {
		t.Fatal(err)
	}
	if b.ek == "" {
		b.ek = "ecc-p256"
	}
	h := attestation.Hello{
		Version: attestation.VersionTPM, Kind: attestation.KindHello, Versions: attestation.Versions{attestation.VersionTPM},
		SignerName: testSigner, EKTemplate: b.ek, EKPublic: ekPublic(b.ek, k.ekKeys[b.ek]),
		EKCertificates: [][]byte{k.intermediate.issue(k.ekKeys[b.ek], nil)}, AKPublic: akPublic(&k.ak.PublicKey),
	}
	call(b.hello, &h)
	content := attestation.Request{PKCS10: []byte("a certification request"), Provider: "tpm"}
	content.Data = through(b.helloData, must(h.Marshal()))
	helloContent := content
	call(b.helloContent, &helloContent)
	hello := Request{
		Name: "node-csr-aaaaaaaaaaaaaaaaaaaaaaaaaa", UID: "0d7e5e0a-3c1f-4b52-8a51-0e6f6d3f9a01", SignerName: attestation.HelloSignerName,
		Request: through(b.helloBytes, must(helloContent.Marshal())), Usages: []string{"digital signature", "client auth"}, ExpirationSeconds: int32p(3600),
	}
	call(b.helloRequest, &hello)

	// The controller's side of the challenge, as the specification has it.
	expires := testNow.Add(defaultChallengeLifetime).Unix()
	call(b.expires, &expires)
	keyID, key := "k1", k.key
	if b.keyID != nil {
		b.keyID(&keyID, &key)
	}
	pcrs := testPCRs()
	if b.pcrs != nil {
		pcrs = b.pcrs
	}
	p := attestation.Proof{
		Version: attestation.VersionTPM, Kind: attestation.KindProof, HelloName: hello.Name, HelloUID: hello.UID, KeyID: keyID, Expires: expires,
		PCRBank: config.PCRs.Bank, PCRs: pcrs, EventLog: b.eventLog,
	}
	name := nameOf(h.AKPublic)
	info := attestation.SecretInfo{
		Version: attestation.VersionTPM, ClusterUID: config.ClusterUID, SignerName: h.SignerName, EKPublicKey: spkiOf(k.ekKeys[b.ek]),
		AKName: name, HelloRequest: hello.Request, Expires: expires, PCRs: p.Selection(),
	}
	call(b.secret, &info)
	secret := must(attestation.Secret(key, hello.UID, info))

	// The node's side of the proof.
	proofName := "node-csr-bbbbbbbbbbbbbbbbbbbbbbbbbb"
	transcript := attestation.Transcript{
		Version: attestation.VersionTPM, SignerName: h.SignerName, HelloName: hello.Name, HelloUID: hello.UID, HelloRequest: hello.Request,
		ProofName: proofName, PKCS10: helloContent.PKCS10, Usages: hello.Usages, ExpirationSeconds: hello.ExpirationSeconds, KeyID: keyID, PCRs: p.Selection(),
	}
	call(b.transcript, &transcript)
	values := sha256.New()
	var indexes []int
	for _, pcr := range pcrs {
		values.Write(pcr.Value)
		indexes = append(indexes, pcr.Index)
	}
	name = through(b.name, name)
	a := attest{
		magic: 0xff544347, kind: 0x8018, signer: qualified(0x4000000b, name), extra: transcript.MAC(secret),
		boot: verifier.Boot{Resets: 12, Restarts: 3, Clock: 123456789}, safe: 1, firmware: 0x0007003d_00000001,
		selections: []selection{selectionOf(0x000b, indexes...)}, digest: values.Sum(nil),
	}
	call(b.attest, &a)
	p.Quote = through(b.quote, a.marshal())
	if b.sign == nil {
		b.sign = func(quote []byte) []byte { return sign(k.ak, quote) }
	}
	p.Signature = b.sign(p.Quote)
	call(b.proof, &p)
	proofContent := attestation.Request{PKCS10: content.PKCS10, Provider: "tpm", Data: through(b.proofData, must(p.Marshal()))}
	call(b.proofContent, &proofContent)
	proof := Request{
		Name: proofName, UID: "0d7e5e0a-3c1f-4b52-8a51-0e6f6d3f9a02", SignerName: testSigner,
		Request: through(b.proofBytes, must(proofContent.Marshal())), Usages: hello.Usages, ExpirationSeconds: hello.ExpirationSeconds,
	}
	call(b.proofRequest, &proof)
	call(b.helloAfter, &hello)
	now := b.now
	if now.IsZero() {
		now = testNow.Add(time.Minute)
	}
	return played{v, hello, proof, now, b.named}
}

// nameOf and qualified compute a Name and a Qualified Name from the specification, without the
// product's code.
func nameOf(public []byte) []byte {
	digest := sha256.Sum256(public)
	return append([]byte{0, 0x0b}, digest[:]...)
}

func qualified(parent uint32, name []byte) []byte {
	digest := sha256.Sum256(append(binary.BigEndian.AppendUint32(nil, parent), name...))
	return append([]byte{0, 0x0b}, digest[:]...)
}
