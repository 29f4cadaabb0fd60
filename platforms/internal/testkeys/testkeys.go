// SPDX-License-Identifier: Apache-2.0

// Package testkeys makes public keys by number, for imitations of thousands of TPMs. A number
// always gives the same key. Nobody has the private RSA keys: their moduli are random numbers.
package testkeys

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/sha512"
	"fmt"
	"math/big"
)

// RSA2048 returns an RSA key of 2048 bits.
func RSA2048(number int) *rsa.PublicKey {
	var modulus []byte
	for part := range 4 {
		sum := sha512.Sum512(fmt.Append(nil, number, " ", part))
		modulus = append(modulus, sum[:]...)
	}
	modulus[0] |= 0x80
	modulus[len(modulus)-1] |= 1
	return &rsa.PublicKey{N: new(big.Int).SetBytes(modulus), E: 65537}
}

// ECC returns a key on a curve of at most 512 bits.
func ECC(curve elliptic.Curve, number int) *ecdsa.PublicKey {
	size := (curve.Params().BitSize + 7) / 8
	for attempt := 0; ; attempt++ { // nearly always the first one is below the curve's order
		sum := sha512.Sum512(fmt.Append(nil, number, " ", attempt))
		if key, err := ecdsa.ParseRawPrivateKey(curve, sum[:size]); err == nil {
			return &key.PublicKey
		}
	}
}
