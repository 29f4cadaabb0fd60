// SPDX-License-Identifier: Apache-2.0

// Package tpmprovider implements evidence.Challenger for the provider tpm. It translates between
// CertificateSigningRequests and pkg/verifier/tpm.
package tpmprovider

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

// Provider is a evidence.Challenger for the evidence of a TPM.
type Provider struct {
	// Verifier verifies evidence, unless Latest is set.
	Verifier *tpm.Verifier
	// Latest returns the current verifier, such as sources.KeyStore.Verifier. While it returns nil,
	// no evidence can be verified, and requests wait.
	Latest func() *tpm.Verifier
}

func (p Provider) verifier() *tpm.Verifier {
	if p.Latest != nil {
		return p.Latest()
	}
	return p.Verifier
}

// These errors are no verdict on the evidence, so the request waits.
var (
	errNoVerifier = errors.New("there are no challenge keys yet")
	errNoHello    = errors.New("its hello is not found")
)

// Name returns "tpm".
func (Provider) Name() string { return "tpm" }

// Versions returns the versions that the verifier accepts.
func (p Provider) Versions() attestation.Versions {
	v := p.verifier()
	if v == nil {
		return attestation.Versions{attestation.VersionTPM}
	}
	return v.Versions()
}

// EK returns the fingerprint of the hello's EK.
func (Provider) EK(request, hello *certificatesv1.CertificateSigningRequest) string {
	if hello == nil {
		hello = request
	}
	ek, err := tpm.ClaimedEK(verifier.FiledOf(hello))
	if err != nil {
		return ""
	}
	return ek.String()
}

// EKTemplate returns the name of the template of the hello's EK.
func (Provider) EKTemplate(request, hello *certificatesv1.CertificateSigningRequest) string {
	if hello == nil {
		hello = request
	}
	return tpm.ClaimedEKTemplate(verifier.FiledOf(hello))
}

// OriginAK returns the Name of the AK in hex.
func (Provider) OriginAK(origin string, request *certificatesv1.CertificateSigningRequest) string {
	name, err := tpm.Origin(origin, request.Name, request.Spec.Request)
	if err != nil {
		return ""
	}
	return hex.EncodeToString(name)
}

// openHello parses hello, or request if hello is nil.
func openHello(v *tpm.Verifier, request, hello *certificatesv1.CertificateSigningRequest) *tpm.ParsedHello {
	if hello == nil {
		hello = request
	}
	return v.ParseHello(verifier.FiledOf(hello))
}

// HelloOf returns the name of the hello in the proof.
func (Provider) HelloOf(proof *certificatesv1.CertificateSigningRequest) (string, error) {
	return tpm.HelloName(verifier.FiledOf(proof))
}

// Verify asks the verifier.
func (p Provider) Verify(_ context.Context, q evidence.Question) verifier.Evidence {
	v := p.verifier()
	if v == nil {
		return verifier.Evidence{Provider: p.Name(), Err: errNoVerifier}
	}
	isHello := attestation.IsHelloSigner(q.Request.Spec.SignerName)
	refersTo := q.Hello
	if isHello {
		refersTo = nil
	}
	hello := openHello(v, q.Request, refersTo)
	evidence := verifier.Evidence{Provider: p.Name()}
	if ek, err := hello.ClaimedEK(); err == nil {
		evidence.EK = ek.String()
	}
	refused := func(err error) verifier.Evidence {
		evidence.Err, evidence.EKUntrusted = err, tpm.OnlyEKUntrusted(err)
		return evidence
	}
	if isHello {
		claim, err := hello.Verify(namedEK(hello, q.Named), q.Now)
		if err != nil {
			return refused(err)
		}
		evidence.EK, evidence.AK, evidence.SignerName = claim.EK.Fingerprint.String(), hex.EncodeToString(claim.AKName), claim.SignerName
		return evidence
	}
	if q.Hello == nil {
		// Other proofs wait for their hello.
		if err := v.VerifyWithoutHello(verifier.FiledOf(q.Request), q.Now); err != nil {
			return refused(err)
		}
		evidence.Err = errNoHello
		return evidence
	}
	shown, err := hello.VerifyProof(verifier.FiledOf(q.Request), namedEK(hello, q.Named), q.Now)
	if err != nil {
		return refused(err)
	}
	evidence.EK, evidence.AK, evidence.Boot = shown.EK.Fingerprint.String(), hex.EncodeToString(shown.AKName), &shown.Boot
	evidence.PCRBank, evidence.PCRs, evidence.EventLogPCRs, evidence.Warnings = shown.PCRBank, shown.PCRs, shown.EventLogPCRs, shown.Warnings
	return evidence
}

// namedEK returns the EK that a hello claims, if an authority names it.
func namedEK(hello *tpm.ParsedHello, named bool) []tpm.Fingerprint {
	ek, err := hello.ClaimedEK()
	if err != nil || !named {
		return nil
	}
	return []tpm.Fingerprint{ek}
}

// Challenge asks the verifier for a challenge.
func (p Provider) Challenge(hello *certificatesv1.CertificateSigningRequest, named bool, now time.Time) (string, time.Time, error) {
	v := p.verifier()
	if v == nil {
		return "", time.Time{}, errNoVerifier
	}
	opened := openHello(v, hello, nil)
	claim, err := opened.Verify(namedEK(opened, named), now)
	if err != nil {
		return "", time.Time{}, err
	}
	challenge, err := v.Challenge(rand.Reader, claim, now)
	if err != nil {
		return "", time.Time{}, err
	}
	value, err := challenge.Marshal()
	return string(value), time.Unix(challenge.Expires, 0), err
}
