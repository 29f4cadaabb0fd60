// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/ecdh"
	"crypto/elliptic"
	"crypto/hmac"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/sha512"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"hash"
	"io"
	"math/big"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

func TestVerifiedHelloAndProof(t *testing.T) {
	k := theKit()
	p := k.play(t, bend{policy: func(c *Config) {
		c.NamedEKs = true
		c.AllowedEKs = []Fingerprint{FingerprintOf(spkiOf(k.ekKeys["ecc-p256"]))}
	}, named: []Fingerprint{FingerprintOf(spkiOf(k.ekKeys["ecc-p256"]))}})
	claim, err := p.verifier.VerifyHello(p.hello, p.named, p.now)
	if err != nil {
		t.Fatal(err)
	}
	evidence, err := p.verifier.VerifyProof(p.proof, p.hello, p.named, p.now)
	if err != nil {
		t.Fatal(err)
	}
	if claim.SignerName != testSigner || !bytes.Equal(claim.AKName, nameOf(akPublic(&k.ak.PublicKey))) || !bytes.Equal(claim.AKName, evidence.AKName) {
		t.Errorf("claim: %+v", claim)
	}
	ek := evidence.EK
	if ek.template != "ecc-p256" || !bytes.Equal(ek.publicKey, spkiOf(k.ekKeys["ecc-p256"])) || ek.Fingerprint != sha256.Sum256(ek.publicKey) || ek.Fingerprint != claim.EK.Fingerprint {
		t.Errorf("EK: %+v", ek)
	}
	if !slices.Equal(ek.sources, []trustSource{trustAllowed, trustNamed, trustChain}) || !ek.chainVerified() {
		t.Errorf("sources: %v", ek.sources)
	}
	if c := ek.certificate; c == nil || c.manufacturer != "IFX" || c.model != "SLB9670" || c.version != "id:0D0B" || c.subject != "" ||
		c.issuer != "CN=Intermediate,O=Maker" || c.serial != "7" || !c.notAfter.Equal(testNow.AddDate(5, 0, 0)) {
		t.Errorf("certificate: %+v", c)
	}
	if evidence.Boot != (verifier.Boot{Resets: 12, Restarts: 3, Clock: 123456789, Safe: true}) || evidence.firmware != 0x0007003d_00000001 || evidence.keyID != "k1" ||
		!evidence.expires.Equal(testNow.Add(defaultChallengeLifetime)) || evidence.PCRBank != "sha256" || len(evidence.PCRs) != 3 || evidence.EventLogPCRs != nil {
		t.Errorf("evidence: %+v", evidence)
	}
	name, uid, err := p.verifier.HelloReference(p.proof)
	if err != nil || name != p.hello.Name || uid != p.hello.UID {
		t.Errorf("hello of the proof: %s, %s, %v", name, uid, err)
	}
	if _, _, err := p.verifier.HelloReference(p.hello); err == nil {
		t.Error("a hello refers to a hello")
	}
	if _, err := ClaimedEK(p.proof); err == nil {
		t.Error("a proof names an EK")
	}
	if got := p.verifier.Versions(); got.String() != "tpm/v1" {
		t.Errorf("versions: %s", got)
	}
	fingerprint, err := ClaimedEK(p.hello)
	if err != nil || fingerprint != ek.Fingerprint {
		t.Errorf("EK: %s, %v", fingerprint, err)
	}
}

// TestUnverifiedCertificateSaysNothing: what an EK is named for does not come from a certificate
// that nobody vouches for.
func TestUnverifiedCertificateSaysNothing(t *testing.T) {
	k := theKit()
	fingerprint := FingerprintOf(spkiOf(k.ekKeys["ecc-p256"]))
	p := k.play(t, bend{
		hello:  certificates(selfSigned(k.ecEKs["ecc-p256"])),
		policy: func(c *Config) { c.NamedEKs = true },
	})
	claim, err := p.verifier.VerifyHello(p.hello, []Fingerprint{fingerprint}, p.now)
	if err != nil {
		t.Fatal(err)
	}
	if claim.EK.certificate != nil || claim.EK.chainVerified() || !slices.Equal(claim.EK.sources, []trustSource{trustNamed}) {
		t.Errorf("EK: %+v", claim.EK)
	}
	// Without the name the same hello is refused, and the name is all that it lacks.
	_, err = p.verifier.VerifyHello(p.hello, nil, p.now)
	if !OnlyEKUntrusted(err) {
		t.Errorf("would a name cure it? %v", err)
	}
}

