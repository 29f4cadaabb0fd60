// SPDX-License-Identifier: Apache-2.0

package attestation

import (
	"crypto/sha256"
	"fmt"
)

// AnnotationOrigin is on a hello or a proof. It holds an Origin, and the node sets it. Its prefix
// is not that of the controller's annotations: the admission policies refuse those from anybody
// else.
const AnnotationOrigin = "node-attestation.cluster.x-k8s.io/origin"

// MaxOrigin bounds the annotation, in bytes.
const MaxOrigin = 6 << 10

// labelOrigin distinguishes the quote of an Origin from the quote of a proof, whose extraData is a
// MAC.
const labelOrigin = "kubelet-authenticator attestation origin"

// Origin shows which TPM a request comes from. Unlike a hello it cannot be copied, and unlike a
// proof it can be verified without a challenge. It shows nothing else: every user of the TPM can
// make one at any time. So the controller orders requests by it, and makes no decision from it.
type Origin struct {
	Version Version `json:"version"`
	// Kind is "origin"; Marshal sets it.
	Kind string `json:"kind"`
	// AKPublic is the AK's TPMT_PUBLIC (TPM 2.0 Part 2, 12.2.4).
	AKPublic []byte `json:"akPublic"`
	// Quote is a TPMS_ATTEST (TPM 2.0 Part 2, 10.12.12) over no PCRs, whose extraData is
	// OriginData. Signature is the AK's TPMT_SIGNATURE over it.
	Quote     []byte `json:"quote"`
	Signature []byte `json:"signature"`
}

// OriginData is the extraData of an Origin's quote. It names one object: the
// CertificateSigningRequest of that name with that spec.request. So a copy on another object does
// not verify.
func OriginData(name string, request []byte) []byte {
	content := sha256.Sum256(request)
	var b items
	b.text(labelOrigin)
	b.text(string(VersionTPM))
	b.text(name)
	b.bytes(content[:])
	digest := sha256.Sum256(b)
	return digest[:]
}

// Marshal returns the one encoding of o. It fails with a *DocumentError if o could not be parsed
// again.
func (o Origin) Marshal() ([]byte, error) {
	o.Kind = KindOrigin
	return encode(KindOrigin, MaxOrigin, &o)
}

// ParseOrigin accepts exactly the bytes that Marshal writes; else it fails with a *DocumentError.
func ParseOrigin(data []byte) (*Origin, error) {
	o := &Origin{}
	if err := decode(KindOrigin, MaxOrigin, data, o); err != nil {
		return nil, err
	}
	return o, nil
}

func (o *Origin) check() *DocumentError {
	fail := func(field, reason string) *DocumentError { return &DocumentError{KindOrigin, field, reason} }
	size := fmt.Sprintf("must have 1 to %d bytes", maxQuote)
	switch {
	case o.Kind != KindOrigin:
		return fail("kind", "not "+KindOrigin)
	case o.Version != VersionTPM:
		return fail("version", "not "+string(VersionTPM))
	case !between(o.AKPublic, MaxPublic):
		return fail("akPublic", fmt.Sprintf("must have 1 to %d bytes", MaxPublic))
	case !between(o.Quote, maxQuote):
		return fail("quote", size)
	case !between(o.Signature, maxQuote):
		return fail("signature", size)
	}
	return nil
}
