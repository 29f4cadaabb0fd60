// SPDX-License-Identifier: Apache-2.0

package template

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"math/big"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-tpm/tpm2"
)

// extend is how every policy command changes the policy digest (TPM 2.0 Library, part 3): H(old |
// parts...).
func extend(alg crypto.Hash, old []byte, parts ...[]byte) []byte {
	h := alg.New()
	h.Write(old)
	for _, p := range parts {
		h.Write(p)
	}
	return h.Sum(nil)
}

func be32(v uint32) []byte { return binary.BigEndian.AppendUint32(nil, v) }

// policyIndex is the name of the NV index that PolicyC trusts (EK Credential Profile, annex B).
func policyIndex(alg crypto.Hash, nameAlg tpm2.TPMAlgID, index uint32, policyA []byte) []byte {
	public := be32(index)
	public = binary.BigEndian.AppendUint16(public, uint16(nameAlg))
	// read by policy and by owner, written by policy, no DA, written
	public = append(public, be32(0x220F1008)...)
	public = binary.BigEndian.AppendUint16(public, uint16(len(policyA)))
	public = append(public, policyA...)
	public = binary.BigEndian.AppendUint16(public, uint16(2+alg.Size()))
	h := alg.New()
	h.Write(public)
	return h.Sum(binary.BigEndian.AppendUint16(nil, uint16(nameAlg)))
}

func TestPoliciesFollowFromTheFormulae(t *testing.T) {
	for name, c := range map[string]struct {
		p     policies
		alg   crypto.Hash
		index uint32
	}{
		"low":          {low(), crypto.SHA256, 0},
		"high SHA-256": {highSHA256(), crypto.SHA256, 0x01c07f01},
		"high SHA-384": {highSHA384(), crypto.SHA384, 0x01c07f02},
	} {
		t.Run(name, func(t *testing.T) {
			zero := make([]byte, c.alg.Size())
			// TPM2_PolicySecret: H(H(old | TPM_CC_PolicySecret | name of the entity) |
			// policyRef), the latter empty.
			a := extend(c.alg, extend(c.alg, zero, be32(0x00000151), be32(0x4000000B)))
			if !bytes.Equal(a, c.p.policyA) {
				t.Errorf("PolicyA: %x", a)
			}
			want := a
			if c.p.high {
				// TPM2_PolicyAuthorizeNV: H(zero | TPM_CC_PolicyAuthorizeNV | name
				// of the index).
				if got := extend(c.alg, zero, be32(0x00000192), policyIndex(c.alg, c.p.nameAlg, c.index, a)); !bytes.Equal(got, c.p.policyC) {
					t.Errorf("PolicyC: %x", got)
				}
				// TPM2_PolicyOR: H(zero | TPM_CC_PolicyOR | branches).
				want = extend(c.alg, zero, be32(0x00000171), c.p.policyA, c.p.policyC)
			}
			if !bytes.Equal(want, c.p.policy) {
				t.Errorf("authPolicy: %x", want)
			}
		})
	}
}

// attributes as the numbers printed in the EK Credential Profile, annex B.
func TestEKsAreThoseOfTheProfile(t *testing.T) {
	type row struct {
		attributes uint32
		index      uint32
		or, rsa    bool
	}
	want := map[string]row{
		"rsa-2048":      {0x000300b2, 0x01c00002, false, true},
		"ecc-p256":      {0x000300b2, 0x01c0000a, false, false},
		"rsa-2048-high": {0x000300f2, 0x01c00012, true, true},
		"ecc-p256-high": {0x000300f2, 0x01c00014, true, false},
		"ecc-p384-high": {0x000300f2, 0x01c00016, true, false},
	}
	got := map[string]row{}
	for _, e := range EKs() {
		attributes := binary.BigEndian.Uint32(tpm2.Marshal(e.Public)[4:8])
		got[e.Name] = row{attributes, e.Certificate, e.PolicyOR() != nil, e.IsRSA()}
		if want[e.Name] != got[e.Name] {
			t.Errorf("%s: %+v", e.Name, got[e.Name])
		}
		if again, ok := EKByName(e.Name); !ok || again.Certificate != e.Certificate {
			t.Errorf("%s is not found by its name", e.Name)
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d templates", len(got))
	}
	if _, ok := EKByName("ecc-p521-high"); ok {
		t.Error("the list is not closed")
	}
	// go-tpm has the two low ones.
	for name, public := range map[string]tpm2.TPMTPublic{"rsa-2048": tpm2.RSAEKTemplate, "ecc-p256": tpm2.ECCEKTemplate} {
		if e, _ := EKByName(name); !bytes.Equal(tpm2.Marshal(e.Public), tpm2.Marshal(public)) {
			t.Errorf("%s is not go-tpm's", name)
		}
	}
}

func TestAKIsExact(t *testing.T) {
	// A change here is a change of the protocol: every node would have another AK.
	want := "0023000b0005047200000010001800" + "0b00030010" +
		"0020" + hex.EncodeToString([]byte("kubelet-authenticator tpm/v1")) + "00000000" + "0020" + strings.Repeat("00", 32)
	if got := hex.EncodeToString(tpm2.Marshal(AK())); got != want {
		t.Errorf("AK template: %s", got)
	}
}

func newECC(t testing.TB, c elliptic.Curve) *ecdsa.PublicKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(c, rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return &key.PublicKey
}

func newRSA(t testing.TB, bits int) *rsa.PublicKey {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, bits)
	if err != nil {
		t.Fatal(err)
	}
	return &key.PublicKey
}

