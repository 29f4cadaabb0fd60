// SPDX-License-Identifier: Apache-2.0

package tpmmodel

import (
	"encoding/binary"

	"github.com/google/go-tpm/tpm2"
)

// symmetricOf is a TPMT_SYM_DEF or TPMT_SYM_DEF_OBJECT: AES in CFB mode, or nothing.
type symmetricOf struct{ aesBits int }

// symmetric reads one.
func (r *reader) symmetric() symmetricOf {
	switch alg := r.alg(); {
	case r.rc != 0 || alg == tpm2.TPMAlgNull:
		return symmetricOf{}
	case alg != tpm2.TPMAlgAES: // TPM_ALG_XOR and other ciphers are not modelled
		r.fail(tpm2.TPMRCSymmetric)
		return symmetricOf{}
	}
	bits := int(r.u16())
	r.check(bits == 128 || bits == 256 || bits == 192, tpm2.TPMRCValue)
	mode := r.alg()
	r.check(mode == tpm2.TPMAlgCFB, tpm2.TPMRCMode)
	return symmetricOf{bits}
}

// template is what TPM2_CreatePrimary is given: a TPMT_PUBLIC.
type template struct {
	// all is it, fixed the part up to the unique field.
	all, fixed []byte
	nameAlg    tpm2.TPMAlgID

	symmetric symmetricOf
	// scheme is the key's, TPM_ALG_NULL for none; schemeHash its hash.
	scheme, schemeHash tpm2.TPMAlgID
	curve              tpm2.TPMECCCurve
}

// Reserved bits of a TPMA_OBJECT.
const reservedAttributes = uint32(0xfff0f309)

// maxRSA is the size of the largest RSA key in bytes.
const maxRSA = 256

// template reads a TPMT_PUBLIC.
func (r *reader) template() *template {
	start := r.data
	t := &template{scheme: tpm2.TPMAlgNull}
	alg := r.alg()
	// KEYEDHASH and SYMCIPHER are not modelled
	r.check(alg == tpm2.TPMAlgECC || alg == tpm2.TPMAlgRSA, tpm2.TPMRCType)
	t.nameAlg = r.alg()
	_, ok := hashOf(t.nameAlg)
	r.check(ok, tpm2.TPMRCHash)
	r.check(r.u32()&reservedAttributes == 0, tpm2.TPMRCReservedBits)
	r.sized(maxDigest) // authPolicy
	t.symmetric = r.symmetric()
	t.scheme = r.alg()
	if alg == tpm2.TPMAlgRSA {
		// schemes for RSA keys are not modelled
		r.check(t.scheme == tpm2.TPMAlgNull, tpm2.TPMRCValue)
		bits := r.u16()
		r.check(bits == maxRSA*8, tpm2.TPMRCValue)
		r.u32() // exponent
		t.fixed = consumed(start, r.data)
		r.sized(maxRSA)
	} else {
		r.check(t.scheme == tpm2.TPMAlgNull || t.scheme == tpm2.TPMAlgECDSA, tpm2.TPMRCScheme)
		if t.scheme != tpm2.TPMAlgNull {
			t.schemeHash = r.alg()
			_, ok := hashOf(t.schemeHash)
			r.check(ok, tpm2.TPMRCHash)
		}
		t.curve = tpm2.TPMECCCurve(r.u16())
		r.check(curves[t.curve] != nil, tpm2.TPMRCCurve)
		kdf := r.alg()
		r.check(kdf == tpm2.TPMAlgNull, tpm2.TPMRCKDF)
		t.fixed = consumed(start, r.data)
		r.point()
	}
	if r.rc == 0 {
		t.all = consumed(start, r.data)
	}
	return t
}

func consumed(before, after []byte) []byte { return before[:len(before)-len(after)] }

// maxCoordinate is the size of the largest coordinate of a point (that of P-521, rounded up, in
// libtpms).
const maxCoordinate = 66

// point reads a TPMS_ECC_POINT.
func (r *reader) point() (x, y []byte) { return r.sized(maxCoordinate), r.sized(maxCoordinate) }

// check returns what makes a template none that a key can be made from (part 2, 8.3, and part 3,
// "TPM2_Create").
func (t *template) check(public tpm2.TPMTPublic) tpm2.TPMRC {
	a := public.ObjectAttributes
	h, _ := hashOf(t.nameAlg)
	policy := len(public.AuthPolicy.Buffer)
	switch {
	case policy != 0 && policy != h.Size():
		return tpm2.TPMRCSize
	case !a.SensitiveDataOrigin, a.FixedTPM != a.FixedParent, a.EncryptedDuplication && a.FixedTPM:
		return tpm2.TPMRCAttributes
	case a.SignEncrypt == a.Decrypt && (a.Restricted || !a.SignEncrypt):
		return tpm2.TPMRCAttributes
	}
	isStorage := a.Restricted && a.Decrypt
	switch {
	case isStorage != (t.symmetric.aesBits != 0):
		return tpm2.TPMRCSymmetric
	case isStorage && t.scheme != tpm2.TPMAlgNull, a.Restricted && a.SignEncrypt && t.scheme == tpm2.TPMAlgNull,
		!a.SignEncrypt && t.scheme == tpm2.TPMAlgECDSA:
		return tpm2.TPMRCScheme
	}
	if public.Type == tpm2.TPMAlgRSA {
		if parameters, err := public.Parameters.RSADetail(); err != nil || parameters.Exponent != 0 {
			return tpm2.TPMRCRange
		}
	}
	return 0
}

// pcrSelection reads a TPML_PCR_SELECTION.
func (r *reader) pcrSelection() []bankSelection {
	count := int(r.u32())
	r.check(count <= len(hashes)+1, tpm2.TPMRCSize)
	var all []bankSelection
	for range count {
		if r.rc != 0 {
			break
		}
		s := bankSelection{bank: r.alg()}
		_, ok := hashOf(s.bank)
		r.check(ok, tpm2.TPMRCHash)
		size := r.u8()
		r.check(size == pcrCount/8, tpm2.TPMRCValue)
		bitmap := r.bytes(pcrCount / 8)
		for i := range pcrCount {
			s.pcrs[i] = bitmap[i/8]>>(i%8)&1 == 1
		}
		all = append(all, s)
	}
	return all
}

// signScheme reads a TPMT_SIG_SCHEME.
func (r *reader) signScheme() (scheme, hash tpm2.TPMAlgID) {
	scheme = r.alg()
	if r.rc != 0 || scheme == tpm2.TPMAlgNull {
		return tpm2.TPMAlgNull, tpm2.TPMAlgNull
	}
	r.check(scheme == tpm2.TPMAlgECDSA, tpm2.TPMRCScheme) // no other is modelled
	hash = r.alg()
	_, ok := hashOf(hash)
	r.check(ok, tpm2.TPMRCHash)
	return scheme, hash
}

func appendAlg(b []byte, alg tpm2.TPMAlgID) []byte {
	return binary.BigEndian.AppendUint16(b, uint16(alg))
}
