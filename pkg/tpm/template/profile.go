// SPDX-License-Identifier: Apache-2.0

package template

import (
	"encoding/hex"

	"github.com/google/go-tpm/tpm2"
)

// policies are the authorisation policies of the EKs of one range and name algorithm (EK Credential
// Profile, annex B).
type policies struct {
	high    bool
	nameAlg tpm2.TPMAlgID
	aesBits tpm2.TPMKeyBits
	// policy is the EK's authPolicy.
	policy []byte
	// policyA is TPM2_PolicySecret(TPM_RH_ENDORSEMENT): it needs the endorsement hierarchy's
	// authorisation value, which is empty unless the owner set one.
	policyA []byte
	// policyC is TPM2_PolicyAuthorizeNV over an index of the profile, in which an owner may put
	// another policy. It is not used here. But PolicyB, TPM2_PolicyOR(PolicyA, PolicyC), needs
	// its digest.
	policyC []byte
}

func low() policies {
	a := mustHex("837197674484b3f81a90cc8d46a5d724fd52d76e06520b64f2a1da1b331469aa")
	return policies{nameAlg: tpm2.TPMAlgSHA256, aesBits: 128, policyA: a, policy: a}
}

func highSHA256() policies {
	return policies{
		high:    true,
		nameAlg: tpm2.TPMAlgSHA256,
		aesBits: 128,
		policyA: low().policyA,
		policyC: mustHex("3767e2edd43ff45a3a7e1eaefcef78643dca964632e7aad82c673a30d8633fde"),
		policy:  mustHex("ca3d0a99a2b93906f7a3342414efcfb3a385d44cd1fd459089d19b5071c0b7a0"),
	}
}

func highSHA384() policies {
	return policies{
		high:    true,
		nameAlg: tpm2.TPMAlgSHA384,
		aesBits: 256,
		policyA: mustHex("8bbf2266537c171cb56e403c4dc1d4b64f432611dc386e6f532050c3278c930e143e8bb1133824ccb431053871c6db53"),
		policyC: mustHex("d6032ce61f2fb3c240eb3cf6a33237ef2b6a16f4293c22b455e261cffd217ad5b4947c2d73e63005eed2dc2b3593d165"),
		policy:  mustHex("b26e7d28d11a50bc53d882bcf5fd3a1a074148bb35d3b4e4cb1c0ad9bde419cacb47ba09699646150f9fc000f3f80e12"),
	}
}

// attributes of an EK.
func (p policies) attributes() tpm2.TPMAObject {
	return tpm2.TPMAObject{
		FixedTPM:            true, // never leaves this TPM
		FixedParent:         true, // follows from FixedTPM
		SensitiveDataOrigin: true, // made by the TPM
		// the high range may be used with its empty authorisation value as well as by policy
		UserWithAuth:    p.high,
		AdminWithPolicy: true, // for what changes or certifies the key, by policy only
		// decrypts only credentials, salts and child keys
		Restricted: true,
		// decrypts; SignEncrypt must be clear in a restricted decryption key
		Decrypt: true,
		// NoDA is clear: the profile lets a wrong use of the EK count towards lockout.
	}
}

func rsaEK(of func() policies) tpm2.TPMTPublic {
	p := of()
	unique := make([]byte, rsaBits/8)
	if p.high {
		// the profile: zeros in the low range, nothing in the high one; the TPM makes another key
		// from each
		unique = nil
	}
	return tpm2.TPMTPublic{
		Type:             tpm2.TPMAlgRSA,
		NameAlg:          p.nameAlg,
		ObjectAttributes: p.attributes(),
		AuthPolicy:       tpm2.TPM2BDigest{Buffer: p.policy},
		Parameters: tpm2.NewTPMUPublicParms(tpm2.TPMAlgRSA, &tpm2.TPMSRSAParms{
			Symmetric: p.symmetric(),
			KeyBits:   rsaBits,
			Exponent:  0, // means 65537
		}),
		Unique: tpm2.NewTPMUPublicID(tpm2.TPMAlgRSA, &tpm2.TPM2BPublicKeyRSA{Buffer: unique}),
	}
}

func eccEK(of func() policies, on tpm2.TPMECCCurve) tpm2.TPMTPublic {
	p := of()
	// P-256 is the only curve of the low range
	unique := eccPoint(make([]byte, 32), make([]byte, 32))
	if p.high {
		unique = eccPoint(nil, nil)
	}
	return tpm2.TPMTPublic{
		Type:             tpm2.TPMAlgECC,
		NameAlg:          p.nameAlg,
		ObjectAttributes: p.attributes(),
		AuthPolicy:       tpm2.TPM2BDigest{Buffer: p.policy},
		Parameters:       tpm2.NewTPMUPublicParms(tpm2.TPMAlgECC, &tpm2.TPMSECCParms{Symmetric: p.symmetric(), CurveID: on}),
		Unique:           tpm2.NewTPMUPublicID(tpm2.TPMAlgECC, unique),
	}
}

// symmetric is the cipher that protects what the TPM decrypts with the EK: AES in CFB mode.
func (p policies) symmetric() tpm2.TPMTSymDefObject {
	return tpm2.TPMTSymDefObject{
		Algorithm: tpm2.TPMAlgAES,
		KeyBits:   tpm2.NewTPMUSymKeyBits(tpm2.TPMAlgAES, p.aesBits),
		Mode:      tpm2.NewTPMUSymMode(tpm2.TPMAlgAES, tpm2.TPMAlgCFB),
	}
}

func mustHex(s string) []byte {
	b, err := hex.DecodeString(s)
	if err != nil {
		panic(err) // a constant of this file
	}
	return b
}
