// SPDX-License-Identifier: Apache-2.0

package attestation

import (
	"bytes"
	"encoding/hex"
	"strings"
	"testing"
)

// The value was computed without this code, from docs/spec.md: section 18 over the notation of
// section 2.
func TestOriginData(t *testing.T) {
	const want = "0c31bca22e298ce711bcf502c8ed78a4ccdcacbe22a57c6621180d7f6d66e189"
	got := OriginData("node-csr-a", []byte("request"))
	if hex.EncodeToString(got) != want {
		t.Errorf("%x", got)
	}
	for _, other := range [][]byte{OriginData("node-csr-b", []byte("request")), OriginData("node-csr-a", []byte("requests")), OriginData("", nil)} {
		if bytes.Equal(other, got) {
			t.Error("two objects have the same data")
		}
	}
}

// The shipped policies refuse annotations with the controller's prefix from nodes, those of earlier
// releases, too.
func TestOriginIsNotAnAnnotationOfTheController(t *testing.T) {
	prefix, _, _ := strings.Cut(AnnotationChallenge, "/")
	if strings.HasPrefix(AnnotationOrigin, prefix+"/") || AnnotationOrigin == AnnotationEK {
		t.Error(AnnotationOrigin)
	}
}
