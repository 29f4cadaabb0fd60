// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
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
	// Hello is what a proof of a Challenger's refers to, nil with a hello and where it is not there.
	Hello *certificatesv1.CertificateSigningRequest
	// Named says that an authority names the EK which Challenger.EK returned.
	Named bool
	Now   time.Time
}

// Challenger is a Provider of two rounds, pure but for the random numbers of a challenge.
type Challenger interface {
	Provider
	// EK returns what a hello or proof claims to be the machine's endorsement key, empty if it is malformed. Nothing vouches for it.
	EK(request, hello *certificatesv1.CertificateSigningRequest) string
	// HelloOf returns the name of the hello that a proof refers to. Of a proof with which that
	// fails, Judge says what is wrong.
	HelloOf(proof *certificatesv1.CertificateSigningRequest) (string, error)
	// Challenge answers a hello that Judge has just accepted: the annotation's value, and until when it is good.
	Challenge(hello *certificatesv1.CertificateSigningRequest, named bool, now time.Time) (string, time.Time, error)
	// Versions are those of the documents that it judges.
	Versions() attestation.Versions
}

// TPM is the provider tpm.
type TPM struct {
	// Verifier judges, unless Latest is set.
	Verifier *tpm.Verifier
	// Latest returns the verifier as it is now, nil while there is none: then nothing can be judged, and requests wait. See sources.KeyStore.
	Latest func() *tpm.Verifier
}

func (p TPM) verifier() *tpm.Verifier {
	if p.Latest != nil {
		return p.Latest()
	}
	return p.Verifier
}

// They are no verdict: what cannot be judged waits.
var (
	errNoVerifier = errors.New("there are no challenge keys yet")
	errNoHello    = errors.New("its hello is not there")
)

// Name returns "tpm".
func (TPM) Name() string { return "tpm" }

// Versions returns those that the verifier judges.
func (p TPM) Versions() attestation.Versions {
	v := p.verifier()
	if v == nil {
		return attestation.Versions{attestation.VersionTPM}
	}
	return v.Versions()
}

// EK returns the fingerprint of the hello's EK.
func (p TPM) EK(request, hello *certificatesv1.CertificateSigningRequest) string {
	v := p.verifier()
	if v == nil {
		return ""
	}
	ek, err := openHello(v, request, hello).ClaimedEK()
	if err != nil {
		return ""
	}
	return ek.String()
}

// openHello reads the hello that a request is, or that it refers to.
func openHello(v *tpm.Verifier, request, hello *certificatesv1.CertificateSigningRequest) *tpm.ParsedHello {
	if hello == nil {
		hello = request
	}
	return v.ParseHello(requestOf(hello))
}

// HelloOf returns the name in the proof.
func (p TPM) HelloOf(proof *certificatesv1.CertificateSigningRequest) (string, error) {
	v := p.verifier()
	if v == nil {
		return "", errNoVerifier
	}
	name, _, err := v.HelloReference(requestOf(proof))
	return name, err
}

// Judge has the verifier judge.
func (p TPM) Judge(_ context.Context, q Question) verifier.Evidence {
	v := p.verifier()
	if v == nil {
		return verifier.Evidence{Provider: p.Name(), Err: errNoVerifier}
	}
	isHello := q.Request.Spec.SignerName == attestation.HelloSignerName
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
		// Nothing could be right about a proof that does not parse, whatever its hello
		// says. One that parses waits for its hello.
		if _, _, err := v.HelloReference(requestOf(q.Request)); err != nil {
			return refused(err)
		}
		evidence.Err = errNoHello
		return evidence
	}
	shown, err := hello.VerifyProof(requestOf(q.Request), namedEK(hello, q.Named), q.Now)
	if err != nil {
		return refused(err)
	}
	evidence.EK, evidence.AK, evidence.Boot = shown.EK.Fingerprint.String(), hex.EncodeToString(shown.AKName), &shown.Boot
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

// Challenge has the verifier make one.
func (p TPM) Challenge(hello *certificatesv1.CertificateSigningRequest, named bool, now time.Time) (string, time.Time, error) {
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

// requestOf returns what the verifier is told of an object.
func requestOf(object *certificatesv1.CertificateSigningRequest) tpm.Request {
	usages := make([]string, 0, len(object.Spec.Usages))
	for _, usage := range object.Spec.Usages {
		usages = append(usages, string(usage))
	}
	return tpm.Request{
		Name: object.Name, UID: string(object.UID), SignerName: object.Spec.SignerName,
		Request: object.Spec.Request, Usages: usages, ExpirationSeconds: object.Spec.ExpirationSeconds,
		Created: object.CreationTimestamp.Time,
	}
}
