// SPDX-License-Identifier: Apache-2.0

package template

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/google/go-tpm/tpm2"
)

// A chip may store inputs of its EK in NV: a nonce, a template, or both. Both may change only the
// Unique field of a template of this package. A verifier compares everything else byte for byte:
// attributes, policy and parameters protect the EK. Unique is an input of the key's derivation. So
// another Unique gives another key of the same TPM, of the same strength.

// WithNonce returns the template with the content of the chip's NV index for a nonce. It fills the
// start of Unique: the modulus of an RSA key, or x of a point. The rest are zeros, as in the
// template without a nonce.
func (e EK) WithNonce(nonce []byte) (EK, error) {
	if e.Nonce == 0 {
		return EK{}, fmt.Errorf("EK template %s takes no nonce", e.Name)
	}
	if e.IsRSA() {
		if len(nonce) > rsaBits/8 {
			return EK{}, fmt.Errorf("nonce: %d bytes are more than a modulus has", len(nonce))
		}
		e.Public.Unique = tpm2.NewTPMUPublicID(tpm2.TPMAlgRSA, &tpm2.TPM2BPublicKeyRSA{Buffer: padded(nonce, rsaBits/8)})
		return e, nil
	}
	const size = 32 // P-256 is the only curve of the low range
	if len(nonce) > size {
		return EK{}, fmt.Errorf("nonce: %d bytes are more than a coordinate has", len(nonce))
	}
	e.Public.Unique = tpm2.NewTPMUPublicID(tpm2.TPMAlgECC, eccPoint(padded(nonce, size), make([]byte, size)))
	return e, nil
}

func padded(nonce []byte, size int) []byte {
	return append(bytes.Clone(nonce), make([]byte, size-len(nonce))...)
}

// WithTemplate returns the template with Unique from the content of the chip's NV index for a
// template: a marshalled TPMT_PUBLIC, with or without padding. The error says what else differs.
func (e EK) WithTemplate(stored []byte) (EK, error) {
	if !bytes.HasPrefix(stored, e.head) {
		return EK{}, fmt.Errorf("template: %s than that of %s", e.difference(stored), e.Name)
	}
	errUnique := errors.New("template: its unique field is of another form")
	first, rest, ok := sized(stored[len(e.head):])
	if !ok {
		return EK{}, errUnique
	}
	most := rsaBits / 8
	if e.IsRSA() {
		e.Public.Unique = tpm2.NewTPMUPublicID(tpm2.TPMAlgRSA, &tpm2.TPM2BPublicKeyRSA{Buffer: first})
	} else {
		var second []byte
		if second, rest, ok = sized(rest); !ok {
			return EK{}, errUnique
		}
		most = 48 // P-384
		if len(second) > most {
			return EK{}, errUnique
		}
		e.Public.Unique = tpm2.NewTPMUPublicID(tpm2.TPMAlgECC, eccPoint(first, second))
	}
	if len(first) > most || len(bytes.Trim(rest, "\x00")) > 0 && len(bytes.Trim(rest, "\xff")) > 0 {
		return EK{}, errUnique
	}
	return e, nil
}

// difference names the first field in which a marshalled TPMT_PUBLIC differs from the template
// (TPM 2.0 Library, part 2, "TPMT_PUBLIC").
func (e EK) difference(stored []byte) string {
	const fixed = 2 + 2 + 4 // type, nameAlg, objectAttributes
	if len(stored) < fixed {
		return "shorter"
	}
	policy := func(area []byte) []byte {
		digest, _, _ := sized(area[fixed:])
		return digest
	}
	switch {
	case !bytes.Equal(stored[:2], e.head[:2]):
		return "another type of key"
	case !bytes.Equal(stored[2:4], e.head[2:4]):
		return "another name algorithm"
	case !bytes.Equal(stored[4:fixed], e.head[4:fixed]):
		return fmt.Sprintf("other attributes (%#08x)", binary.BigEndian.Uint32(stored[4:]))
	case !bytes.Equal(policy(stored), policy(e.head)):
		return "another policy"
	}
	return "other parameters"
}
