// SPDX-License-Identifier: Apache-2.0

package tpmmodel

import (
	"crypto"
	"crypto/hmac"
	"crypto/sha256"

	// The hashes that PCR banks and names are made with.
	_ "crypto/sha1" //nolint:gosec // a bank of real chips
	_ "crypto/sha512"

	"github.com/google/go-tpm/tpm2"
)

// maxDigest is the size of the largest digest.
const maxDigest = 64

// hashes are those that the model knows, in the order of its PCR banks.
var hashes = []tpm2.TPMAlgID{tpm2.TPMAlgSHA1, tpm2.TPMAlgSHA256, tpm2.TPMAlgSHA384, tpm2.TPMAlgSHA512}

// hashOf returns false for what is none that the model knows.
func hashOf(alg tpm2.TPMAlgID) (crypto.Hash, bool) {
	for _, known := range hashes {
		if known == alg {
			h, err := alg.Hash()
			return h, err == nil
		}
	}
	return 0, false
}

func digest(h crypto.Hash, parts ...[]byte) []byte {
	sum := h.New()
	for _, p := range parts {
		sum.Write(p)
	}
	return sum.Sum(nil)
}

func mac(h crypto.Hash, key []byte, parts ...[]byte) []byte {
	sum := hmac.New(h.New, key)
	for _, p := range parts {
		sum.Write(p)
	}
	return sum.Sum(nil)
}

// derive makes a secret out of another.
func derive(seed []byte, label string, context []byte) []byte {
	return tpm2.KDFa(crypto.SHA256, seed, label, context, nil, sha256.Size*8)
}

// nameOf is an algorithm with a digest by it: a Name.
func nameOf(alg tpm2.TPMAlgID, parts ...[]byte) []byte {
	h, _ := hashOf(alg) // checked when the public area was read
	return append(be16(int(alg)), digest(h, parts...)...)
}
