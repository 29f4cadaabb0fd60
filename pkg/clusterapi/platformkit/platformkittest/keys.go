// SPDX-License-Identifier: Apache-2.0

package platformkittest

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/sha512"
	"fmt"
	"math/big"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

// RSAKey returns the RSA key of 2048 bits with a number, always the same. Nobody has the private
// key: the modulus is a random number.
func RSAKey(number int) *rsa.PublicKey {
	var modulus []byte
	for part := range 4 {
		sum := sha512.Sum512(fmt.Append(nil, number, " ", part))
		modulus = append(modulus, sum[:]...)
	}
	modulus[0] |= 0x80
	modulus[len(modulus)-1] |= 1
	return &rsa.PublicKey{N: new(big.Int).SetBytes(modulus), E: 65537}
}

// ECCKey returns the key with a number on a curve of at most 512 bits, always the same.
func ECCKey(curve elliptic.Curve, number int) *ecdsa.PublicKey {
	size := (curve.Params().BitSize + 7) / 8
	for attempt := 0; ; attempt++ { // nearly always the first one is below the curve's order
		sum := sha512.Sum512(fmt.Append(nil, number, " ", attempt))
		if key, err := ecdsa.ParseRawPrivateKey(curve, sum[:size]); err == nil {
			return &key.PublicKey
		}
	}
}

// Fingerprints returns the fingerprints of RSA and ECC keys.
func Fingerprints(keys ...crypto.PublicKey) []tpm.Fingerprint {
	var eks []tpm.Fingerprint
	for _, key := range keys {
		ek, err := clusterapi.EKFingerprint(key)
		if err != nil {
			panic(err)
		}
		eks = append(eks, ek)
	}
	return eks
}
