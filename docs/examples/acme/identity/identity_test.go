// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"bytes"
	"encoding/hex"
	"strings"
	"testing"
)

// The platform's own programs are written in other languages: the bytes are pinned. The value was
// computed with Python's hashlib and struct.
func TestNonce(t *testing.T) {
	nonce := Nonce(SignerName, "node-csr-a", []byte{0x30, 0})
	if got, want := hex.EncodeToString(nonce), "699d129cf8bac5699d4dc57a068803414f4893c78010e67af408e198ab84b720"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if bytes.Equal(Nonce("ab", "c", nil), Nonce("a", "bc", nil)) || bytes.Equal(Nonce("a", "b", nil), Nonce("a", "", []byte("b"))) {
		t.Error("what belongs to one item can be moved to another")
	}
}

func TestParseLooksAtTheLengthFirst(t *testing.T) {
	if _, _, err := Parse(make([]byte, MaxSize+1)); err == nil || !strings.Contains(err.Error(), "longer than 4096 bytes") {
		t.Error(err)
	}
}
