// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"bytes"
	"compress/zlib"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"math/big"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
)

func allEKs(t *TPM) ([]EK, error) { return t.EKs("") }

func TestChooseEK(t *testing.T) {
	for name, c := range map[string]struct {
		o          swtpm.Options
		remembered string
		want       string
		certified  bool
		slow       bool
		all        []string
	}{
		"nothing":   {swtpm.Options{}, "", "ecc-p256", false, false, []string{"ecc-p256"}},
		"RSA alone": {swtpm.Options{Certified: []string{"rsa-2048"}}, "", "rsa-2048", true, true, []string{"rsa-2048"}},
		"RSA, persistent": {swtpm.Options{Certified: []string{"rsa-2048"}, Persistent: []string{"rsa-2048"}}, "", "rsa-2048", true, false,
			[]string{"rsa-2048"}},
		"another key is persistent": {swtpm.Options{Certified: []string{"rsa-2048-high"}, Persistent: []string{"ecc-p256", "rsa-2048"}}, "",
			"rsa-2048-high", true, true, []string{"rsa-2048-high"}},
		"RSA and ECC": {swtpm.Options{Certified: []string{"rsa-2048", "ecc-p256"}}, "", "ecc-p256", true, false, []string{"ecc-p256", "rsa-2048"}},
		"as swtpm has them": {swtpm.Options{Certified: []string{"rsa-2048", "ecc-p384-high"}}, "", "ecc-p384-high", true, false,
			[]string{"ecc-p384-high", "rsa-2048"}},
		"remembered": {swtpm.Options{Certified: []string{"rsa-2048", "ecc-p256"}}, "rsa-2048", "rsa-2048", true, true,
			[]string{"ecc-p256", "rsa-2048"}},
		"remembered, without certificate": {swtpm.Options{Certified: []string{"ecc-p256"}}, "ecc-p384-high", "ecc-p384-high", false, false,
			[]string{"ecc-p256"}},
		"remembered, unknown now": {swtpm.Options{Certified: []string{"rsa-2048"}}, "ecc-p521-high", "rsa-2048", true, true, []string{"rsa-2048"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tpm := swtpm.Start(t, c.o)
			k := with(t, tpm.Socket(), hello(c.remembered))
			if k.ek.Template != c.want || (len(k.ek.Certificates) > 0) != c.certified || k.ek.Slow != c.slow || k.ek.Problem != "" {
				t.Errorf("chose %s, %d certificates, slow %v, %q", k.ek.Template, len(k.ek.Certificates), k.ek.Slow, k.ek.Problem)
			}
			made, err := tpm.EK(c.want)
			if err != nil || !bytes.Equal(tpm2.Marshal(made), k.ek.Public) {
				t.Errorf("not the key that the TPM makes: %v", err)
			}
			var all []string
			for _, ek := range with(t, tpm.Socket(), allEKs) {
				all = append(all, ek.Template)
			}
			if !slices.Equal(all, c.all) {
				t.Errorf("has %v", all)
			}
			ch := challenge(t, k)
			checkQuote(t, k, ch, with(t, tpm.Socket(), prove(ch)))
			nothingLoaded(t, tpm)
		})
	}
}

// The list of templates has none for RSA-3072. A chip with only such a certificate (H-6 of the
// profile) counts as a chip without certificates.
func TestCertificateOfNoTemplate(t *testing.T) {
	t.Parallel()
	key, err := rsa.GenerateKey(rand.Reader, 3072)
	if err != nil {
		t.Fatal(err)
	}
	unsigned := &x509.Certificate{SerialNumber: big.NewInt(1)}
	certificate, err := x509.CreateCertificate(rand.Reader, unsigned, unsigned, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	chip := swtpm.Start(t, swtpm.Options{})
	if err := chip.WriteNV(0x01c0001c, certificate); err != nil {
		t.Fatal(err)
	}
	k := with(t, chip.Socket(), hello(""))
	if k.ek.Template != "ecc-p256" || len(k.ek.Certificates) > 0 || k.ek.Problem != "" {
		t.Errorf("chose %s, %d certificates, %q", k.ek.Template, len(k.ek.Certificates), k.ek.Problem)
	}
}

// A chip without a curve says so when asked to make a key on it.
func TestRefusedTemplatesArePassedOver(t *testing.T) {
	t.Parallel()
	const noCurve = tpm2.TPMRCCurve | 0x40 | 0x200 // parameter 2
	tpm := swtpm.Start(t, swtpm.Options{})
	p := swtpm.NewProxy(t, tpm)
	p.Answer(tpm2.TPMCCCreatePrimary, noCurve, 3)
	if k := with(t, p.Socket(), hello("")); k.ek.Template != "rsa-2048" {
		t.Errorf("chose %s", k.ek.Template)
	}
	p.Reset()
	p.Answer(tpm2.TPMCCCreatePrimary, noCurve, 100)
	if _, err := Run(t.Context(), Options{Device: p.Socket(), LockDir: t.TempDir()}, hello("")); !errors.Is(err, tpm2.TPMRCCurve) {
		t.Errorf("makes no key: %v", err)
	}
	p.Reset()
	// the endorsement hierarchy is switched off
	p.Answer(tpm2.TPMCCCreatePrimary, tpm2.TPMRCHierarchy|0x100, 100)
	if _, err := Run(t.Context(), Options{Device: p.Socket(), LockDir: t.TempDir()}, hello("")); !errors.Is(err, tpm2.TPMRCHierarchy) ||
		p.Count(tpm2.TPMCCCreatePrimary) != 1 {
		t.Errorf("%d tries: %v", p.Count(tpm2.TPMCCCreatePrimary), err)
	}
}

func TestCertificatesAsChipsHoldThem(t *testing.T) {
	for name, o := range map[string]swtpm.Options{
		"bare":                       {},
		"padded with zeros":          {Padding: make([]byte, 400)},
		"padded with ones":           {Padding: bytes.Repeat([]byte{0xff}, 400)},
		"more than a read":           {Padding: make([]byte, 1200)},
		"wrapped":                    {Wrapped: true},
		"wrapped, padded":            {Wrapped: true, Padding: make([]byte, 99)},
		"with the chain":             {Chain: true},
		"padded, with the chain":     {Chain: true, Padding: bytes.Repeat([]byte{0xff}, 10)},
		"compressed":                 {Compressed: true},
		"compressed, padded":         {Compressed: true, Padding: make([]byte, 50)},
		"compressed, wrapped":        {Compressed: true, Wrapped: true, Chain: true},
		"made by swtpm_setup itself": {Setup: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o.Certified = []string{"ecc-p384-high"}
			tpm := swtpm.Start(t, o)
			ek := with(t, tpm.Socket(), hello("")).ek
			want := 1
			if o.Chain {
				want = 2
			}
			if ek.Problem != "" || ek.Template != "ecc-p384-high" || len(ek.Certificates) != want {
				t.Fatalf("%s: %d certificates, %q", ek.Template, len(ek.Certificates), ek.Problem)
			}
			if o.Chain && !bytes.Equal(ek.Certificates[1], tpm.CA.Intermediate.Raw) {
				t.Error("another chain")
			}
			if der, err := trimCertificate(ek.Certificates[0]); err != nil || !bytes.Equal(der, ek.Certificates[0]) {
				t.Errorf("not trimmed: %v", err)
			}
		})
	}
}

