// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// Provider is the verifier's half of an attestation provider.
type Provider interface {
	// Name is that in the PROVIDER block.
	Name() string
	// Judge judges the evidence of a request. A Challenger refuses a proof without its hello
	// only for what is wrong with the proof itself, since the hello may only not be known yet.
	// For the missing hello it returns another error, or none.
	Judge(ctx context.Context, q Question) verifier.Evidence
}

// Question is what a Provider is asked to judge.
type Question struct {
	Request *certificatesv1.CertificateSigningRequest
	// Hello is the one that a proof refers to. It is nil for a hello, and if there is none.
	Hello *certificatesv1.CertificateSigningRequest
	// Named says that an authority names the EK which Challenger.EK returned.
	Named bool
	Now   time.Time
}

// Challenger is a Provider of two rounds. It is pure except for the random numbers of a challenge.
type Challenger interface {
	Provider
	// EK returns the endorsement key that a hello or proof claims, "" if it is malformed. Nothing
	// vouches for it.
	EK(request, hello *certificatesv1.CertificateSigningRequest) string
	// HelloOf returns the name of the hello that a proof refers to. If it fails, Judge says what is
	// wrong with the proof.
	HelloOf(proof *certificatesv1.CertificateSigningRequest) (string, error)
	// Challenge answers a hello that Judge has just accepted. It returns the annotation's value and
	// when it expires.
	Challenge(hello *certificatesv1.CertificateSigningRequest, named bool, now time.Time) (string, time.Time, error)
	// Versions are those of the documents that Judge accepts.
	Versions() attestation.Versions
}

// OriginVerifier is a Challenger of nodes that are a provider.Originator. It is optional.
type OriginVerifier interface {
	// OriginAK returns the AK, as records have it, whose TPM made an origin for this request, "" if the
	// origin does not verify. The origin is the value of the annotation attestation.AnnotationOrigin.
	// The AK may be anybody's.
	OriginAK(origin string, request *certificatesv1.CertificateSigningRequest) string
}

// EKTemplater is a Challenger whose endorsement keys are made from templates. It is optional: the
// template is reported, and decides nothing.
type EKTemplater interface {
	// EKTemplate returns the name of the template of the endorsement key that a hello or proof
	// claims, "" if it is malformed. Nothing vouches for it.
	EKTemplate(request, hello *certificatesv1.CertificateSigningRequest) string
}