func TestOnlyEKUntrusted(t *testing.T) {
	contradicts := verifier.Refusals{{Reason: reasonEKUntrusted}, {Reason: reasonAKPoint}}
	for name, err := range map[string]error{"nil": nil, "another error": errors.New("x"), "empty": verifier.Refusals{}, "contradiction": contradicts} {
		if OnlyEKUntrusted(err) {
			t.Errorf("%s: cured", name)
		}
	}
}

func TestZeroValuesRefuse(t *testing.T) {
	p := theKit().play(t, bend{})
	v := &Verifier{}
	if _, err := v.VerifyHello(p.hello, nil, p.now); err == nil {
		t.Error("a hello")
	}
	if _, err := v.VerifyProof(p.proof, p.hello, nil, p.now); err == nil {
		t.Error("a proof")
	}
	if _, err := p.verifier.VerifyHello(Request{}, nil, p.now); err == nil {
		t.Error("an empty hello")
	}
	if _, err := p.verifier.VerifyProof(Request{}, Request{}, nil, p.now); err == nil {
		t.Error("an empty proof")
	}
	if _, err := p.verifier.VerifyHello(p.hello, nil, time.Time{}); err == nil {
		t.Error("a hello at no time")
	}
	if _, err := p.verifier.VerifyProof(p.proof, p.hello, nil, time.Time{}); err == nil {
		t.Error("a proof at no time")
	}
	claim, err := p.verifier.VerifyHello(p.hello, nil, p.now)
	if err != nil {
		t.Fatal(err)
	}
	other := theKit().play(t, bend{})
	for name, f := range map[string]func() (*attestation.Challenge, error){
		"no claim": func() (*attestation.Challenge, error) { return p.verifier.Challenge(rand.Reader, nil, p.now) },
		"an empty claim": func() (*attestation.Challenge, error) {
			return p.verifier.Challenge(rand.Reader, &VerifiedHello{}, p.now)
		},
		"another verifier's": func() (*attestation.Challenge, error) { return other.verifier.Challenge(rand.Reader, claim, p.now) },
		"no time":            func() (*attestation.Challenge, error) { return p.verifier.Challenge(rand.Reader, claim, time.Time{}) },
	} {
		if _, err := f(); err == nil {
			t.Errorf("challenge: %s", name)
		}
	}
}

func TestNewRefuses(t *testing.T) {
	k := theKit()
	if _, err := New(k.config()); err != nil {
		t.Fatal(err)
	}
	leaf := must(x509.ParseCertificate(k.intermediate.issue(k.ekKeys["ecc-p256"], nil)))
	for name, change := range map[string]func(*Config){
		"nothing":                   func(c *Config) { *c = Config{} },
		"no trust":                  func(c *Config) { c.Roots, c.Intermediates = nil, nil },
		"denials only":              func(c *Config) { c.Roots, c.Intermediates, c.DeniedEKs = nil, nil, []Fingerprint{{1}} },
		"intermediates only":        func(c *Config) { c.Roots, c.NamedEKs = nil, true },
		"nil root":                  func(c *Config) { c.Roots = []*x509.Certificate{nil} },
		"a leaf as root":            func(c *Config) { c.Roots = []*x509.Certificate{leaf} },
		"a leaf as intermediate":    func(c *Config) { c.Intermediates = append(c.Intermediates, leaf) },
		"an unparsed root":          func(c *Config) { c.Roots = []*x509.Certificate{{IsCA: true, BasicConstraintsValid: true}} },
		"empty fingerprint allowed": func(c *Config) { c.AllowedEKs = []Fingerprint{{}} },
		"empty fingerprint denied":  func(c *Config) { c.DeniedEKs = []Fingerprint{{}} },
		"no PCRs":                   func(c *Config) { c.PCRs = attestation.PCRSelection{} },
		"SHA-1":                     func(c *Config) { c.PCRs.Bank = "sha1" },
		"PCR 24":                    func(c *Config) { c.PCRs.Indexes = []int{24} },
		"PCR twice":                 func(c *Config) { c.PCRs.Indexes = []int{0, 0} },
		"value of a PCR not wanted": func(c *Config) { c.PCRValues = map[int][][]byte{1: {make([]byte, 32)}} },
		"no value allowed":          func(c *Config) { c.PCRValues = map[int][][]byte{0: nil} },
		"value of another bank":     func(c *Config) { c.PCRValues = map[int][][]byte{0: {make([]byte, 48)}} },
		"event log of other PCRs":   func(c *Config) { c.EventLog, c.PCRs.Indexes = true, []int{8, 14} },
		"firmware of nobody":        func(c *Config) { c.MinimumFirmware = map[string]uint64{"": 1} },
		"firmware of a padded name": func(c *Config) { c.MinimumFirmware = map[string]uint64{"STM ": 1} },
		"versions without ours":     func(c *Config) { c.Versions = attestation.Versions{"tpm/v2"} },
		"versions out of order":     func(c *Config) { c.Versions = attestation.Versions{"tpm/v1", "tpm/v2"} },
		"no cluster":                func(c *Config) { c.ClusterUID = "" },
		"no keys":                   func(c *Config) { c.Keys = Keys{} },
		"no current key":            func(c *Config) { c.Keys.Current = "" },
		"unknown current key":       func(c *Config) { c.Keys.Current = "k9" },
		"short key":                 func(c *Config) { c.Keys.ByID["k0"] = make([]byte, 31) },
		"key of zeros":              func(c *Config) { c.Keys.ByID["k0"] = make([]byte, 32) },
		"empty key":                 func(c *Config) { c.Keys.ByID["k0"] = nil },
		"negative lifetime":         func(c *Config) { c.ChallengeLifetime = -time.Second },
		"endless lifetime":          func(c *Config) { c.ChallengeLifetime = 24 * time.Hour },
	} {
		t.Run(name, func(t *testing.T) {
			c := k.config()
			change(&c)
			if v, err := New(c); err == nil || v != nil {
				t.Error("accepted")
			} else if strings.Contains(err.Error(), string(k.key)) {
				t.Error("the error holds a key")
			}
		})
	}
}