// The chain may be cut anywhere between its indices.
func TestChainOverSeveralIndices(t *testing.T) {
	t.Parallel()
	tpm := swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256"}})
	both := slices.Concat(tpm.CA.Intermediate.Raw, tpm.CA.Root.Raw)
	for i, part := range [][]byte{both[:100], both[100:600], both[600:]} {
		if err := tpm.WriteNV(uint32(firstChain)+uint32(i), part); err != nil {
			t.Fatal(err)
		}
	}
	got := with(t, tpm.Socket(), hello("")).ek.Certificates
	if len(got) != 3 || !bytes.Equal(got[1], tpm.CA.Intermediate.Raw) || !bytes.Equal(got[2], tpm.CA.Root.Raw) {
		t.Errorf("%d certificates", len(got))
	}
}

func TestWhatIsNotTheEKsCertificateIsLeftOut(t *testing.T) {
	stranger, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	ca, err := swtpm.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	ofStranger, err := ca.Issue(stranger.Public(), nil)
	if err != nil {
		t.Fatal(err)
	}
	e, _ := template.EKByName("ecc-p256")
	for name, change := range map[string]func(*swtpm.TPM) error{
		"garbage":         func(tpm *swtpm.TPM) error { return tpm.WriteNV(e.Certificate, []byte("garbage")) },
		"zeros":           func(tpm *swtpm.TPM) error { return tpm.WriteNV(e.Certificate, make([]byte, 500)) },
		"other DER":       func(tpm *swtpm.TPM) error { return tpm.WriteNV(e.Certificate, []byte{0x30, 3, 2, 1, 1}) },
		"a stranger's":    func(tpm *swtpm.TPM) error { return tpm.WriteNV(e.Certificate, ofStranger) },
		"of a former EPS": (*swtpm.TPM).ChangeEPS,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tpm := swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256"}})
			if err := change(tpm); err != nil {
				t.Fatal(err)
			}
			eks := with(t, tpm.Socket(), allEKs)
			if len(eks) != 1 || len(eks[0].Certificates) != 0 || !strings.HasPrefix(eks[0].Problem, "NV index 0x01c0000a: ") {
				t.Errorf("%+v", eks)
			}
			k := with(t, tpm.Socket(), hello(""))
			c := challenge(t, k)
			checkQuote(t, k, c, with(t, tpm.Socket(), prove(c)))
		})
	}
}

func TestOtherKeys(t *testing.T) {
	t.Parallel()
	certified := []string{"ecc-p256", "rsa-2048"}
	tpm, other := swtpm.Start(t, swtpm.Options{Certified: certified}), swtpm.Start(t, swtpm.Options{Certified: certified})
	for _, name := range certified {
		ours, theirs := with(t, tpm.Socket(), hello(name)), with(t, other.Socket(), hello(name))
		good, forThem := challenge(t, ours), challenge(t, theirs)
		forOtherAK := challenge(t, keys{ours.ek, theirs.ak})
		forOtherEK := challenge(t, keys{theirs.ek, ours.ak})
		for what, c := range map[string]Challenge{
			"another node's":     forThem,
			"another AK's blob":  {name, good.EKPublic, good.AKPublic, forOtherAK.CredentialBlob, forOtherAK.EncryptedSecret, good.PCRBank, pcrs},
			"another EK's blob":  {name, good.EKPublic, good.AKPublic, forOtherEK.CredentialBlob, forOtherEK.EncryptedSecret, good.PCRBank, pcrs},
			"another EK":         {name, forThem.EKPublic, good.AKPublic, good.CredentialBlob, good.EncryptedSecret, good.PCRBank, pcrs},
			"another AK":         {name, good.EKPublic, forThem.AKPublic, good.CredentialBlob, good.EncryptedSecret, good.PCRBank, pcrs},
			"two halves":         {name, good.EKPublic, good.AKPublic, good.CredentialBlob, challenge(t, ours).EncryptedSecret, good.PCRBank, pcrs},
			"a blob changed":     {name, good.EKPublic, good.AKPublic, flipped(good.CredentialBlob, 20), good.EncryptedSecret, good.PCRBank, pcrs},
			"a template changed": {"ecc-p384-high", good.EKPublic, good.AKPublic, good.CredentialBlob, good.EncryptedSecret, good.PCRBank, pcrs},
		} {
			_, err := Run(t.Context(), Options{Device: tpm.Socket(), LockDir: t.TempDir()}, prove(c))
			if !errors.Is(err, ErrOtherKeys) {
				t.Errorf("%s, %s: %v", name, what, err)
			}
			nothingLoaded(t, tpm)
		}
	}
	k := with(t, tpm.Socket(), hello(""))
	c := challenge(t, k)
	if err := tpm.ChangeEPS(); err != nil {
		t.Fatal(err)
	}
	if _, err := Run(t.Context(), Options{Device: tpm.Socket(), LockDir: t.TempDir()}, prove(c)); !errors.Is(err, ErrOtherKeys) {
		t.Errorf("after TPM2_ChangeEPS: %v", err)
	}
}

