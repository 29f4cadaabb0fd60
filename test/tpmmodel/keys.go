// SPDX-License-Identifier: Apache-2.0

package tpmmodel

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/sha256"
	"fmt"
	"math/big"

	"github.com/google/go-tpm/tpm2"
)

// curves are those that keys can be on.
var curves = map[tpm2.TPMECCCurve]elliptic.Curve{tpm2.TPMECCNistP256: elliptic.P256(), tpm2.TPMECCNistP384: elliptic.P384()}

// key is a private key with its public area's unique field, marshalled.
type key struct {
	ecc    *ecdsa.PrivateKey
	rsa    *rsa.PrivateKey
	unique []byte
}

// primary is a key that was made of a template, with all that follows from that.
type primary struct {
	key
	hierarchy tpm2.TPMHandle
	template  *template
	public    tpm2.TPMTPublic
	// area is the marshalled public area.
	area                []byte
	name, qualifiedName []byte
}

// maxPrimaries bounds how many primary keys are remembered.
const maxPrimaries = 16

// primary derives the key that a hierarchy's seed makes of a template: always the same.
func (t *TPM) primary(hierarchy tpm2.TPMHandle, from *template) (*primary, tpm2.TPMRC) {
	id := sha256.Sum256(append(be32(uint32(hierarchy)), from.all...))
	if p, ok := t.primaries[id]; ok {
		return p, 0
	}
	asked, err := tpm2.Unmarshal[tpm2.TPMTPublic](from.all)
	if err != nil {
		return nil, tpm2.TPMRCFailure // it has been read
	}
	if rc := from.check(*asked); rc != 0 {
		return nil, about(rc, ofParameter, 2)
	}
	p := &primary{hierarchy: hierarchy, template: from}
	if err := p.make(asked.Type == tpm2.TPMAlgRSA, from.curve, newStream(derive(t.seeds[hierarchy], "primary", id[:]))); err != nil {
		return nil, tpm2.TPMRCFailure
	}
	p.area = append(bytes.Clone(from.fixed), p.unique...)
	public, err := tpm2.Unmarshal[tpm2.TPMTPublic](p.area)
	if err != nil {
		return nil, tpm2.TPMRCFailure
	}
	p.public = *public
	p.name = nameOf(from.nameAlg, p.area)
	p.qualifiedName = nameOf(from.nameAlg, be32(uint32(hierarchy)), p.name)
	if len(t.primaries) >= maxPrimaries {
		clear(t.primaries)
	}
	t.primaries[id] = p
	return p, 0
}

func (k *key) make(isRSA bool, curve tpm2.TPMECCCurve, s stream) error {
	if isRSA {
		return k.makeRSA(s)
	}
	return k.makeECC(s, curves[curve])
}

// stream is what keys are made of, as long as need be.
type stream struct{ cipher.Stream }

func newStream(seed []byte) stream {
	block, err := aes.NewCipher(seed)
	if err != nil {
		panic(err) // derive returns as many bytes as AES-256 takes
	}
	//nolint:gosec // the same bytes each time are what it is for
	return stream{cipher.NewCTR(block, make([]byte, aes.BlockSize))}
}

// next returns the next bytes.
func (s stream) next(n int) []byte {
	b := make([]byte, n)
	s.XORKeyStream(b, b)
	return b
}

// makeECC is FIPS 186-5, A.2.1: 64 bits more than the order has, taken modulo the order less 1,
// plus 1.
func (k *key) makeECC(s stream, curve elliptic.Curve) (err error) {
	size := (curve.Params().BitSize + 7) / 8
	d := new(big.Int).SetBytes(s.next(size + 8))
	one := big.NewInt(1)
	d.Mod(d, new(big.Int).Sub(curve.Params().N, one)).Add(d, one)
	if k.ecc, err = ecdsa.ParseRawPrivateKey(curve, d.FillBytes(make([]byte, size))); err != nil {
		return err
	}
	point, err := k.ecc.PublicKey.Bytes()
	if err != nil {
		return err
	}
	k.unique = append(sized(point[1:1+size]), sized(point[1+size:])...)
	return nil
}

const exponent = 65537

// makeRSA looks for two primes of half the size.
func (k *key) makeRSA(s stream) error {
	p, q := s.prime(maxRSA/2), s.prime(maxRSA/2)
	one := big.NewInt(1)
	phi := new(big.Int).Mul(new(big.Int).Sub(p, one), new(big.Int).Sub(q, one))
	k.rsa = &rsa.PrivateKey{
		PublicKey: rsa.PublicKey{N: new(big.Int).Mul(p, q), E: exponent},
		D:         new(big.Int).ModInverse(big.NewInt(exponent), phi),
		Primes:    []*big.Int{p, q},
	}
	k.rsa.Precompute()
	if err := k.rsa.Validate(); err != nil {
		return fmt.Errorf("a key that was made: %w", err)
	}
	k.unique = sized(k.rsa.N.FillBytes(make([]byte, maxRSA)))
	return nil
}

// prime returns the first prime of that many bytes, with the two highest bits set and no factor in
// common with the exponent.
func (s stream) prime(size int) *big.Int {
	rest := new(big.Int)
	for {
		b := s.next(size)
		b[0] |= 0xc0
		b[size-1] |= 1
		p := new(big.Int).SetBytes(b)
		if rest.Mod(p, big.NewInt(exponent)).Int64() != 1 && p.ProbablyPrime(20) {
			return p
		}
	}
}
