// SPDX-License-Identifier: Apache-2.0

package attestation

import "fmt"

// Limits of a Proof.
const (
	// MaxEventLog bounds the measured-boot log, in bytes.
	MaxEventLog = 56 << 10
	// maxQuote bounds the TPMS_ATTEST and the TPMT_SIGNATURE, in bytes.
	maxQuote = 1 << 10
)

// Proof is the second round's document: the quote that answers a challenge. KeyID and Expires
// repeat those of the challenge, so that the controller need not keep the challenge. The secret of
// the quote's MAC is derived from both.
type Proof struct {
	Version Version `json:"version"`
	// Kind is "proof"; Marshal sets it.
	Kind string `json:"kind"`
	// HelloName and HelloUID are the hello's CertificateSigningRequest.
	HelloName string `json:"helloName"`
	HelloUID  string `json:"helloUID"`
	// KeyID and Expires are the challenge's.
	KeyID   string `json:"kid"`
	Expires int64  `json:"expires"`
	// PCRBank and PCRs are the quoted PCRs with their values, in the order of the challenge.
	PCRBank string `json:"pcrBank"`
	PCRs    []PCR  `json:"pcrs"`
	// Quote is the TPMS_ATTEST (TPM 2.0 Part 2, 10.12.12), and Signature the TPMT_SIGNATURE over
	// it.
	Quote     []byte `json:"quote"`
	Signature []byte `json:"signature"`
	// EventLog is the measured-boot log, as the firmware left it. Empty unless the challenge asked
	// for it.
	EventLog []byte `json:"eventLog,omitempty"`
}

// PCR is the value of one PCR. It can be trusted only as far as the quote over it.
type PCR struct {
	Index int    `json:"index"`
	Value []byte `json:"value"`
}

// Selection returns which PCRs the proof is about.
func (p *Proof) Selection() PCRSelection {
	s := PCRSelection{Bank: p.PCRBank}
	for _, pcr := range p.PCRs {
		s.Indexes = append(s.Indexes, pcr.Index)
	}
	return s
}

// Marshal returns the one encoding of p. It fails with a *DocumentError if p could not be parsed
// again.
func (p Proof) Marshal() ([]byte, error) {
	p.Kind = KindProof
	return encode(KindProof, MaxDocument, &p)
}

// ParseProof accepts exactly the bytes that Marshal writes; else it fails with a *DocumentError.
func ParseProof(data []byte) (*Proof, error) {
	p := &Proof{}
	if err := decode(KindProof, MaxDocument, data, p); err != nil {
		return nil, err
	}
	return p, nil
}

func (p *Proof) check() *DocumentError {
	fail := func(field, reason string) *DocumentError { return &DocumentError{KindProof, field, reason} }
	switch {
	case p.Kind != KindProof:
		return fail("kind", "not "+KindProof)
	case p.Version != VersionTPM:
		return fail("version", "not "+VersionTPM)
	case !bounded(p.HelloName, 253, "-."):
		return fail("helloName", "not an object's name")
	case !bounded(p.HelloUID, 64, "-"):
		return fail("helloUID", "not a UID")
	case !IsKeyID(p.KeyID):
		return fail("kid", "not a key's name")
	case p.Expires <= 0:
		return fail("expires", "not a time")
	case p.Selection().Check() != nil:
		return fail("pcrs", p.Selection().Check().Error())
	case !between(p.Quote, maxQuote):
		return fail("quote", fmt.Sprintf("must have 1 to %d bytes", maxQuote))
	case !between(p.Signature, maxQuote):
		return fail("signature", fmt.Sprintf("must have 1 to %d bytes", maxQuote))
	case len(p.EventLog) > MaxEventLog:
		return fail("eventLog", fmt.Sprintf("longer than %d bytes", MaxEventLog))
	}
	for _, pcr := range p.PCRs {
		if len(pcr.Value) != BankSize(p.PCRBank) {
			return fail("pcrs", "a value is not a digest of its bank")
		}
	}
	return nil
}
