// SPDX-License-Identifier: Apache-2.0

package attestation

import "fmt"

// Limits of a Challenge.
const (
	// MaxChallenge bounds the annotation, in bytes.
	MaxChallenge = 4 << 10
	// maxCredential and maxSecret bound the two halves of the credential, in bytes: an RSA-4096 EK
	// needs 514.
	maxCredential = 256
	maxSecret     = 1 << 10
	// maxKeyID bounds the name of the controller's key, in characters.
	maxKeyID = 64
	// maxPCR is the last PCR of a PC Client TPM.
	maxPCR = 23
)

// Challenge is the controller's answer to a hello. The node does not trust it. A forged challenge
// can make the node's TPM compute, and nothing else.
type Challenge struct {
	Version Version `json:"version"`
	// Kind is "challenge"; Marshal sets it.
	Kind string `json:"kind"`
	// KeyID names the controller's key that the secret is derived from.
	KeyID string `json:"kid"`
	// Expires is the end of the challenge's validity, in seconds since 1970.
	Expires int64 `json:"expires"`
	// CredentialBlob is a TPM2B_ID_OBJECT, and EncryptedSecret a TPM2B_ENCRYPTED_SECRET.
	// TPM2_MakeCredential returns them for the hello's EK and the Name of its AK (TPM 2.0 Part 3,
	// 12.6).
	CredentialBlob  []byte `json:"credentialBlob"`
	EncryptedSecret []byte `json:"encryptedSecret"`
	// PCRs are those to quote.
	PCRs PCRSelection `json:"pcrs"`
	// EventLog asks for the measured-boot log.
	EventLog bool `json:"eventLog"`
}

// PCRSelection is a set of PCRs in one bank.
type PCRSelection struct {
	// Bank is sha256, sha384 or sha512. SHA-1 banks prove nothing any more.
	Bank string `json:"bank"`
	// Indexes are 1 to 24 PCRs from 0 to 23, ascending, each once.
	Indexes []int `json:"indexes"`
}

// BankSize returns the digest size of a bank in bytes, 0 if it is none that can be asked for.
func BankSize(bank string) int {
	switch bank {
	case "sha256":
		return 32
	case "sha384":
		return 48
	case "sha512":
		return 64
	}
	return 0
}

// Check returns an error unless s is a set that can be asked for.
func (s PCRSelection) Check() error {
	if BankSize(s.Bank) == 0 {
		return fmt.Errorf("PCR bank: must be sha256, sha384 or sha512")
	}
	last := -1
	for _, index := range s.Indexes {
		if index <= last || index > maxPCR {
			return fmt.Errorf("PCRs: from 0 to %d, ascending, each once", maxPCR)
		}
		last = index
	}
	if last < 0 {
		return fmt.Errorf("PCRs: none selected")
	}
	return nil
}

// Marshal returns the one encoding of c. It fails with a *DocumentError if c could not be parsed
// again.
func (c Challenge) Marshal() ([]byte, error) {
	c.Kind = KindChallenge
	return encode(KindChallenge, MaxChallenge, &c)
}

// ParseChallenge accepts exactly the bytes that Marshal writes; else it fails with a
// *DocumentError.
func ParseChallenge(data []byte) (*Challenge, error) {
	c := &Challenge{}
	if err := decode(KindChallenge, MaxChallenge, data, c); err != nil {
		return nil, err
	}
	return c, nil
}

func (c *Challenge) check() *DocumentError {
	fail := func(field, reason string) *DocumentError { return &DocumentError{KindChallenge, field, reason} }
	switch {
	case c.Kind != KindChallenge:
		return fail("kind", "not "+KindChallenge)
	case c.Version != VersionTPM:
		return fail("version", "not "+VersionTPM)
	case !IsKeyID(c.KeyID):
		return fail("kid", "not a key's name")
	case c.Expires <= 0:
		return fail("expires", "not a time")
	case !between(c.CredentialBlob, maxCredential):
		return fail("credentialBlob", fmt.Sprintf("must have 1 to %d bytes", maxCredential))
	case !between(c.EncryptedSecret, maxSecret):
		return fail("encryptedSecret", fmt.Sprintf("must have 1 to %d bytes", maxSecret))
	case c.PCRs.Check() != nil:
		return fail("pcrs", c.PCRs.Check().Error())
	}
	return nil
}

// IsKeyID reports whether s can be a key's name in a challenge.
func IsKeyID(s string) bool { return bounded(s, maxKeyID, "-._") }
