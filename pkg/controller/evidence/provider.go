// SPDX-License-Identifier: Apache-2.0

// Package evidence has the interfaces of what an infrastructure provider implements: who verifies
// evidence, and who knows the machines and bootstrap tokens. Its functions are for their callers.
package evidence

import (
	"context"
	"errors"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// Provider verifies the evidence of an attestation provider.
type Provider interface {
	// Name is the provider's name in the PROVIDER block.
	Name() string
	// Verify verifies the evidence of a request. A Challenger may be asked about a proof without
	// its hello, since the hello may not be known yet. Then it returns verifier.Refusals only for
	// faults of the proof itself. For the missing hello it returns another error, or none.
	Verify(ctx context.Context, q Question) verifier.Evidence
}

// IsVerdict reports whether a Provider's error is a verdict about the evidence. Any other error may
// be temporary.
func IsVerdict(err error) bool {
	var refusals verifier.Refusals
	return err != nil && errors.As(err, &refusals)
}

// Question has the evidence that a Provider is asked to verify.
type Question struct {
	Request *certificatesv1.CertificateSigningRequest
	// Hello is the hello that a proof refers to. It is nil if Request is a hello, or if the hello
	// is not found.
	Hello *certificatesv1.CertificateSigningRequest
	// Named says that a source or a record names the EK that Challenger.EK returned, or that it is
	// trusted on first use.
	Named bool
	Now   time.Time
}

// Challenger is a Provider with two rounds, hello and proof. It does no I/O, and its only side
// effect is drawing random numbers for a challenge.
type Challenger interface {
	Provider
	// EK returns the endorsement key that a hello or proof claims, "" if it is malformed. Nothing
	// vouches for it.
	EK(request, hello *certificatesv1.CertificateSigningRequest) string
	// HelloOf returns the name of the hello that a proof refers to. If HelloOf fails, Verify must
	// refuse the proof and say why.
	HelloOf(proof *certificatesv1.CertificateSigningRequest) (string, error)
	// Challenge answers a hello that Verify has just accepted. It returns the value of the
	// annotation and the end of the challenge.
	Challenge(hello *certificatesv1.CertificateSigningRequest, named bool, now time.Time) (string, time.Time, error)
	// Versions are the versions of the documents that Verify accepts.
	Versions() attestation.Versions
}

// OriginVerifier is a Challenger whose plugins implement provider.Originator. It is optional.
type OriginVerifier interface {
	// OriginAK returns the AK whose TPM made the origin of this request, in the format of records,
	// "" if the origin does not verify. The origin is the value of the annotation
	// attestation.AnnotationOrigin. The AK may belong to any TPM: nothing vouches for it.
	OriginAK(origin string, request *certificatesv1.CertificateSigningRequest) string
}

// EKTemplater is a Challenger whose endorsement keys are made from templates. It is optional: the
// template is reported, and decides nothing.
type EKTemplater interface {
	// EKTemplate returns the name of the template of the endorsement key that a hello or proof
	// claims, "" if it is malformed. Nothing vouches for it.
	EKTemplate(request, hello *certificatesv1.CertificateSigningRequest) string
}