// TestNewCopies: nothing that a caller does afterwards changes the policy.
func TestNewCopies(t *testing.T) {
	k := theKit()
	p := k.play(t, bend{})
	c := k.config()
	key := bytes.Clone(k.key)
	c.Keys.ByID = map[string][]byte{"k1": key}
	c.PCRValues = map[int][][]byte{0: {testPCRs()[0].Value}}
	v, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	clear(key)
	clear(c.PCRValues[0][0])
	c.PCRs.Indexes[0] = 9
	delete(c.Keys.ByID, "k1")
	if _, err := v.VerifyProof(p.proof, p.hello, nil, p.now); err != nil {
		t.Error(err)
	}
}

func TestFingerprint(t *testing.T) {
	f := FingerprintOf([]byte("x"))
	if back, err := ParseFingerprint(f.String()); err != nil || back != f {
		t.Errorf("%s: %v", back, err)
	}
	for _, s := range []string{"", "00", strings.ToUpper(f.String()), f.String() + "00", f.String()[1:] + "x", " " + f.String()} {
		if _, err := ParseFingerprint(s); err == nil {
			t.Errorf("%q is taken", s)
		}
	}
}

func TestEveryReasonIsExplained(t *testing.T) {
	pattern := regexp.MustCompile(`^(Attestation[A-Za-z0-9]+|UnsupportedAttestationVersion)$`)
	if len(reasonMeanings()) < 40 {
		t.Errorf("%d reasons", len(reasonMeanings()))
	}
	for reason, meaning := range reasonMeanings() {
		if !pattern.MatchString(string(reason)) || meaning == "" {
			t.Errorf("%s: %q", reason, meaning)
		}
	}
}