func flipped(b []byte, at int) []byte {
	b = bytes.Clone(b)
	b[at] ^= 1
	return b
}

// Nothing malformed reaches the TPM.
func TestMalformedChallenges(t *testing.T) {
	t.Parallel()
	tpm := swtpm.Start(t, swtpm.Options{})
	p := swtpm.NewProxy(t, tpm)
	good := challenge(t, with(t, tpm.Socket(), hello("")))
	for name, change := range map[string]func(*Challenge){
		"unknown template":    func(c *Challenge) { c.EKTemplate = "x" },
		"no blob":             func(c *Challenge) { c.CredentialBlob = nil },
		"a byte more":         func(c *Challenge) { c.CredentialBlob = append(c.CredentialBlob, 0) },
		"a byte less":         func(c *Challenge) { c.EncryptedSecret = c.EncryptedSecret[:len(c.EncryptedSecret)-1] },
		"huge":                func(c *Challenge) { c.EncryptedSecret = make([]byte, maxSized+1) },
		"SHA-1":               func(c *Challenge) { c.PCRBank = tpm2.TPMAlgSHA1 },
		"no bank":             func(c *Challenge) { c.PCRBank = 0 },
		"no PCR":              func(c *Challenge) { c.PCRs = nil },
		"a PCR twice":         func(c *Challenge) { c.PCRs = []int{1, 1} },
		"a PCR too many":      func(c *Challenge) { c.PCRs = []int{24} },
		"a PCR less than any": func(c *Challenge) { c.PCRs = []int{-1} },
	} {
		c := good
		c.CredentialBlob, c.EncryptedSecret = bytes.Clone(c.CredentialBlob), bytes.Clone(c.EncryptedSecret)
		change(&c)
		_, err := Run(t.Context(), Options{Device: p.Socket(), LockDir: t.TempDir()}, prove(c))
		var malformed *challengeError
		if !errors.As(err, &malformed) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if n := p.Count(); n > 0 {
		t.Errorf("%d commands", n)
	}
}

func TestBankThatIsNotKept(t *testing.T) {
	t.Parallel()
	tpm := swtpm.Start(t, swtpm.Options{Setup: true}) // with SHA-256 alone
	c := challenge(t, with(t, tpm.Socket(), hello("")))
	c.PCRBank = tpm2.TPMAlgSHA384
	_, err := Run(t.Context(), Options{Device: tpm.Socket(), LockDir: t.TempDir()}, prove(c))
	var bank *BankError
	if !errors.As(err, &bank) || bank.Bank != tpm2.TPMAlgSHA384 || bank.PCR != 0 {
		t.Errorf("%v", err)
	}
	nothingLoaded(t, tpm)
}

// A PCR that is extended between quote and reading makes another quote necessary.
func TestPCRsThatChange(t *testing.T) {
	t.Parallel()
	tpm := swtpm.Start(t, swtpm.Options{})
	p := swtpm.NewProxy(t, tpm)
	k := with(t, p.Socket(), hello(""))
	c := challenge(t, k)
	for name, times := range map[string]int{"once": 1, "for ever": 1000} {
		p.Reset()
		p.Delay(250*time.Millisecond, tpm2.TPMCCPCRRead)
		stop, stopped := make(chan struct{}), make(chan struct{})
		go func() { // extends after each quote
			defer close(stopped)
			for extended := 0; extended < times; time.Sleep(time.Millisecond) {
				select {
				case <-stop:
					return
				default:
				}
				if answered := slices.DeleteFunc(p.Exchanges(), func(x swtpm.Exchange) bool {
					return x.Code != tpm2.TPMCCQuote || x.Response == nil
				}); len(answered) > extended {
					extended = len(answered)
					if err := tpm.Extend(16, []byte("x")); err != nil {
						t.Error(err)
					}
				}
			}
		}()
		q, err := Run(t.Context(), Options{Device: p.Socket(), LockDir: t.TempDir()}, prove(c))
		close(stop)
		<-stopped
		quotes := p.Count(tpm2.TPMCCQuote)
		switch {
		case times == 1 && (err != nil || quotes != 2):
			t.Errorf("%s: %d quotes, %v", name, quotes, err)
		case times == 1:
			checkQuote(t, k, c, q)
		case err == nil || quotes != maxQuotes:
			t.Errorf("%s: %d quotes, %v", name, quotes, err)
		}
		nothingLoaded(t, tpm)
	}
}

func FuzzTrimCertificate(f *testing.F) {
	ca, err := swtpm.NewCA()
	if err != nil {
		f.Fatal(err)
	}
	der := ca.Root.Raw
	f.Add(der)
	f.Add(append(bytes.Clone(der), 0, 0, 0xff))
	f.Add(append([]byte{0x10, 0x01, 0x00, byte(len(der) >> 8), byte(len(der))}, der...))
	f.Add(append([]byte{0x10, 0x01, 0x00, byte((len(der) + 2) >> 8), byte(len(der) + 2), 0x10, 0x02}, der...))
	f.Add([]byte{0x10, 0x01, 0x00, 0xff, 0xff})
	f.Add([]byte{0x30, 0x80, 0, 0})
	f.Add(deflated(f, der))
	f.Add(append([]byte{0x10, 0x01, 0x00, 0, 9, 0x78, 0x9c}, deflated(f, der)...))
	f.Add(deflated(f, slices.Concat(der, der, make([]byte, maxInflated))))
	f.Fuzz(func(t *testing.T, nv []byte) {
		if der, err := trimCertificate(nv); err == nil {
			if len(der) > max(len(nv), maxInflated) || !bytes.Contains(nv, der) && !bytes.Contains(nv, []byte{0x78}) {
				t.Fatal("not in there")
			}
			if again, err := trimCertificate(der); err != nil || !bytes.Equal(again, der) {
				t.Fatalf("trimmed twice it is another: %v", err)
			}
		}
		total := 0
		chain := splitChain(nv)
		for _, der := range chain {
			total += len(der)
		}
		if len(chain) > maxChain || total > maxChain*max(len(nv), maxInflated) || total > len(nv) && !bytes.Contains(nv, []byte{0x78}) {
			t.Fatal("more than there is")
		}
	})
}

// deflated compresses as zlib does.
func deflated(t testing.TB, data []byte) []byte {
	t.Helper()
	var compressed bytes.Buffer
	w := zlib.NewWriter(&compressed)
	_, err := w.Write(data)
	if err = errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	return compressed.Bytes()
}

// A compressed certificate is read whole, or the reason is named.
func TestCompressedCertificates(t *testing.T) {
	t.Parallel()
	ca, err := swtpm.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	der := ca.Root.Raw
	good := deflated(t, der)
	for name, level := range map[string]int{"fastest": zlib.BestSpeed, "smallest": zlib.BestCompression, "stored": zlib.NoCompression} {
		var compressed bytes.Buffer
		w, err := zlib.NewWriterLevel(&compressed, level)
		if err == nil {
			_, err = w.Write(der)
		}
		if err = errors.Join(err, w.Close()); err != nil {
			t.Fatal(err)
		}
		if got, err := trimCertificate(append(compressed.Bytes(), 0xff, 0xff)); err != nil || !bytes.Equal(got, der) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, c := range map[string]struct {
		nv   []byte
		says string
	}{
		"cut":           {good[:len(good)-5], "does not inflate"},
		"changed":       {flipped(good, len(good)-1), "does not inflate"}, // its checksum
		"a bomb":        {deflated(t, make([]byte, 100*maxInflated)), "longer than 65536 bytes"},
		"twice":         {deflated(t, good), "not DER"},
		"no DER":        {deflated(t, []byte("x")), "not DER"},
		"a dictionary":  {append([]byte{0x78, 0xbb}, good[2:]...), "not DER"},
		"another check": {append([]byte{0x78, 0x9d}, good[2:]...), "not DER"},
	} {
		if _, err := trimCertificate(c.nv); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
	both := slices.Concat(der, ca.Intermediate.Raw)
	for name, nv := range map[string][]byte{
		"as one": deflated(t, both), "each": slices.Concat(good, deflated(t, ca.Intermediate.Raw)),
		"padded":       slices.Concat(good, []byte{0xff, 0}, deflated(t, slices.Concat([]byte{0}, ca.Intermediate.Raw, []byte{0xff}))),
		"one of two":   slices.Concat(good, ca.Intermediate.Raw),
		"the other":    slices.Concat(der, deflated(t, ca.Intermediate.Raw)),
		"then garbage": slices.Concat(deflated(t, both), deflated(t, []byte("x"))),
	} {
		chain := splitChain(nv)
		if len(chain) != 2 || !bytes.Equal(chain[0], der) || !bytes.Equal(chain[1], ca.Intermediate.Raw) {
			t.Errorf("%s: %d certificates", name, len(chain))
		}
	}
	if chain := splitChain(deflated(t, bytes.Repeat(der, maxChain+1))); len(chain) != maxChain {
		t.Errorf("a chain of %d", len(chain))
	}
}

// A TPM that is busy while the chain is read fails the hello. A hello without the chain would be
// denied.
func TestChainOfABusyTPM(t *testing.T) {
	t.Parallel()
	chip := swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256"}, Chain: true})
	proxy := swtpm.NewProxy(t, chip)
	with(t, proxy.Socket(), hello(""))
	last := 0
	for i, e := range proxy.Exchanges() {
		if e.Code == tpm2.TPMCCNVReadPublic || e.Code == tpm2.TPMCCNVRead {
			last = i
		}
	}
	for _, index := range []int{last - 1, last} {
		for code, fails := range map[tpm2.TPMRC]bool{
			tpm2.TPMRCContextGap: true, tpm2.TPMRCMemory: true, tpm2.TPMRCFailure: true, tpm2.TPMRCNVLocked: false, tpm2.TPMRCNVUninitialized: false,
		} {
			proxy.Reset()
			proxy.AnswerFrom(index, code, 2) // the second one after room was made
			k, err := Run(t.Context(), Options{Device: proxy.Socket(), LockDir: t.TempDir()}, hello(""))
			if fails != errors.Is(err, code) || !fails && len(k.ek.Certificates) != 1 {
				t.Errorf("command %d, %v: %d certificates, %v", index, code, len(k.ek.Certificates), err)
			}
		}
	}
}

// An NV index in the range of issuers' certificates may belong to other software, and have a
// password. Trying to read it must not count towards lockout, and must not prevent a hello.
func TestForeignNVIndexDoesNotLockOut(t *testing.T) {
	t.Parallel()
	chip := swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256"}, Chain: true})
	for i, attributes := range []tpm2.TPMANV{
		// as tpm2_nvdefine makes it
		{OwnerWrite: true, OwnerRead: true, AuthWrite: true, AuthRead: true},
		{OwnerWrite: true, AuthWrite: true, AuthRead: true},
		{OwnerWrite: true, AuthWrite: true, AuthRead: true, NoDA: true},
	} {
		if _, err := (tpm2.NVDefineSpace{
			AuthHandle: tpm2.AuthHandle{Handle: tpm2.TPMRHOwner, Auth: tpm2.PasswordAuth(nil)},
			Auth:       tpm2.TPM2BAuth{Buffer: []byte("password")},
			PublicInfo: tpm2.New2B(tpm2.TPMSNVPublic{
				NVIndex: tpm2.TPMHandle(0x01c00150 + i), NameAlg: tpm2.TPMAlgSHA256, DataSize: 16, Attributes: attributes,
			}),
		}).Execute(chip.Transport()); err != nil {
			t.Fatal(err)
		}
	}
	for range 5 {
		if k := with(t, chip.Socket(), hello("")); len(k.ek.Certificates) != 2 {
			t.Errorf("%d certificates", len(k.ek.Certificates))
		}
	}
	if failed, err := chip.LockoutCounter(); err != nil || failed != 0 {
		t.Errorf("lockout counter %d, %v", failed, err)
	}
}

// A TPM that refuses some other command does not make the node choose another EK than the one it
// stays with.
func TestRefusalOfAnotherCommandChangesNoEK(t *testing.T) {
	t.Parallel()
	chip := swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256", "rsa-2048"}, Persistent: []string{"rsa-2048"}})
	proxy := swtpm.NewProxy(t, chip)
	for _, command := range []tpm2.TPMCC{tpm2.TPMCCGetCapability, tpm2.TPMCCReadPublic} {
		for _, refusal := range []tpm2.TPMRC{tpm2.TPMRCValue, tpm2.TPMRCSize, tpm2.TPMRCAttributes, tpm2.TPMRCType} {
			proxy.Reset()
			proxy.Answer(command, refusal, 1)
			k, err := Run(t.Context(), Options{Device: proxy.Socket(), LockDir: t.TempDir()}, hello("rsa-2048"))
			if err == nil && k.ek.Template != "rsa-2048" {
				t.Errorf("%#x refused with %v: it chose %s", uint32(command), refusal, k.ek.Template)
			}
		}
	}
}

// A key of the EK's form in another hierarchy, at a handle where EKs are, is not the EK.
func TestForeignKeyAtAnEKsHandle(t *testing.T) {
	t.Parallel()
	chip := swtpm.Start(t, swtpm.Options{Certified: []string{"rsa-2048"}})
	e, _ := template.EKByName("rsa-2048")
	made, err := tpm2.CreatePrimary{
		PrimaryHandle: tpm2.AuthHandle{Handle: tpm2.TPMRHOwner, Auth: tpm2.PasswordAuth(nil)},
		InPublic:      tpm2.New2B(e.Public),
	}.Execute(chip.Transport())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := (tpm2.EvictControl{
		Auth:             tpm2.AuthHandle{Handle: tpm2.TPMRHOwner, Auth: tpm2.PasswordAuth(nil)},
		ObjectHandle:     tpm2.NamedHandle{Handle: made.ObjectHandle, Name: made.Name},
		PersistentHandle: 0x81010005,
	}).Execute(chip.Transport()); err != nil {
		t.Fatal(err)
	}
	if k := with(t, chip.Socket(), hello("")); k.ek.Template != "rsa-2048" || len(k.ek.Certificates) == 0 {
		t.Errorf("chose %s with %d certificates, %s", k.ek.Template, len(k.ek.Certificates), k.ek.Problem)
	}
}

// A secret of another size is another service's: a short one could be found from the MAC.
func TestSecretOfAnotherSizeIsNotUsed(t *testing.T) {
	t.Parallel()
	chip := swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256"}})
	k := with(t, chip.Socket(), hello(""))
	for _, size := range []int{1, 2, 16, 31} {
		c := challenge(t, k)
		var err error
		if c.CredentialBlob, c.EncryptedSecret, err = makeCredential(k.ek.Public, k.ak, make([]byte, size)); err != nil {
			t.Fatal(err)
		}
		_, err = Run(t.Context(), Options{Device: chip.Socket(), LockDir: t.TempDir()}, func(tpm *TPM) (Quote, error) {
			return tpm.Prove(c, func([]byte) []byte {
				t.Errorf("a secret of %d bytes is used", size)
				return make([]byte, 32)
			})
		})
		if !errors.Is(err, ErrOtherKeys) {
			t.Errorf("%d bytes: %v", size, err)
		}
	}
}

// Each certificate of a chain may have a header of its own.
func TestChainOfWrappedCertificates(t *testing.T) {
	ca, err := swtpm.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	der := ca.Intermediate.Raw
	wrapped := append(binary.BigEndian.AppendUint16([]byte{0x10, 0x01, 0x00}, uint16(len(der))), der...)
	for name, nv := range map[string][]byte{
		"plain": append(bytes.Clone(der), der...), "wrapped": append(bytes.Clone(wrapped), wrapped...),
		"padded": append(append(bytes.Clone(wrapped), 0xff, 0xff), der...),
	} {
		chain := splitChain(nv)
		if len(chain) != 2 || !bytes.Equal(chain[0], der) || !bytes.Equal(chain[1], der) {
			t.Errorf("%s: %d certificates", name, len(chain))
		}
	}
}

// choose is ChooseEK as a hello uses it.
func choose(set, remembered string) func(*TPM) (keys, error) {
	return func(t *TPM) (keys, error) {
		ek, err := t.ChooseEK(set, remembered)
		if err != nil {
			return keys{}, err
		}
		ak, err := t.AK()
		return keys{ek, ak}, err
	}
}

// proves plays a whole round with the chosen EK.
func proves(t *testing.T, chip *swtpm.TPM, k keys) {
	t.Helper()
	c := challenge(t, k)
	checkQuote(t, k, c, with(t, chip.Socket(), prove(c)))
	nothingLoaded(t, chip)
}

// A template that the operator set decides over the remembered one, and over certificates.
func TestSetTemplateDecides(t *testing.T) {
	t.Parallel()
	chip := swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256", "rsa-2048"}})
	for _, name := range template.Names() {
		for _, remembered := range []string{"", "ecc-p256", "rsa-2048", "ecc-p521"} {
			k := with(t, chip.Socket(), choose(name, remembered))
			made, err := chip.EK(name)
			if err != nil || k.ek.Template != name || k.ek.Remember() != name || !bytes.Equal(tpm2.Marshal(made), k.ek.Public) {
				t.Errorf("%s, remembered %q: %s, %v", name, remembered, k.ek.Template, err)
			}
			if certified := len(k.ek.Certificates) > 0; certified != (name == "ecc-p256" || name == "rsa-2048") {
				t.Errorf("%s: %d certificates", name, len(k.ek.Certificates))
			}
		}
	}
	proves(t, chip, with(t, chip.Socket(), choose("rsa-2048-high", "ecc-p256")))
	var all []string
	for _, ek := range with(t, chip.Socket(), func(t *TPM) ([]EK, error) { return t.EKs("rsa-2048-high") }) {
		all = append(all, ek.Template)
	}
	if want := []string{"rsa-2048-high", "ecc-p256", "rsa-2048"}; !slices.Equal(all, want) {
		t.Errorf("it has %q, want %q", all, want)
	}
	for _, ek := range with(t, chip.Socket(), func(t *TPM) ([]EK, error) { return t.EKs("rsa-2048") })[1:] {
		if ek.Template == "rsa-2048" {
			t.Error("the set EK is there twice")
		}
	}
}

// A TPM that makes no EK of the set template says so, and what it makes. No other EK is used.
func TestSetTemplateThatTheTPMLacks(t *testing.T) {
	t.Parallel()
	chip := swtpm.Start(t, swtpm.Options{Certified: []string{"rsa-2048"}})
	proxy := swtpm.NewProxy(t, chip)
	for _, c := range []struct {
		noParms tpm2.TPMRC
		says    string
	}{
		{0, "but of: ecc-p256, ecc-p256-high, rsa-2048, rsa-2048-high; it has EK certificates for: rsa-2048"},
		{tpm2.TPMRCCommandCode, "but of: none; it has EK certificates for: rsa-2048"},
	} {
		proxy.Reset()
		proxy.Answer(tpm2.TPMCCCreatePrimary, tpm2.TPMRCCurve|0x40|0x200, 100)
		if c.noParms != 0 {
			proxy.Answer(tpm2.TPMCCTestParms, c.noParms, 100)
		}
		for _, f := range []func(*TPM) error{
			func(t *TPM) error { _, err := t.ChooseEK("ecc-p384-high", "rsa-2048"); return err },
			func(t *TPM) error { _, err := t.EKs("ecc-p384-high"); return err },
		} {
			_, err := Run(t.Context(), Options{Device: proxy.Socket(), LockDir: t.TempDir()}, func(t *TPM) (struct{}, error) { return struct{}{}, f(t) })
			var lacks *TemplateError
			if !errors.As(err, &lacks) || lacks.Template != "ecc-p384-high" || !errors.Is(err, tpm2.TPMRCCurve) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v", err)
			}
		}
		if n := proxy.Count(tpm2.TPMCCCreatePrimary); n != 2 {
			t.Errorf("%d keys were tried", n)
		}
	}
	if _, err := Run(t.Context(), Options{Device: chip.Socket(), LockDir: t.TempDir()}, choose("x", "")); err == nil || !strings.Contains(err.Error(), "ecc-p384-high") {
		t.Errorf("an unknown name: %v", err)
	}
}

// stored is a chip whose EK of a template is made from NV.
func stored(t *testing.T, name string, change func(*swtpm.TPM, template.EK) (template.EK, error)) (*swtpm.TPM, template.EK) {
	t.Helper()
	chip := swtpm.Start(t, swtpm.Options{})
	e, _ := template.EKByName(name)
	made, err := change(chip, e)
	if err != nil {
		t.Fatal(err)
	}
	if err := chip.Certify(made, swtpm.Options{}); err != nil {
		t.Fatal(err)
	}
	return chip, made
}

func withNonce(nonce string) func(*swtpm.TPM, template.EK) (template.EK, error) {
	return func(chip *swtpm.TPM, e template.EK) (template.EK, error) {
		made, err := e.WithNonce([]byte(nonce))
		return made, errors.Join(err, chip.WriteNV(e.Nonce, []byte(nonce)))
	}
}

// withTemplate stores a template with another Unique field than the profile's. As with
// tpm2_createek, that field begins with a nonce.
func withTemplate(chip *swtpm.TPM, e template.EK) (template.EK, error) {
	made := e
	if e.IsRSA() {
		made.Public.Unique = tpm2.NewTPMUPublicID(tpm2.TPMAlgRSA, &tpm2.TPM2BPublicKeyRSA{Buffer: bytes.Repeat([]byte{7}, 256)})
	} else {
		made.Public.Unique = tpm2.NewTPMUPublicID(tpm2.TPMAlgECC, &tpm2.TPMSECCPoint{
			X: tpm2.TPM2BECCParameter{Buffer: bytes.Repeat([]byte{1}, 32)}, Y: tpm2.TPM2BECCParameter{Buffer: bytes.Repeat([]byte{2}, 32)},
		})
	}
	return made, chip.WriteNV(e.Template, tpm2.Marshal(made.Public))
}

func withBoth(chip *swtpm.TPM, e template.EK) (template.EK, error) {
	if _, err := withTemplate(chip, e); err != nil {
		return e, err
	}
	return withNonce("both")(chip, e)
}

// The EK of a certificate is made from the nonce and the template in NV. The verifier accepts it.
func TestStoredNonceAndTemplate(t *testing.T) {
	for what, c := range map[string]struct {
		name   string
		change func(*swtpm.TPM, template.EK) (template.EK, error)
	}{
		"RSA nonce":         {"rsa-2048", withNonce("nonce")},
		"RSA template":      {"rsa-2048", withTemplate},
		"RSA both":          {"rsa-2048", withBoth},
		"ECC nonce":         {"ecc-p256", withNonce("nonce")},
		"ECC template":      {"ecc-p256", withTemplate},
		"ECC both":          {"ecc-p256", withBoth},
		"RSA high template": {"rsa-2048-high", withTemplate},
		"ECC high template": {"ecc-p384-high", withTemplate},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			chip, made := stored(t, c.name, c.change)
			want, err := chip.MakeEK(made)
			if err != nil {
				t.Fatal(err)
			}
			plain, err := chip.EK(c.name)
			if err != nil || bytes.Equal(tpm2.Marshal(plain), tpm2.Marshal(want)) {
				t.Fatalf("the nonce makes no other key: %v", err)
			}
			is := func(k keys, area tpm2.TPMTPublic, certificates int, remember string) {
				t.Helper()
				if !bytes.Equal(k.ek.Public, tpm2.Marshal(area)) || len(k.ek.Certificates) != certificates || k.ek.Remember() != remember {
					t.Errorf("remember %q, %d certificates, %q", k.ek.Remember(), len(k.ek.Certificates), k.ek.Problem)
				}
				e, _ := template.EKByName(k.ek.Template)
				if _, _, err := e.Parse(k.ek.Public); err != nil {
					t.Errorf("a verifier refuses it: %v", err)
				}
				proves(t, chip, k)
			}
			first := with(t, chip.Socket(), choose("", ""))
			is(first, want, 1, c.name+storedMark)
			is(with(t, chip.Socket(), choose("", first.ek.Remember())), want, 1, c.name+storedMark)
			is(with(t, chip.Socket(), choose(c.name, "")), want, 1, c.name+storedMark)
			// A node that enrolled before nonces were read keeps its EK.
			is(with(t, chip.Socket(), choose("", c.name)), plain, 0, c.name)
			is(with(t, chip.Socket(), choose(c.name, c.name)), plain, 0, c.name)
		})
	}
}

