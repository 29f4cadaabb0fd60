// SPDX-License-Identifier: Apache-2.0

package tpmmodel

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/rand"
	"encoding/asn1"
	"encoding/binary"
	"math/big"
	"time"

	"github.com/google/go-tpm/tpm2"
)

// firmware is the model's version, as quotes have it.
const firmware = uint64(1)<<32 | 1

// quote is TPM2_Quote.
func (t *TPM) quote(c *call) ([]byte, tpm2.TPMRC) {
	extra := c.in.parameter(1).sized(maxData)
	scheme, schemeHash := c.in.parameter(2).signScheme()
	selected := c.in.parameter(3).pcrSelection()
	if rc := c.in.end(); rc != 0 {
		return nil, rc
	}
	o := c.entities[0].object
	switch {
	case !o.public.ObjectAttributes.SignEncrypt, o.ecc == nil:
		return nil, about(tpm2.TPMRCKey, ofHandle, 1)
	case o.template.scheme == tpm2.TPMAlgNull && scheme == tpm2.TPMAlgNull:
		return nil, about(tpm2.TPMRCScheme, ofParameter, 2)
	case o.template.scheme == tpm2.TPMAlgNull:
	case scheme != tpm2.TPMAlgNull && (scheme != o.template.scheme || schemeHash != o.template.schemeHash):
		return nil, about(tpm2.TPMRCScheme, ofParameter, 2)
	default:
		schemeHash = o.template.schemeHash
	}
	h, _ := hashOf(schemeHash)
	attest := tpm2.Marshal(t.attest(o, tpm2.TPMSAttest{
		Magic:     tpm2.TPMGeneratedValue,
		Type:      tpm2.TPMSTAttestQuote,
		ExtraData: tpm2.TPM2BData{Buffer: extra},
		Attested: tpm2.NewTPMUAttest(tpm2.TPMSTAttestQuote, &tpm2.TPMSQuoteInfo{
			PCRSelect: selectionOf(selected), PCRDigest: tpm2.TPM2BDigest{Buffer: t.pcrs.digest(h, selected)},
		}),
	}))
	signature, err := o.sign(h, schemeHash, attest)
	if err != nil {
		return nil, tpm2.TPMRCFailure
	}
	return append(sized(attest), signature...), 0
}

// attest completes a TPMS_ATTEST. Outside the endorsement and the platform hierarchy it does not
// tell what would make the TPM known by it (part 1, "Restricted Signing Key Attestations").
func (t *TPM) attest(o *object, a tpm2.TPMSAttest) tpm2.TPMSAttest {
	a.QualifiedSigner = tpm2.TPM2BName{Buffer: o.qualifiedName}
	a.ClockInfo = tpm2.TPMSClockInfo{Clock: uint64(time.Since(t.started).Milliseconds()), ResetCount: 1, Safe: true} //nolint:gosec // not negative
	a.FirmwareVersion = firmware
	if o.hierarchy != tpm2.TPMRHEndorsement && o.hierarchy != tpm2.TPMRHPlatform {
		noise := tpm2.KDFa(crypto.SHA512, t.proofs[tpm2.TPMRHOwner], "OBFUSCATE", o.qualifiedName, nil, 128)
		a.FirmwareVersion += binary.BigEndian.Uint64(noise)
		a.ClockInfo.ResetCount += binary.BigEndian.Uint32(noise[8:])
		a.ClockInfo.RestartCount += binary.BigEndian.Uint32(noise[12:])
	}
	return a
}

// sign returns a TPMT_SIGNATURE.
func (k *key) sign(h crypto.Hash, alg tpm2.TPMAlgID, data []byte) ([]byte, error) {
	der, err := ecdsa.SignASN1(rand.Reader, k.ecc, digest(h, data))
	if err != nil {
		return nil, err
	}
	var numbers struct{ R, S *big.Int }
	if _, err := asn1.Unmarshal(der, &numbers); err != nil {
		return nil, err
	}
	size := (k.ecc.Curve.Params().BitSize + 7) / 8
	field := func(n *big.Int) tpm2.TPM2BECCParameter {
		return tpm2.TPM2BECCParameter{Buffer: n.FillBytes(make([]byte, size))}
	}
	return tpm2.Marshal(tpm2.TPMTSignature{
		SigAlg: tpm2.TPMAlgECDSA,
		Signature: tpm2.NewTPMUSignature(tpm2.TPMAlgECDSA, &tpm2.TPMSSignatureECC{
			Hash: alg, SignatureR: field(numbers.R), SignatureS: field(numbers.S),
		}),
	}), nil
}