func TestBootBefore(t *testing.T) {
	now := verifier.Boot{Resets: 5, Restarts: 2, Clock: 1000, Safe: true}
	for name, c := range map[string]struct {
		b    verifier.Boot
		want bool
	}{
		"the same":                      {now, false},
		"later":                         {verifier.Boot{Resets: 5, Restarts: 2, Clock: 1001, Safe: true}, false},
		"after a restart":               {verifier.Boot{Resets: 5, Restarts: 3, Clock: 900, Safe: false}, false},
		"after a reset":                 {verifier.Boot{Resets: 6, Restarts: 0, Clock: 900, Safe: false}, false},
		"clock went back":               {verifier.Boot{Resets: 5, Restarts: 2, Clock: 999, Safe: true}, true},
		"restarts went back":            {verifier.Boot{Resets: 5, Restarts: 1, Clock: 2000, Safe: true}, true},
		"resets went back":              {verifier.Boot{Resets: 4, Restarts: 9, Clock: 2000, Safe: true}, true},
		"cleared":                       {verifier.Boot{}, true},
		"safe or not is no order":       {verifier.Boot{Resets: 5, Restarts: 2, Clock: 1000, Safe: false}, false},
		"a snapshot of the same boot":   {verifier.Boot{Resets: 5, Restarts: 2, Clock: 10, Safe: true}, true},
		"a counter that ran over is so": {verifier.Boot{Resets: 0, Restarts: 2, Clock: 1000, Safe: true}, true},
	} {
		if got := c.b.Before(now); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestROCA(t *testing.T) {
	if !isROCA(rocaKey().N) {
		t.Error("a key of the faulty library is not recognised")
	}
	for _, n := range []*big.Int{rsa2048().N, big.NewInt(0), new(big.Int).Add(rocaKey().N, big.NewInt(2))} {
		if isROCA(n) {
			t.Errorf("taken for one: %d bits", n.BitLen())
		}
	}
}

func TestMakerIDs(t *testing.T) {
	for in, want := range map[string]string{
		"id:49465800": "IFX", "id:53544D20": "STM", "id:53544d20": "STM", "id:494E5443": "INTC", "id:00001014": "00001014", "id:414d4400": "AMD",
		"id:00000000": "00000000", "id:49460A00": "49460a00", "id:20202020": "20202020",
	} {
		if got, err := parseManufacturer(in); err != nil || got != want {
			t.Errorf("%s: %q, %v", in, got, err)
		}
	}
}

// TestPure: what judges has no way out, no clock and no randomness of its own.
func TestPure(t *testing.T) {
	out, err := exec.Command("go", "list", "-f", `{{join .Imports "\n"}}`, ".", "..", "../../csr/state").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range strings.Fields(string(out)) {
		// The rules judge the API's own types, and names by the API's own syntax.
		allowed := []string{"github.com/google/go-tpm/tpm2", "golang.org/x/crypto/cryptobyte", "golang.org/x/crypto/cryptobyte/asn1", "k8s.io/api/certificates/v1", "k8s.io/api/core/v1", "k8s.io/apimachinery/pkg/util/validation"}
		for _, ours := range []string{"attestation", "csr/state", "tpm/template", "verifier"} {
			allowed = append(allowed, "github.com/kubelet-authenticator/kubelet-authenticator/pkg/"+ours)
		}
		std := !strings.Contains(path, ".") && !slices.Contains([]string{"os", "net", "syscall", "crypto/rand", "log", "io/fs"}, path)
		if !std && !slices.Contains(allowed, path) {
			t.Errorf("imports %s", path)
		}
	}
}

// kdfa is KDFa (TPM 2.0 Part 1, "Key Derivation Function"), and kdfe KDFe for one block.
func kdfa(h func() hash.Hash, key []byte, label string, context []byte, bits uint32) []byte {
	var out []byte
	for i := uint32(1); len(out) < int(bits/8); i++ {
		m := hmac.New(h, key)
		m.Write(binary.BigEndian.AppendUint32(nil, i))
		m.Write(append([]byte(label), 0))
		m.Write(context)
		m.Write(binary.BigEndian.AppendUint32(nil, bits))
		out = m.Sum(out)
	}
	return out[:bits/8]
}

func kdfe(h func() hash.Hash, z []byte, label string, u, v []byte) []byte {
	d := h()
	d.Write(slices.Concat([]byte{0, 0, 0, 1}, z, []byte(label), []byte{0}, u, v))
	return d.Sum(nil)
}

func unsize(t *testing.T, b []byte) (first, rest []byte) {
	t.Helper()
	if len(b) < 2 || len(b) < 2+int(binary.BigEndian.Uint16(b)) {
		t.Fatalf("no TPM2B: %x", b)
	}
	n := 2 + int(binary.BigEndian.Uint16(b))
	return b[2:n], b[n:]
}

func whole(t *testing.T, b []byte) []byte {
	t.Helper()
	first, rest := unsize(t, b)
	if len(rest) != 0 {
		t.Fatal("bytes after a TPM2B")
	}
	return first
}

// TestChallengeOpens opens a challenge as a TPM does (TPM 2.0 Part 1, "Credential Protection"), for
// each EK template. Its code shares nothing with the product. A proof with the resulting secret
// must be accepted.
func TestChallengeOpens(t *testing.T) {
	k := theKit()
	for _, e := range template.EKs() {
		t.Run(e.Name, func(t *testing.T) {
			p := k.play(t, bend{ek: e.Name, policy: func(c *Config) { c.EventLog = true }})
			claim, err := p.verifier.VerifyHello(p.hello, nil, p.now)
			if err != nil {
				t.Fatal(err)
			}
			// A source that gives a byte at a time must not shorten the seed.
			c, err := p.verifier.Challenge(iotest.OneByteReader(rand.Reader), claim, testNow)
			if err != nil {
				t.Fatal(err)
			}
			if c.KeyID != "k1" || c.Expires != testNow.Add(defaultChallengeLifetime).Unix() || c.PCRs.Bank != "sha256" || !slices.Equal(c.PCRs.Indexes, []int{0, 4, 7}) || !c.EventLog {
				t.Errorf("challenge: %+v", c)
			}
			if back, err := attestation.ParseChallenge(must(c.Marshal())); err != nil || back.KeyID != c.KeyID {
				t.Errorf("does not survive the wire: %v", err)
			}
			h, aesBits := sha256.New, uint32(128)
			if e.Name == "ecc-p384-high" {
				h, aesBits = sha512.New384, 256
			}
			encrypted := whole(t, c.EncryptedSecret)
			var seed []byte
			if e.IsRSA() {
				seed, err = rsa.DecryptOAEP(h(), nil, rsa2048(), encrypted, []byte("IDENTITY\x00"))
				if err != nil {
					t.Fatal(err)
				}
			} else {
				x, rest := unsize(t, encrypted)
				y := whole(t, rest)
				curve := ecdh.P256()
				if k.ecEKs[e.Name].Curve == elliptic.P384() {
					curve = ecdh.P384()
				}
				peer := must(curve.NewPublicKey(slices.Concat([]byte{4}, x, y)))
				private := must(k.ecEKs[e.Name].ECDH())
				own := private.PublicKey().Bytes()
				seed = kdfe(h, must(private.ECDH(peer)), "IDENTITY", x, own[1:1+len(x)])
			}
			name := nameOf(akPublic(&k.ak.PublicKey))
			mac, identity := unsize(t, whole(t, c.CredentialBlob))
			m := hmac.New(h, kdfa(h, seed, "INTEGRITY", nil, uint32(h().Size())*8))
			m.Write(identity)
			m.Write(name)
			if !hmac.Equal(m.Sum(nil), mac) {
				t.Fatal("the outer MAC is wrong")
			}
			block := must(aes.NewCipher(kdfa(h, seed, "STORAGE", name, aesBits)))
			cipher.NewCFBDecrypter(block, make([]byte, 16)).XORKeyStream(identity, identity) //nolint:staticcheck // the TPM's mode
			secret := whole(t, identity)

			want := must(attestation.Secret(k.key, p.hello.UID, attestation.SecretInfo{
				Version: "tpm/v1", ClusterUID: testCluster, SignerName: testSigner, EKPublicKey: claim.EK.publicKey, AKName: name,
				HelloRequest: p.hello.Request, Expires: c.Expires, PCRs: c.PCRs,
			}))
			if !bytes.Equal(secret, want) {
				t.Error("another secret is inside")
			}
			// Two challenges hide the same secret differently.
			again, err := p.verifier.Challenge(rand.Reader, claim, testNow)
			if err != nil || bytes.Equal(again.EncryptedSecret, c.EncryptedSecret) {
				t.Errorf("the seed repeats: %v", err)
			}
		})
	}
	p := k.play(t, bend{ek: "rsa-2048"})
	claim, err := p.verifier.VerifyHello(p.hello, nil, p.now)
	if err != nil {
		t.Fatal(err)
	}
	for _, source := range []io.Reader{strings.NewReader(""), strings.NewReader("short"), iotest.ErrReader(io.ErrClosedPipe)} {
		if _, err := p.verifier.Challenge(source, claim, testNow); err == nil {
			t.Error("a challenge without randomness")
		}
	}
}

func BenchmarkHelloAndProof(b *testing.B) {
	for _, ek := range []string{"ecc-p256", "rsa-2048"} {
		p := theKit().play(b, bend{ek: ek})
		b.Run("hello "+ek, func(b *testing.B) {
			for b.Loop() {
				if _, err := p.verifier.VerifyHello(p.hello, nil, p.now); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run("proof "+ek, func(b *testing.B) {
			for b.Loop() {
				if _, err := p.verifier.VerifyProof(p.proof, p.hello, nil, p.now); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