// The persistent key of a chip with a nonce is the one that the nonce makes, if it is certified.
func TestStoredNonceAndAPersistentKey(t *testing.T) {
	t.Parallel()
	chip, made := stored(t, "rsa-2048", withNonce("nonce"))
	plain, _ := template.EKByName("rsa-2048")
	if err := chip.Persist(made, 0x81010001); err != nil {
		t.Fatal(err)
	}
	for _, remembered := range []string{"", "rsa-2048+nv"} {
		k := with(t, chip.Socket(), choose("", remembered))
		if k.ek.Slow || len(k.ek.Certificates) != 1 || k.ek.Remember() != "rsa-2048+nv" {
			t.Errorf("%q: %+v", remembered, k.ek)
		}
		proves(t, chip, k)
	}
	other, _ := stored(t, "rsa-2048", withNonce("nonce"))
	if err := other.Persist(plain, 0x81010001); err != nil {
		t.Fatal(err)
	}
	k := with(t, other.Socket(), choose("", ""))
	if !k.ek.Slow || len(k.ek.Certificates) != 1 || k.ek.Remember() != "rsa-2048+nv" {
		t.Errorf("another key is persistent: %+v", k.ek)
	}
	proves(t, other, k)
	// Nor is the persistent key taken for it where no certificate tells them apart.
	if err := other.WriteNV(plain.Certificate, []byte("garbage")); err != nil {
		t.Fatal(err)
	}
	if again := with(t, other.Socket(), choose("", "rsa-2048+nv")); !bytes.Equal(again.ek.Public, k.ek.Public) || again.ek.Remember() != "rsa-2048+nv" {
		t.Errorf("without a certificate: %+v", again.ek)
	}
	// Nor where the certificate is for neither of them.
	gone, err := plain.WithNonce([]byte("gone"))
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Certify(gone, swtpm.Options{}); err != nil {
		t.Fatal(err)
	}
	again := with(t, other.Socket(), choose("", "rsa-2048+nv"))
	if !bytes.Equal(again.ek.Public, k.ek.Public) || again.ek.Remember() != "rsa-2048+nv" || !strings.Contains(again.ek.Problem, "for another key") {
		t.Errorf("with the certificate of another key: %+v", again.ek)
	}
}

