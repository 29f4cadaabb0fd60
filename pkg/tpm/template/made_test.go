// SPDX-License-Identifier: Apache-2.0

package template

import (
	"bytes"
	"crypto"
	"crypto/elliptic"
	"crypto/rsa"
	"encoding/binary"
	"errors"
	"math/big"
	"reflect"
	"testing"

	"github.com/google/go-tpm/tpm2"
)

// The other way to check a public area: go-tpm parses it, marshals it again, and marshals the
// template with its key. It takes a hundred times as long, and must come to the same verdict.

// otherwiseMade returns the key of an area that parses if the template made it; bad says that only
// the key is wrong.
func otherwiseMade(template, parsed tpm2.TPMTPublic, public []byte) (key crypto.PublicKey, made, bad bool) {
	if parsed.Type != template.Type { // go-tpm panics on a union whose tag is another's
		return nil, false, false
	}
	template.Unique = parsed.Unique
	if !bytes.Equal(tpm2.Marshal(template), public) {
		return nil, false, false
	}
	key, err := PublicKey(parsed)
	return key, true, err != nil
}

// sameVerdicts compares both ways for one area.
func sameVerdicts(t *testing.T, public []byte) {
	t.Helper()
	parsed, err := Parse(public)
	parses := err == nil
	check := func(what string, template tpm2.TPMTPublic, key crypto.PublicKey, err error) (made bool) {
		t.Helper()
		var want crypto.PublicKey
		var bad bool
		if parses {
			want, made, bad = otherwiseMade(template, parsed, public)
		}
		var keyErr *KeyError
		switch {
		case (err == nil) != (made && !bad) || errors.As(err, &keyErr) != bad:
			t.Fatalf("%s: %v, otherwise made: %t, its key bad: %t\n%x", what, err, made, bad, public)
		case err == nil && !key.(interface{ Equal(crypto.PublicKey) bool }).Equal(want):
			t.Fatalf("%s: another key\n%x", what, public)
		}
		return made
	}
	ak, err := CheckAK(public)
	check("AK", AK(), ak, err)

	maker, ek, ekErr := CheckEK(public)
	made := 0
	for _, e := range EKs() {
		area, key, err := e.Parse(public)
		if check(e.Name, e.Public, key, err) {
			check("EK", e.Public, ek, ekErr)
			made++
		}
		if err == nil && (maker.Name != e.Name || !bytes.Equal(tpm2.Marshal(area), public)) {
			t.Fatalf("%s: taken for %s, or comes back as another area\n%x", e.Name, maker.Name, public)
		}
	}
	if made > 1 || made == 0 && ekErr == nil {
		t.Fatalf("made from %d templates: %v\n%x", made, ekErr, public)
	}
	if parses && (parsed.NameAlg == tpm2.TPMAlgSHA256 || parsed.NameAlg == tpm2.TPMAlgSHA384) {
		want, err := tpm2.ObjectName(&parsed)
		if got, gotErr := Name(public); err != nil || gotErr != nil || !bytes.Equal(got, want.Buffer) {
			t.Fatalf("name %x, %v, otherwise %x, %v\n%x", got, gotErr, want, err, public)
		}
	}
}

// areas returns one good public area of each template, and of go-tpm's for storage keys.
func areas(t testing.TB) [][]byte {
	t.Helper()
	all := [][]byte{anAK(t, nil), tpm2.Marshal(tpm2.RSASRKTemplate), tpm2.Marshal(tpm2.ECCSRKTemplate)}
	// nobody factors it here
	modulus := &rsa.PublicKey{N: new(big.Int).SetBytes(bytes.Repeat([]byte{0xa5}, rsaBits/8)), E: exponent}
	keys := map[string]crypto.PublicKey{
		"ecc-p256": newECC(t, elliptic.P256()), "ecc-p256-high": newECC(t, elliptic.P256()), "ecc-p384-high": newECC(t, elliptic.P384()),
		"rsa-2048": modulus, "rsa-2048-high": modulus,
	}
	for _, e := range EKs() {
		area, err := e.PublicArea(keys[e.Name])
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, tpm2.Marshal(area))
	}
	return all
}

