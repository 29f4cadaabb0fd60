// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
)

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
			for _, ek := range with(t, tpm.Socket(), (*TPM).EKs) {
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
	p.Answer(tpm2.TPMCCCreatePrimary, tpm2.TPMRCHierarchy|0x100, 100) // the endorsement hierarchy is switched off
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
			eks := with(t, tpm.Socket(), (*TPM).EKs)
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
	f.Fuzz(func(t *testing.T, nv []byte) {
		if der, err := trimCertificate(nv); err == nil {
			if !bytes.Contains(nv, der) {
				t.Fatal("not in there")
			}
			if again, err := trimCertificate(der); err != nil || !bytes.Equal(again, der) {
				t.Fatalf("trimmed twice it is another: %v", err)
			}
		}
		total := 0
		for _, der := range splitChain(nv) {
			total += len(der)
		}
		if total > len(nv) {
			t.Fatal("more than there is")
		}
	})
}

// An NV index among those of issuers' certificates may be anybody's, with a password: trying to
// read it must not count towards lockout, and must not keep the node from saying hello.
func TestForeignNVIndexDoesNotLockOut(t *testing.T) {
	chip := swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256"}, Chain: true})
	for i, attributes := range []tpm2.TPMANV{
		{OwnerWrite: true, OwnerRead: true, AuthWrite: true, AuthRead: true}, // as tpm2_nvdefine makes it
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