// What NV holds is not followed if it would change more than the Unique field, and the reason is
// named. The node uses the profile's key.
func TestStoredTemplateThatIsNotTheProfiles(t *testing.T) {
	e, _ := template.EKByName("ecc-p256")
	signing, policy := e.Public, e.Public
	signing.ObjectAttributes.SignEncrypt, signing.ObjectAttributes.Restricted = true, false
	policy.AuthPolicy.Buffer = make([]byte, 32)
	for what, c := range map[string]struct {
		index uint32
		data  []byte
		says  string
	}{
		"attributes": {e.Template, tpm2.Marshal(signing), "NV index 0x01c0000c: template: other attributes"},
		"policy":     {e.Template, tpm2.Marshal(policy), "NV index 0x01c0000c: template: another policy"},
		"garbage":    {e.Template, []byte("garbage"), "NV index 0x01c0000c: template: shorter"},
		"too long":   {e.Nonce, make([]byte, 33), "NV index 0x01c0000b: nonce: 33 bytes"},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			chip := swtpm.Start(t, swtpm.Options{})
			if err := chip.WriteNV(c.index, c.data); err != nil {
				t.Fatal(err)
			}
			k := with(t, chip.Socket(), choose("", ""))
			if !strings.Contains(k.ek.Problem, c.says) || k.ek.Remember() != "ecc-p256" {
				t.Errorf("without a certificate: %+v", k.ek)
			}
			proves(t, chip, k)
			// Where the certificate is for the profile's key, nothing is wrong.
			if err := chip.Certify(e, swtpm.Options{}); err != nil {
				t.Fatal(err)
			}
			if k := with(t, chip.Socket(), choose("", "")); k.ek.Problem != "" || len(k.ek.Certificates) != 1 {
				t.Errorf("its certificate is the profile's key's: %+v", k.ek)
			}
		})
	}
}

