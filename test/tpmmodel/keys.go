// SPDX-License-Identifier: Apache-2.0

package tpmmodel

import (
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

// maxPrimaries bounds how many primary keys are remembered.
const maxPrimaries = 16

// primary derives the key that a hierarchy's seed makes of a template and of what the caller adds: always the same.
func (t *TPM) primary(hierarchy tpm2.TPMHandle, template, sensitive []byte) (*key, error) {
	input := append(append(append([]byte{}, t.seeds[hierarchy]...), template...), sensitive...)
	id := sha256.Sum256(input)
	if k, ok := t.primaries[id]; ok {
		return k, nil
	}
	public, err := tpm2.Unmarshal[tpm2.TPMTPublic](template)
	if err != nil {
		return nil, err
	}
	stream, err := newStream(derive(t.seeds[hierarchy], "primary", id[:]))
	if err != nil {
		return nil, err
	}
	k := &key{}
	if public.Type == tpm2.TPMAlgRSA {
		err = k.makeRSA(stream)
	} else {
		var parameters *tpm2.TPMSECCParms
		if parameters, err = public.Parameters.ECCDetail(); err == nil {
			err = k.makeECC(stream, curves[parameters.CurveID])
		}
	}
	if err != nil {
		return nil, err
	}
	if len(t.primaries) >= maxPrimaries {
		clear(t.primaries)
	}
	t.primaries[id] = k
	return k, nil
}

// stream is what keys are made of, as long as need be.
type stream struct{ cipher.Stream }

func newStream(seed []byte) (stream, error) {
	block, err := aes.NewCipher(seed)
	if err != nil {
		return stream{}, err
	}
	//nolint:gosec // the same bytes each time are what it is for
	return stream{cipher.NewCTR(block, make([]byte, aes.BlockSize))}, nil
}

// next returns the next bytes.
func (s stream) next(n int) []byte {
	b := make([]byte, n)
	s.XORKeyStream(b, b)
	return b
}

// makeECC is FIPS 186-5, A.2.1: 64 bits more than the order has, taken modulo the order less 1, plus 1.
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

// prime returns the first prime of that many bytes, with the two highest bits set and no factor in common with the exponent.
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
