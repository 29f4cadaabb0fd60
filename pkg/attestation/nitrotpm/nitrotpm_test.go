// SPDX-License-Identifier: Apache-2.0

package nitrotpm

import (
	"bytes"
	"encoding/hex"
	"strings"
	"testing"
)

// The messages are as ciborium encodes the requests and responses of AWS's crate
// aws-nitro-enclaves-nsm-api. These bytes were written by hand (RFC 8949, section 3).
func TestMessages(t *testing.T) {
	const request = "a1" + "6b4174746573746174696f6e" + // {"Attestation":
		"a3" + "69757365725f64617461" + "f6" + // {"user_data": null,
		"656e6f6e6365" + "420102" + // "nonce": h'0102',
		"6a7075626c69635f6b6579" + "f6" // "public_key": null}}
	if got := hex.EncodeToString(Request([]byte{1, 2})); got != request {
		t.Errorf("request %s, want %s", got, request)
	}
	const answer = "a1" + "6b4174746573746174696f6e" + // {"Attestation":
		"a1" + "68646f63756d656e74" + "43616263" // {"document": 'abc'}}
	if got := hex.EncodeToString(Answer([]byte("abc"))); got != answer {
		t.Errorf("answer %s, want %s", got, answer)
	}
	rest := bytes.Repeat([]byte{0xff}, 100) // of the buffer
	buffer, err := hex.DecodeString(answer)
	if err != nil {
		t.Fatal(err)
	}
	if document, err := ParseResponse(append(buffer, rest...)); err != nil || string(document) != "abc" {
		t.Errorf("document %q, %v", document, err)
	}
}

func TestParseResponseFails(t *testing.T) {
	for name, test := range map[string]struct{ buffer, want string }{
		"empty":            {"", "malformed"},
		"not a map":        {"\x80", "malformed"},
		"cut short":        {string(Answer([]byte("abc"))[:20]), "malformed"},
		"document as text": {"\xa1\x6bAttestation\xa1\x68document\x63abc", "malformed"},
		"an error":         {"\xa1\x65Error\x6dInputTooLarge", `"InputTooLarge"`},
		"a long error":     {"\xa1\x65Error\x79\x01\x00" + strings.Repeat("x", 256), `"` + strings.Repeat("x", 64) + `"`},
		"another response": {"\xa1\x69GetRandom\xa1\x66random\x41x", "malformed"},
		"null":             {"\xf6", "no document"},
	} {
		if document, err := ParseResponse([]byte(test.buffer)); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %q, %v, want an error with %s", name, document, err, test.want)
		}
	}
}

// FuzzResponse: no buffer panics, and a document is part of its buffer.
func FuzzResponse(f *testing.F) {
	f.Add(Answer([]byte("document")))
	f.Add([]byte("\xa1\x65Error\x6fInvalidArgument"))
	f.Fuzz(func(t *testing.T, buffer []byte) {
		document, err := ParseResponse(buffer)
		if err == nil && (len(document) == 0 || len(document) > len(buffer)) {
			t.Errorf("%d bytes of document in %d", len(document), len(buffer))
		}
	})
}