// A TPM may refuse what NV holds. Then the profile's key is used, and the reason is named.
func TestStoredNonceThatTheTPMRefuses(t *testing.T) {
	t.Parallel()
	chip, _ := stored(t, "ecc-p256", withNonce("nonce"))
	proxy := swtpm.NewProxy(t, chip)
	proxy.Answer(tpm2.TPMCCCreatePrimary, tpm2.TPMRCSize|0x40|0x200, 1)
	k := with(t, proxy.Socket(), choose("ecc-p256", ""))
	if k.ek.Remember() != "ecc-p256" || len(k.ek.Certificates) > 0 || !strings.Contains(k.ek.Problem, "TPM_RC_SIZE") || !strings.Contains(k.ek.Problem, "another key") {
		t.Errorf("%+v", k.ek)
	}
	c := challenge(t, k)
	proxy.Reset()
	checkQuote(t, k, c, with(t, proxy.Socket(), prove(c)))
	made := slices.IndexFunc(proxy.Exchanges(), func(x swtpm.Exchange) bool {
		return x.Code == tpm2.TPMCCCreatePrimary && bytes.Contains(x.Command, []byte("nonce"))
	})
	proxy.Reset()
	proxy.AnswerAt(made, tpm2.TPMRCSize|0x40|0x200)
	checkQuote(t, k, c, with(t, proxy.Socket(), prove(c)))
}

