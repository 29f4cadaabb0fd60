// SPDX-License-Identifier: Apache-2.0

package attestation

import "fmt"

// HelloSignerName is the signer of hellos. No signer issues for it: even an approved hello gets no
// certificate.
const HelloSignerName = "cluster.x-k8s.io/attestation-hello"

// The annotations with which the controller answers a hello, and the reasons of denials to which
// the plugin reacts.
const (
	// AnnotationChallenge holds a Challenge.
	AnnotationChallenge = "attestation.cluster.x-k8s.io/challenge"
	// AnnotationVersions holds the Versions that the controller serves, if it does not serve the
	// hello's version.
	AnnotationVersions = "attestation.cluster.x-k8s.io/supported-versions"
	// AnnotationEK says which EK the controller took, and from which source (Cluster API proposal
	// "Kubelet Authentication", which spells the prefix so). A value that a node wrote has no
	// effect.
	AnnotationEK = "cluster-x-k8s-io/tpm-endorsement-key"
	// ReasonVersion is the reason of the denial that AnnotationVersions goes with.
	ReasonVersion = "UnsupportedAttestationVersion"
	// ReasonExpired is the reason of the denial of a proof whose challenge expired, or whose node
	// was revoked since the hello. A new hello may follow at once.
	ReasonExpired = "AttestationChallengeExpired"
	// ReasonCompleted is the reason for which a hello is denied after its proof got the
	// certificate. It is the normal end of a hello, and does not refuse the node.
	ReasonCompleted = "AttestationCompleted"
	// ReasonNodeRegistered is the reason of a denial that an operator can end by deleting the Node.
	ReasonNodeRegistered = "NodeAlreadyRegistered"
	// ReasonSuspended is the reason of each denial while an operator has suspended the machine.
	ReasonSuspended = "MachineSuspended"
	// ReasonUnknownCredential and ReasonRequesterNotAllowed are reasons of a denial that speak
	// against the credential, not against the machine: another credential may get the certificate.
	ReasonUnknownCredential   = "UnknownCredential"
	ReasonRequesterNotAllowed = "RequesterNotAllowed"
)

// Limits of a Hello.
const (
	// MaxDocument bounds the hello and the proof, in bytes. That much fits into MaxRequestSize
	// after base64 is applied twice.
	MaxDocument = 88 << 10
	// MaxCertificates and MaxCertificate bound the EK's chain, and each certificate in bytes:
	// as many of the largest certificates as fit into a document. Chains of chips have up to five.
	MaxCertificates = 7
	MaxCertificate  = 8 << 10
	// MaxPublic bounds a TPMT_PUBLIC in bytes; that of an RSA-4096 key has some 560.
	MaxPublic = 1 << 10
)

// MaxSignerName bounds a signer's name in bytes (certificates.k8s.io/v1, spec.signerName).
const MaxSignerName = 571

// Hello is the first round's document: which TPM asks. All of it is the node's own claim. Nothing
// is proven before the challenge is answered.
type Hello struct {
	// Version is the one this hello and the proof are written in.
	Version Version `json:"version"`
	// Kind is "hello"; Marshal sets it.
	Kind string `json:"kind"`
	// Versions are all that the node accepts. Version is among them.
	Versions Versions `json:"versions"`
	// SignerName is the signer that the proof is going to ask.
	SignerName string `json:"signerName"`
	// EKTemplate names the template that the EK was made from: one of a closed list.
	EKTemplate string `json:"ekTemplate"`
	// EKPublic is the EK's TPMT_PUBLIC (TPM 2.0 Part 2, 12.2.4).
	EKPublic []byte `json:"ekPublic"`
	// EKCertificates are X.509 certificates in DER, the EK's first and its issuers after it. Empty
	// where the TPM has none.
	EKCertificates [][]byte `json:"ekCertificates,omitempty"`
	// AKPublic is the AK's TPMT_PUBLIC.
	AKPublic []byte `json:"akPublic"`
}

// Marshal returns the one encoding of h. It fails with a *DocumentError if h could not be parsed
// again.
func (h Hello) Marshal() ([]byte, error) {
	h.Kind = KindHello
	return encode(KindHello, MaxDocument, &h)
}

// ParseHello accepts exactly the bytes that Marshal writes; else it fails with a *DocumentError.
func ParseHello(data []byte) (*Hello, error) {
	h := &Hello{}
	if err := decode(KindHello, MaxDocument, data, h); err != nil {
		return nil, err
	}
	return h, nil
}

func (h *Hello) check() *DocumentError {
	fail := func(field, reason string) *DocumentError { return &DocumentError{KindHello, field, reason} }
	switch {
	case h.Kind != KindHello:
		return fail("kind", "not "+KindHello)
	case h.Versions.Check() != nil:
		return fail("versions", h.Versions.Check().Error())
	case h.Version != VersionTPM || h.Versions.Common(Versions{h.Version}) == "":
		return fail("version", "not "+VersionTPM+", or not among versions")
	case !bounded(h.SignerName, MaxSignerName, "./-:"):
		return fail("signerName", "not a signer's name")
	case !bounded(h.EKTemplate, 32, "-"):
		return fail("ekTemplate", "not a template's name")
	case !between(h.EKPublic, MaxPublic):
		return fail("ekPublic", fmt.Sprintf("must have 1 to %d bytes", MaxPublic))
	case !between(h.AKPublic, MaxPublic):
		return fail("akPublic", fmt.Sprintf("must have 1 to %d bytes", MaxPublic))
	case len(h.EKCertificates) > MaxCertificates:
		return fail("ekCertificates", fmt.Sprintf("more than %d", MaxCertificates))
	}
	for _, certificate := range h.EKCertificates {
		if !between(certificate, MaxCertificate) {
			return fail("ekCertificates", fmt.Sprintf("each has 1 to %d bytes", MaxCertificate))
		}
	}
	return nil
}