func TestEachTemplateTakesItsKeysOnly(t *testing.T) {
	p256, p384, rsa2048 := newECC(t, elliptic.P256()), newECC(t, elliptic.P384()), newRSA(t, 2048)
	//nolint:staticcheck // a point off the curve cannot be made otherwise
	off := &ecdsa.PublicKey{Curve: elliptic.P256(), X: p256.X, Y: new(big.Int).Xor(p256.Y, big.NewInt(1))}
	ed, _, _ := ed25519.GenerateKey(rand.Reader)
	keys := map[string]crypto.PublicKey{
		"p256": p256, "p384": p384, "rsa2048": rsa2048,
		"rsa3072": newRSA(t, 3072), "p521": newECC(t, elliptic.P521()), "off the curve": off, "ed25519": ed,
		"rsa exponent": &rsa.PublicKey{N: rsa2048.N, E: 3}, "nothing": nil,
	}
	takes := map[string][]string{
		"ecc-p256": {"p256"}, "ecc-p256-high": {"p256"}, "ecc-p384-high": {"p384"},
		"rsa-2048": {"rsa2048"}, "rsa-2048-high": {"rsa2048"},
	}
	for _, e := range EKs() {
		for name, key := range keys {
			area, err := e.PublicArea(key)
			if !slices.Contains(takes[e.Name], name) {
				var other *otherKeyError
				if !errors.As(err, &other) {
					t.Errorf("%s takes %s: %v", e.Name, name, err)
				}
				continue
			}
			if err != nil {
				t.Errorf("%s refuses %s: %v", e.Name, name, err)
				continue
			}
			made, back, err := CheckEK(tpm2.Marshal(area))
			if err != nil || made.Name != e.Name || !back.(interface{ Equal(crypto.PublicKey) bool }).Equal(key) {
				t.Errorf("%s of %s comes back as %s: %v", name, e.Name, made.Name, err)
			}
		}
	}
}

// anAK is a public area as a TPM would return it, after change.
func anAK(t testing.TB, change func(*tpm2.TPMTPublic)) []byte {
	t.Helper()
	area := AK()
	point, err := newECC(t, elliptic.P256()).Bytes()
	if err != nil {
		t.Fatal(err)
	}
	area.Unique = tpm2.NewTPMUPublicID(tpm2.TPMAlgECC, eccPoint(point[1:33], point[33:]))
	if change != nil {
		change(&area)
	}
	return tpm2.Marshal(area)
}