// swtpm_setup writes a template of its own where the EK may sign: no such EK is used.
func TestSigningEKOfSwtpmSetup(t *testing.T) {
	t.Parallel()
	chip := swtpm.Start(t, swtpm.Options{Setup: true, SetupArguments: []string{"--allow-signing", "--decryption"}})
	eks := with(t, chip.Socket(), allEKs)
	if len(eks) != 2 {
		t.Fatalf("%+v", eks)
	}
	for _, ek := range eks {
		e, _ := template.EKByName(ek.Template)
		if !strings.Contains(ek.Problem, "template: other attributes") || len(ek.Certificates) > 0 {
			t.Errorf("%s: %q, %d certificates", ek.Template, ek.Problem, len(ek.Certificates))
		}
		if _, _, err := e.Parse(ek.Public); err != nil {
			t.Errorf("%s: %v", ek.Template, err)
		}
	}
}

// An index that was defined and never written holds no nonce.
func TestNonceThatWasNeverWritten(t *testing.T) {
	e, _ := template.EKByName("ecc-p256")
	chip := swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256"}})
	if _, err := (tpm2.NVDefineSpace{
		AuthHandle: tpm2.AuthHandle{Handle: tpm2.TPMRHPlatform, Auth: tpm2.PasswordAuth(nil)},
		PublicInfo: tpm2.New2B(tpm2.TPMSNVPublic{
			NVIndex: tpm2.TPMHandle(e.Nonce), NameAlg: tpm2.TPMAlgSHA256, DataSize: 16,
			Attributes: tpm2.TPMANV{PPWrite: true, AuthRead: true, OwnerRead: true, NoDA: true, PlatformCreate: true},
		}),
	}).Execute(chip.Transport()); err != nil {
		t.Fatal(err)
	}
	if k := with(t, chip.Socket(), choose("", "")); k.ek.Problem != "" || len(k.ek.Certificates) != 1 || k.ek.Remember() != "ecc-p256" {
		t.Errorf("%+v", k.ek)
	}
}

