// SPDX-License-Identifier: Apache-2.0

package attestation

import (
	"bytes"
	"errors"
	"os"
	"strings"
	"testing"
)

func sample() Request {
	return Request{PKCS10: []byte("not really DER, but bytes are bytes here"), Provider: "insecure", Data: []byte(`{"version":"insecure/v1"}`)}
}

func TestMarshalIsTheGoldenFile(t *testing.T) {
	got, err := sample().Marshal()
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile("testdata/request.pem")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("the wire format changed:\n%s\nwant\n%s", got, want)
	}
}

func TestParseRefuses(t *testing.T) {
	good, err := sample().Marshal()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Parse(good); err != nil {
		t.Fatalf("the good one: %v", err)
	}
	s := string(good)
	blocks := strings.SplitAfter(s, "-----\n") // begin, body+end, ...
	first, second, third := blocks[0]+blocks[1], blocks[2]+blocks[3], blocks[4]+blocks[5]
	for name, bad := range map[string]string{
		"nothing":              "",
		"request only":         first,
		"without data":         first + second,
		"swapped":              second + first + third,
		"data twice":           s + third,
		"white space after":    s + "\n",
		"text before":          "hello\n" + s,
		"text between":         first + "hello\n" + second + third,
		"carriage returns":     strings.ReplaceAll(s, "\n", "\r\n"),
		"a header":             strings.Replace(s, "PROVIDER-----\n", "PROVIDER-----\nA: b\n\n", 1),
		"no final newline":     strings.TrimSuffix(s, "\n"),
		"oversize":             s + strings.Repeat("\n", MaxRequestSize),
		"provider of two":      strings.Replace(s, "aW5zZWN1cmU=", "YSBiLi4=", 1),
		"provider with LF":     strings.Replace(s, "aW5zZWN1cmU=", "aW5zZQo=", 1),
		"non-canonical base64": strings.Replace(s, "aW5zZWN1cmU=", "aW5zZWN1cmV=", 1),
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Parse([]byte(bad))
			var format *FormatError
			if !errors.As(err, &format) {
				t.Errorf("got %v, want a FormatError", err)
			}
		})
	}
}

func TestMarshalRefusesWhatCannotBeParsed(t *testing.T) {
	for name, change := range map[string]func(*Request){
		"no request":    func(r *Request) { r.PKCS10 = nil },
		"no data":       func(r *Request) { r.Data = nil },
		"no provider":   func(r *Request) { r.Provider = "" },
		"upper case":    func(r *Request) { r.Provider = "TPM" },
		"hyphen first":  func(r *Request) { r.Provider = "-tpm" },
		"hyphen last":   func(r *Request) { r.Provider = "tpm-" },
		"64 characters": func(r *Request) { r.Provider = strings.Repeat("a", 64) },
		"oversize":      func(r *Request) { r.Data = make([]byte, MaxRequestSize) },
	} {
		t.Run(name, func(t *testing.T) {
			r := sample()
			change(&r)
			if _, err := r.Marshal(); err == nil {
				t.Error("was accepted")
			}
		})
	}
}

// FuzzParse: what is accepted has one encoding.
func FuzzParse(f *testing.F) {
	good, err := sample().Marshal()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte("-----BEGIN CERTIFICATE REQUEST-----\nAA==\n-----END CERTIFICATE REQUEST-----\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := Parse(data)
		if err != nil {
			return
		}
		again, err := r.Marshal()
		if err != nil {
			t.Fatalf("parsed, but does not marshal: %v", err)
		}
		if !bytes.Equal(again, data) {
			t.Fatal("two encodings of one request")
		}
	})
}
