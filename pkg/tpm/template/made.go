// SPDX-License-Identifier: Apache-2.0

package template

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"encoding/binary"
	"errors"
	"sync"

	"github.com/google/go-tpm/tpm2"
)

// A public area is compared with a template as bytes. A marshalled area has its parameters first,
// which must equal the template's, and then its key. So only the key is parsed. go-tpm marshals
// each template only once, since by reflection that takes longer than the signatures of a whole
// hello.
var (
	akHead  = sync.OnceValue(func() []byte { return head(AK()) })
	ekHeads = sync.OnceValue(func() map[string][]byte {
		heads := map[string][]byte{}
		for _, k := range kinds() {
			heads[k.name] = head(k.public())
		}
		return heads
	})
)

// head returns a marshalled template up to its key.
func head(template tpm2.TPMTPublic) []byte {
	if template.Type == tpm2.TPMAlgRSA {
		template.Unique = tpm2.NewTPMUPublicID(tpm2.TPMAlgRSA, &tpm2.TPM2BPublicKeyRSA{})
		all := tpm2.Marshal(template)
		return all[:len(all)-2] // without the size of the empty buffer
	}
	template.Unique = tpm2.NewTPMUPublicID(tpm2.TPMAlgECC, eccPoint(nil, nil))
	all := tpm2.Marshal(template)
	return all[:len(all)-4] // without the sizes of the two empty buffers
}

// KeyError says that a public area matches a template, but has an invalid key. The key is a point
// that is not on the curve, or an invalid modulus.
type KeyError struct{ Err error }

func (e *KeyError) Error() string { return e.Err.Error() }

// Unwrap returns the error of the key.
func (e *KeyError) Unwrap() error { return e.Err }

// CheckAK returns the key in an AK's marshalled public area. It returns an error unless the area is
// the template, byte for byte but for the point, and the point is on the curve. The error is a
// *KeyError if only the point is wrong. Only credential activation shows that an AK of this form is
// in a TPM, and in which.
func CheckAK(public []byte) (*ecdsa.PublicKey, error) {
	_, key, err := made(AK(), akHead(), public)
	if err != nil {
		return nil, err
	}
	ak, ok := key.(*ecdsa.PublicKey)
	if !ok { // not reached: the template is for an ECC key
		return nil, errNotMade
	}
	return ak, nil
}

// CheckEK returns the template in the closed list that made an EK's marshalled public area, and its
// key. The error is a *KeyError if only the key is wrong.
func CheckEK(public []byte) (EK, crypto.PublicKey, error) {
	for _, k := range kinds() {
		if !bytes.HasPrefix(public, ekHeads()[k.name]) {
			continue // at most one has this head
		}
		e := k.ek()
		_, key, err := e.Parse(public)
		if err != nil {
			return EK{}, nil, err
		}
		return e, key, nil
	}
	return EK{}, nil, errNotMade
}

// Parse reads the marshalled public area of an EK of this template, and returns its key too. The
// error is a *KeyError if only the key is wrong.
func (e EK) Parse(public []byte) (tpm2.TPMTPublic, crypto.PublicKey, error) {
	return made(e.Public, e.head, public)
}

var errNotMade = errors.New("public area: not made from a template that is known here")

// made reads a public area that starts with a template's head. The rest has only one encoding, and
// each of its bytes is checked.
func made(template tpm2.TPMTPublic, head, public []byte) (tpm2.TPMTPublic, crypto.PublicKey, error) {
	if len(public) > maxPublic || len(head) == 0 || !bytes.HasPrefix(public, head) {
		return tpm2.TPMTPublic{}, nil, errNotMade
	}
	area, rest := template, public[len(head):]
	if template.Type == tpm2.TPMAlgRSA {
		modulus, rest, ok := sized(rest)
		if !ok || len(rest) > 0 {
			return tpm2.TPMTPublic{}, nil, errNotMade
		}
		area.Unique = tpm2.NewTPMUPublicID(tpm2.TPMAlgRSA, &tpm2.TPM2BPublicKeyRSA{Buffer: modulus})
	} else {
		x, rest, okX := sized(rest)
		y, rest, okY := sized(rest)
		if !okX || !okY || len(rest) > 0 {
			return tpm2.TPMTPublic{}, nil, errNotMade
		}
		area.Unique = tpm2.NewTPMUPublicID(tpm2.TPMAlgECC, eccPoint(x, y))
	}
	key, err := PublicKey(area)
	if err != nil {
		return tpm2.TPMTPublic{}, nil, &KeyError{err}
	}
	return area, key, nil
}

// sized reads a TPM2B: two bytes of size, and as many bytes. It returns a copy of them, and the
// rest.
func sized(data []byte) (buffer, rest []byte, ok bool) {
	if len(data) < 2 {
		return nil, nil, false
	}
	size := int(binary.BigEndian.Uint16(data))
	data = data[2:]
	if len(data) < size {
		return nil, nil, false
	}
	return bytes.Clone(data[:size]), data[size:], true
}
