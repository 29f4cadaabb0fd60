// SPDX-License-Identifier: Apache-2.0

package template

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-tpm/tpm2"
)

func TestNamesAreThoseOfTheTemplates(t *testing.T) {
	var names []string
	for _, e := range EKs() {
		names = append(names, e.Name)
	}
	if !slices.Equal(names, Names()) {
		t.Errorf("%q", Names())
	}
}

// The indices of nonce and template follow that of the certificate, as in the profile.
func TestIndicesOfWhatIsStored(t *testing.T) {
	for _, e := range EKs() {
		high := strings.HasSuffix(e.Name, "-high")
		if high && (e.Nonce != 0 || e.Template != e.Certificate+1) || !high && (e.Nonce != e.Certificate+1 || e.Template != e.Certificate+2) {
			t.Errorf("%s: %#x, %#x, %#x", e.Name, e.Certificate, e.Nonce, e.Template)
		}
	}
}

func unique(t *testing.T, e EK) [][]byte {
	t.Helper()
	if e.IsRSA() {
		n, err := e.Public.Unique.RSA()
		if err != nil {
			t.Fatal(err)
		}
		return [][]byte{n.Buffer}
	}
	p, err := e.Public.Unique.ECC()
	if err != nil {
		t.Fatal(err)
	}
	return [][]byte{p.X.Buffer, p.Y.Buffer}
}

func TestNonceChangesNothingButUnique(t *testing.T) {
	for _, e := range EKs() {
		nonce := []byte("nonce")
		made, err := e.WithNonce(nonce)
		if e.Nonce == 0 {
			if err == nil {
				t.Errorf("%s takes a nonce", e.Name)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.HasPrefix(tpm2.Marshal(made.Public), e.head) || bytes.Equal(tpm2.Marshal(made.Public), tpm2.Marshal(e.Public)) {
			t.Errorf("%s: more than Unique is another, or nothing", e.Name)
		}
		got := unique(t, made)
		size := map[bool]int{true: 256, false: 32}[e.IsRSA()]
		if !bytes.Equal(got[0], append([]byte("nonce"), make([]byte, size-5)...)) || len(got) > 1 && !bytes.Equal(got[1], make([]byte, size)) {
			t.Errorf("%s: %x", e.Name, got)
		}
		if same, err := e.WithNonce(nil); err != nil || !bytes.Equal(tpm2.Marshal(same.Public), tpm2.Marshal(e.Public)) {
			t.Errorf("%s: an empty nonce: %v", e.Name, err)
		}
		if _, err := e.WithNonce(make([]byte, size)); err != nil {
			t.Errorf("%s: %v", e.Name, err)
		}
		if _, err := e.WithNonce(make([]byte, size+1)); err == nil {
			t.Errorf("%s: a nonce of %d bytes", e.Name, size+1)
		}
		if len(nonce) != 5 || cap(got[0]) == cap(nonce) {
			t.Errorf("%s: the caller's slice is kept", e.Name)
		}
	}
}

// A template in NV counts only if no more than Unique is another.
func TestStoredTemplates(t *testing.T) {
	for _, e := range EKs() {
		same := tpm2.Marshal(e.Public)
		if made, err := e.WithTemplate(same); err != nil || !bytes.Equal(tpm2.Marshal(made.Public), same) {
			t.Errorf("%s: its own template: %v", e.Name, err)
		}
		other := e.Public
		if e.IsRSA() {
			other.Unique = tpm2.NewTPMUPublicID(tpm2.TPMAlgRSA, &tpm2.TPM2BPublicKeyRSA{Buffer: bytes.Repeat([]byte{7}, 256)})
		} else {
			other.Unique = tpm2.NewTPMUPublicID(tpm2.TPMAlgECC, eccPoint([]byte{1, 2}, nil))
		}
		for name, padding := range map[string][]byte{"exact": nil, "zeros": make([]byte, 9), "ones": {0xff, 0xff}} {
			stored := append(tpm2.Marshal(other), padding...)
			if made, err := e.WithTemplate(stored); err != nil || !bytes.Equal(tpm2.Marshal(made.Public), tpm2.Marshal(other)) {
				t.Errorf("%s, %s: %v", e.Name, name, err)
			}
		}
		for says, change := range map[string]func(*tpm2.TPMTPublic){
			"other attributes (": func(p *tpm2.TPMTPublic) { p.ObjectAttributes.SignEncrypt = true },
			"another name":       func(p *tpm2.TPMTPublic) { p.NameAlg = tpm2.TPMAlgSHA512 },
			"another policy":     func(p *tpm2.TPMTPublic) { p.AuthPolicy.Buffer = flip(p.AuthPolicy.Buffer) },
			"another policy ":    func(p *tpm2.TPMTPublic) { p.AuthPolicy.Buffer = nil },
		} {
			differs := e.Public
			change(&differs)
			if _, err := e.WithTemplate(tpm2.Marshal(differs)); err == nil || !strings.Contains(err.Error(), strings.TrimSpace(says)) || !strings.Contains(err.Error(), e.Name) {
				t.Errorf("%s, %s: %v", e.Name, says, err)
			}
		}
		bits := bytes.Clone(same)
		bits[len(e.head)-1] ^= 1
		for says, stored := range map[string][]byte{
			"shorter": same[:7], "other parameters": bits, "another type": append([]byte{0, 8}, same[2:]...),
			"unique field": same[:len(e.head)], "unique field ": append(bytes.Clone(same), 0, 1), "unique field  ": append(bytes.Clone(e.head), 0xff, 0xff),
		} {
			if _, err := e.WithTemplate(stored); err == nil || !strings.Contains(err.Error(), strings.TrimSpace(says)) {
				t.Errorf("%s, %s: %v", e.Name, says, err)
			}
		}
		if _, err := e.WithTemplate(nil); err == nil {
			t.Errorf("%s: nothing", e.Name)
		}
	}
}

func flip(b []byte) []byte {
	b = bytes.Clone(b)
	b[0] ^= 1
	return b
}

// Whatever NV holds, what comes of it has the head that a verifier wants.
func FuzzStoredTemplate(f *testing.F) {
	for _, e := range EKs() {
		f.Add(tpm2.Marshal(e.Public))
		f.Add(append(tpm2.Marshal(e.Public), 0, 0))
		f.Add(bytes.Clone(e.head))
	}
	f.Fuzz(func(t *testing.T, stored []byte) {
		for _, e := range EKs() {
			for _, make := range []func([]byte) (EK, error){e.WithTemplate, e.WithNonce} {
				made, err := make(stored)
				if err != nil {
					continue
				}
				if area := tpm2.Marshal(made.Public); !bytes.HasPrefix(area, e.head) || len(area) > maxPublic {
					t.Fatalf("%s: %x", e.Name, area)
				}
			}
		}
	})
}