// Every byte up to the key is changed; some are left out or doubled, and the area is cut off or
// goes on.
func TestBytesAreJudgedAsGoTPMJudgesThem(t *testing.T) {
	for _, public := range areas(t) {
		sameVerdicts(t, public)
		for i := range public {
			if key := len(public) - 2*34; i > key && i%8 != 0 || i > 100 && i < key {
				continue // one byte of a key is like the next
			}
			changed := bytes.Clone(public)
			changed[i] ^= 1 << (i % 8)
			sameVerdicts(t, changed)
			if i%5 != 0 {
				continue // fields have two or four bytes: each is met
			}
			sameVerdicts(t, append(bytes.Clone(public[:i]), public[i+1:]...))
			sameVerdicts(t, append(bytes.Clone(public[:i+1]), public[i:]...))
			sameVerdicts(t, public[:i])
		}
		for _, more := range []int{1, 2, maxPublic - len(public), maxPublic - len(public) + 1} {
			sameVerdicts(t, append(bytes.Clone(public), make([]byte, more)...))
		}
	}
	// What follows a template's head: no key, and keys of every size that could be mistaken for
	// one.
	for _, head := range append([][]byte{akHead()}, heads()...) {
		for _, x := range []int{0, 1, 32, 33, 48, 49, 255, 256, 257, maxPublic, 0xffff} {
			one := append(binary.BigEndian.AppendUint16(bytes.Clone(head), uint16(x)), bytes.Repeat([]byte{0xff}, min(x, maxPublic))...)
			sameVerdicts(t, one)
			for _, y := range []int{0, 1, 32, 33, 48, 49} {
				sameVerdicts(t, append(binary.BigEndian.AppendUint16(bytes.Clone(one), uint16(y)), make([]byte, y)...))
			}
		}
	}
}

func heads() [][]byte {
	var all [][]byte
	for _, e := range EKs() {
		all = append(all, e.head)
	}
	return all
}

// No template's head is the start of another's: so an area has at most one.
func TestHeadsTellTemplatesApart(t *testing.T) {
	all := append(heads(), akHead())
	for i, a := range all {
		for j, b := range all {
			if i != j && bytes.HasPrefix(a, b) {
				t.Errorf("%x starts with %x", a, b)
			}
		}
	}
}

// What a caller does to a template that he was given, or to an area, harms nobody else.
func TestTemplatesAreTheCallersOwn(t *testing.T) {
	all := areas(t)
	before := EKs()
	for _, e := range EKs() {
		again, _ := EKByName(e.Name)
		for _, mine := range []EK{e, again} {
			clear(mine.Public.AuthPolicy.Buffer)
			if mine.IsRSA() {
				parameters, _ := mine.Public.Parameters.RSADetail()
				parameters.KeyBits = 1024
			} else {
				parameters, _ := mine.Public.Parameters.ECCDetail()
				parameters.CurveID = tpm2.TPMECCNistP521
			}
			mine.Public.Type = tpm2.TPMAlgKeyedHash
		}
	}
	ak := AK()
	parameters, _ := ak.Parameters.ECCDetail()
	parameters.CurveID = tpm2.TPMECCNistP521
	if !reflect.DeepEqual(EKs(), before) {
		t.Error("a template has changed")
	}
	for _, public := range all {
		sameVerdicts(t, public)
		if e, _, err := CheckEK(public); err == nil {
			given := bytes.Clone(public)
			area, _, _ := e.Parse(given)
			clear(given)
			if !bytes.Equal(tpm2.Marshal(area), public) {
				t.Errorf("%s: the area is of the bytes that it was read from", e.Name)
			}
		}
	}
}

// A template that is not of the list made nothing, with any content.
func TestOnlyTheListMakesEKs(t *testing.T) {
	key := newECC(t, elliptic.P256())
	for _, e := range EKs() {
		area, err := e.PublicArea(key)
		if err != nil {
			continue
		}
		public := tpm2.Marshal(area)
		another := EK{Name: e.Name, Certificate: e.Certificate, Public: e.Public}
		for _, public := range [][]byte{public, public[len(e.head):]} {
			if _, _, err := another.Parse(public); err == nil {
				t.Errorf("%s: a copy made %x", e.Name, public)
			}
		}
	}
}

// FuzzMade: bytes are accepted as go-tpm accepts them, as a whole and behind each template's head.
func FuzzMade(f *testing.F) {
	for _, public := range areas(f) {
		f.Add(public)
		for _, head := range append(heads(), akHead()) {
			if key, ok := bytes.CutPrefix(public, head); ok {
				f.Add(key)
			}
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		sameVerdicts(t, data)
		for _, head := range append(heads(), akHead()) {
			sameVerdicts(t, append(bytes.Clone(head), data...))
		}
	})
}