func TestCheckAKRefusesWhatIsNotTheTemplate(t *testing.T) {
	if _, err := CheckAK(anAK(t, nil)); err != nil {
		t.Fatal(err)
	}
	clear := func(set func(*tpm2.TPMAObject)) []byte {
		return anAK(t, func(p *tpm2.TPMTPublic) { set(&p.ObjectAttributes) })
	}
	e, _ := EKByName("ecc-p256")
	ek, err := e.PublicArea(newECC(t, elliptic.P256()))
	if err != nil {
		t.Fatal(err)
	}
	for name, public := range map[string][]byte{
		"may leave the TPM":    clear(func(a *tpm2.TPMAObject) { a.FixedTPM = false }),
		"may change parent":    clear(func(a *tpm2.TPMAObject) { a.FixedParent = false }),
		"made outside":         clear(func(a *tpm2.TPMAObject) { a.SensitiveDataOrigin = false }),
		"signs anything":       clear(func(a *tpm2.TPMAObject) { a.Restricted = false }),
		"subject to lockout":   clear(func(a *tpm2.TPMAObject) { a.NoDA = false }),
		"decrypts too":         clear(func(a *tpm2.TPMAObject) { a.Decrypt = true }),
		"policy for admin":     clear(func(a *tpm2.TPMAObject) { a.AdminWithPolicy = true }),
		"has a policy":         anAK(t, func(p *tpm2.TPMTPublic) { p.AuthPolicy.Buffer = make([]byte, 32) }),
		"other name algorithm": anAK(t, func(p *tpm2.TPMTPublic) { p.NameAlg = tpm2.TPMAlgSHA384 }),
		"the template itself":  tpm2.Marshal(AK()),
		"a point off": anAK(t, func(p *tpm2.TPMTPublic) {
			p.Unique = tpm2.NewTPMUPublicID(tpm2.TPMAlgECC, eccPoint([]byte{1}, []byte{1}))
		}),
		"a long coordinate":    anAK(t, func(p *tpm2.TPMTPublic) { u, _ := p.Unique.ECC(); u.X.Buffer = append([]byte{0}, u.X.Buffer...) }),
		"an EK":                tpm2.Marshal(ek),
		"a byte more":          append(anAK(t, nil), 0),
		"a byte less":          anAK(t, nil)[:87],
		"nothing":              nil,
		"too long":             make([]byte, maxPublic+1),
		"a reserved attribute": func() []byte { b := anAK(t, nil); b[4] |= 0x80; return b }(),
	} {
		if _, err := CheckAK(public); err == nil {
			t.Errorf("%s: taken as an AK", name)
		}
	}
	if _, _, err := CheckEK(anAK(t, nil)); err == nil {
		t.Error("an AK is taken as an EK")
	}
}

func TestCertifiedKey(t *testing.T) {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{SerialNumber: big.NewInt(1)}, &x509.Certificate{}, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	rsaEncryption := []byte{6, 9, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 1, 1}
	for name, c := range map[string]struct {
		last byte // of the algorithm identifier
		ok   bool
	}{"rsaEncryption": {1, true}, "id-RSAES-OAEP": {7, true}, "another": {99, false}} {
		changed := bytes.Replace(der, rsaEncryption, append(rsaEncryption[:10:10], c.last), 1)
		cert, err := x509.ParseCertificate(changed)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		got, err := CertifiedKey(cert)
		if (err == nil) != c.ok || c.ok && !key.PublicKey.Equal(got) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestNameIsAlgorithmAndHash(t *testing.T) {
	for _, e := range EKs() {
		public := tpm2.Marshal(e.Public)
		alg, id := crypto.SHA256, []byte{0, 0x0b}
		if e.Name == "ecc-p384-high" {
			alg, id = crypto.SHA384, []byte{0, 0x0c}
		}
		h := alg.New()
		h.Write(public)
		if got, err := Name(public); err != nil || !bytes.Equal(got, h.Sum(id)) {
			t.Errorf("%s: name %x, %v", e.Name, got, err)
		}
	}
	if _, err := Name(anAK(t, func(p *tpm2.TPMTPublic) { p.NameAlg = tpm2.TPMAlgSHA1 })); err == nil {
		t.Error("a SHA-1 name")
	}
}

// FuzzParse: no bytes make the parser panic, and what it takes has one encoding.
func FuzzParse(f *testing.F) {
	for _, e := range EKs() {
		f.Add(tpm2.Marshal(e.Public))
	}
	f.Add(anAK(f, nil))
	f.Add(tpm2.Marshal(tpm2.RSASRKTemplate))
	f.Fuzz(func(t *testing.T, data []byte) {
		area, err := Parse(data)
		if err != nil {
			return
		}
		if !bytes.Equal(tpm2.Marshal(area), data) {
			t.Fatal("another encoding")
		}
		_, _ = PublicKey(area)
		_, _ = Name(data)
		_, akErr := CheckAK(data)
		if _, _, err := CheckEK(data); err == nil && akErr == nil {
			t.Fatal("both an AK and an EK")
		}
	})
}
