// SPDX-License-Identifier: Apache-2.0

package tpmmodel

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/ecdsa"
	"crypto/hmac"
	"crypto/rand"
	"crypto/rsa"

	"github.com/google/go-tpm/tpm2"
)

// maxSecret is the size of the largest TPM2B_ENCRYPTED_SECRET, which RSA has, and maxBlob that of a
// TPM2B_ID_OBJECT: two digests with their sizes.
const (
	maxSecret = maxRSA
	maxBlob   = 2 * (2 + maxDigest)
)

// activateCredential is TPM2_ActivateCredential.
func (t *TPM) activateCredential(c *call) ([]byte, tpm2.TPMRC) {
	blob := c.in.parameter(1).sized(maxBlob)
	secret := c.in.parameter(2).sized(maxSecret)
	if rc := c.in.end(); rc != 0 {
		return nil, rc
	}
	ek := c.entities[1].object
	if a := ek.public.ObjectAttributes; !a.Decrypt || !a.Restricted {
		return nil, about(tpm2.TPMRCType, ofHandle, 2)
	}
	seed, rc := ek.open(secret, "IDENTITY")
	if rc != 0 {
		return nil, about(rc, ofParameter, 2)
	}
	credential, rc := ek.unwrap(blob, seed, c.entities[0].name)
	if rc != 0 {
		return nil, about(rc, ofParameter, 1)
	}
	return sized(credential), 0
}

// open returns the secret that somebody encrypted to the object's key (part 1, annexes B.10 and
// C.6).
func (o *object) open(encrypted []byte, label string) ([]byte, tpm2.TPMRC) {
	h, _ := hashOf(o.public.NameAlg)
	if o.rsa != nil {
		// OAEP's label ends in a zero.
		secret, err := rsa.DecryptOAEP(h.New(), rand.Reader, o.rsa, encrypted, append([]byte(label), 0))
		if err != nil || len(secret) > h.Size() {
			return nil, tpm2.TPMRCValue
		}
		return secret, 0
	}
	in := &reader{data: encrypted}
	x, y := in.point() // what is behind it nobody minds
	if in.rc != 0 {
		return nil, in.rc
	}
	size := (o.ecc.Curve.Params().BitSize + 7) / 8
	point := make([]byte, 1+2*size)
	point[0] = 4
	if len(bytes.TrimLeft(x, "\x00")) > size || len(bytes.TrimLeft(y, "\x00")) > size {
		return nil, tpm2.TPMRCECCPoint
	}
	fill(point[1:1+size], x)
	fill(point[1+size:], y)
	ephemeral, err := ecdsa.ParseUncompressedPublicKey(o.ecc.Curve, point)
	if err != nil {
		return nil, tpm2.TPMRCECCPoint
	}
	theirs, err := ephemeral.ECDH()
	if err != nil {
		return nil, tpm2.TPMRCECCPoint
	}
	ours, err := o.ecc.ECDH()
	if err != nil {
		return nil, tpm2.TPMRCFailure
	}
	z, err := ours.ECDH(theirs)
	if err != nil {
		return nil, tpm2.TPMRCNoResult
	}
	return tpm2.KDFe(h, z, label, x, o.unique[2:2+size], h.Size()*8), 0
}

// fill puts a number into a field of a fixed size.
func fill(field, number []byte) {
	number = bytes.TrimLeft(number, "\x00")
	copy(field[len(field)-len(number):], number)
}

// unwrap checks a TPMS_ID_OBJECT and returns the credential in it (part 1, "Credential
// Protection").
func (o *object) unwrap(blob, seed, name []byte) ([]byte, tpm2.TPMRC) {
	h, _ := hashOf(o.public.NameAlg)
	in := &reader{data: blob}
	integrity := in.sized(maxDigest)
	if in.rc != 0 {
		return nil, in.rc
	}
	identity := in.data
	hmacKey := tpm2.KDFa(h, seed, "INTEGRITY", nil, nil, h.Size()*8)
	if !hmac.Equal(integrity, mac(h, hmacKey, identity, name)) {
		return nil, tpm2.TPMRCIntegrity
	}
	symKey := tpm2.KDFa(h, seed, "STORAGE", name, nil, o.template.symmetric.aesBits)
	block, err := aes.NewCipher(symKey)
	if err != nil {
		return nil, tpm2.TPMRCFailure
	}
	plain := make([]byte, len(identity))
	//nolint:staticcheck // the mode that the specification prescribes; the HMAC authenticates
	cipher.NewCFBDecrypter(block, make([]byte, aes.BlockSize)).XORKeyStream(plain, identity)
	in = &reader{data: plain}
	credential := in.sized(maxDigest)
	if rc := in.end(); rc != 0 {
		return nil, rc
	}
	return credential, 0
}
