// SPDX-License-Identifier: Apache-2.0

package attestation

import (
	"bytes"
	"strings"
	"testing"
)

// fuzzDocument: what is accepted has one encoding, and Head reads it the same way.
func fuzzDocument(f *testing.F, kind string) {
	v := loadVectors(f)
	for _, c := range v.Documents {
		f.Add([]byte(c.Document)) // those of the other kinds too
	}
	for _, c := range v.RefusedDocuments {
		if c.Kind == kind && c.Times == 0 {
			f.Add(c.data())
		}
	}
	if origin, err := someOrigin().Marshal(); err == nil {
		f.Add(origin)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		d, err := parseKind(t, kind, data)
		if err != nil {
			return
		}
		again, err := d.Marshal()
		if err != nil {
			t.Fatalf("parsed, but does not marshal: %v", err)
		}
		if !bytes.Equal(again, data) {
			t.Fatal("two encodings of one document")
		}
		if version, head := Head(data); version != VersionTPM || head != kind {
			t.Fatalf("Head: %q and %q", version, head)
		}
	})
}

func FuzzHello(f *testing.F) { fuzzDocument(f, KindHello) }

func FuzzChallenge(f *testing.F) { fuzzDocument(f, KindChallenge) }

func FuzzProof(f *testing.F) { fuzzDocument(f, KindProof) }

func FuzzOrigin(f *testing.F) { fuzzDocument(f, KindOrigin) }

// FuzzVersions: a list that is accepted has one form, and every version in it is its own newest
// common one.
func FuzzVersions(f *testing.F) {
	v := loadVectors(f).Versions
	for _, text := range append(append([]string{}, v.Accepted...), v.Refused...) {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		list, err := ParseVersions(text)
		if err != nil {
			if list != nil {
				t.Fatal("refused, and returned all the same")
			}
			return
		}
		if list.String() != text || list.Check() != nil || len(list) > maxVersions {
			t.Fatalf("%q is accepted and becomes %q", text, list)
		}
		for i, version := range list {
			if got := list.Common(list, list[:i]...); got != version {
				t.Fatalf("%q: %q where %q is next", text, got, version)
			}
		}
		if got := list.Common(list, list...); got != "" {
			t.Fatalf("%q: %q once all are tried", text, got)
		}
	})
}

// FuzzHead: what is returned stands there, and is a version.
func FuzzHead(f *testing.F) {
	v := loadVectors(f)
	for _, c := range v.Heads {
		f.Add([]byte(c.Document))
	}
	for _, c := range v.Documents {
		f.Add([]byte(c.Document))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		version, kind := Head(data)
		if version == "" {
			if kind != "" {
				t.Fatal("a kind without a version")
			}
			return
		}
		if err := (Versions{version}).Check(); err != nil {
			t.Fatalf("%q: %v", version, err)
		}
		start := `{"version":"` + string(version)
		if kind != "" {
			start += `","kind":"` + kind + `"`
		}
		if !strings.HasPrefix(string(data), start) {
			t.Fatalf("%q and %q are not what it starts with", version, kind)
		}
	})
}