// A node that enrolled with an EK from NV chooses as a new node does once NV does not have it.
func TestStoredNonceThatIsGone(t *testing.T) {
	t.Parallel()
	chip := swtpm.Start(t, swtpm.Options{Certified: []string{"rsa-2048"}})
	for set, want := range map[string]string{"": "rsa-2048", "ecc-p256": "ecc-p256"} {
		if k := with(t, chip.Socket(), choose(set, "ecc-p256+nv")); k.ek.Remember() != want {
			t.Errorf("set %q: %s", set, k.ek.Remember())
		}
	}
}

// A certificate that only the owner hierarchy may read is left out if that has a password, and the
// reason is named.
func TestCertificateBehindTheOwnersPassword(t *testing.T) {
	e, _ := template.EKByName("ecc-p256")
	chip := swtpm.Start(t, swtpm.Options{})
	if _, err := (tpm2.NVDefineSpace{
		AuthHandle: tpm2.AuthHandle{Handle: tpm2.TPMRHPlatform, Auth: tpm2.PasswordAuth(nil)},
		PublicInfo: tpm2.New2B(tpm2.TPMSNVPublic{
			NVIndex: tpm2.TPMHandle(e.Certificate), NameAlg: tpm2.TPMAlgSHA256, DataSize: 16,
			Attributes: tpm2.TPMANV{PPWrite: true, PPRead: true, OwnerRead: true, NoDA: true, PlatformCreate: true},
		}),
	}).Execute(chip.Transport()); err != nil {
		t.Fatal(err)
	}
	if err := chip.SetPassword(tpm2.TPMRHOwner, "x"); err != nil {
		t.Fatal(err)
	}
	k := with(t, chip.Socket(), choose("", ""))
	if k.ek.Template != "ecc-p256" || len(k.ek.Certificates) > 0 || !strings.Contains(k.ek.Problem, "only the owner hierarchy may read it, and that has a password") {
		t.Errorf("%+v", k.ek)
	}
	proves(t, chip, k)
	if failed, err := chip.LockoutCounter(); err != nil || failed != 0 {
		t.Errorf("lockout counter %d, %v", failed, err)
	}
}

// A chip has a plain EK that is persistent and certified, and a stray nonce. What is remembered
// then says "from NV". Once the key is evicted, the certificate decides, not what is remembered.
func TestCertificateBeatsWhatIsRemembered(t *testing.T) {
	t.Parallel()
	chip := swtpm.Start(t, swtpm.Options{Certified: []string{"rsa-2048"}})
	e, _ := template.EKByName("rsa-2048")
	if err := chip.WriteNV(e.Nonce, []byte("stray")); err != nil {
		t.Fatal(err)
	}
	const at = tpm2.TPMHandle(0x81010001)
	if err := chip.Persist(e, at); err != nil {
		t.Fatal(err)
	}
	enrolled := with(t, chip.Socket(), choose("", ""))
	kept, err := tpm2.ReadPublic{ObjectHandle: at}.Execute(chip.Transport())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := (tpm2.EvictControl{
		Auth:             tpm2.AuthHandle{Handle: tpm2.TPMRHOwner, Auth: tpm2.PasswordAuth(nil)},
		ObjectHandle:     &tpm2.NamedHandle{Handle: at, Name: kept.Name},
		PersistentHandle: at,
	}).Execute(chip.Transport()); err != nil {
		t.Fatal(err)
	}
	again := with(t, chip.Socket(), choose("", enrolled.ek.Remember()))
	if !bytes.Equal(again.ek.Public, enrolled.ek.Public) || len(again.ek.Certificates) == 0 {
		t.Errorf("enrolled as %q, now %q with %d certificates: %s", enrolled.ek.Remember(), again.ek.Remember(), len(again.ek.Certificates), again.ek.Problem)
	}
}
