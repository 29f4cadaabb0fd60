// SPDX-License-Identifier: Apache-2.0

package evidence

import (
	"context"
	"errors"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// ClusterAPISigner is what an infrastructure provider implements for its own evidence of one round.
// It is the interface of the Cluster API proposal "Kubelet Authentication", with a context and on
// certificates.k8s.io/v1. FromSigner makes a Provider of it. The rules judge who may request, for
// which node name, and what the record allows. They are the same for every provider.
//
// An error that is a verifier.Refusals says that the evidence is false, and the request is denied.
// The node reads that error, so it must contain no secrets and nothing of the policy. Any other
// error says that the evidence could not be judged. The request waits, and the error is logged.
type ClusterAPISigner interface {
	// VerifyClientAttestationData returns nil if the evidence in a request for a client certificate
	// is genuine, and about the key in this request.
	VerifyClientAttestationData(ctx context.Context, request *certificatesv1.CertificateSigningRequest) error
	// VerifyServingAttestationData does the same for a serving certificate.
	VerifyServingAttestationData(ctx context.Context, request *certificatesv1.CertificateSigningRequest) error
	// MachineName returns the machine that the evidence belongs to, by its name in the
	// MachineSource. It uses verified data only. It returns "" if the machine is not known yet.
	MachineName(ctx context.Context, request *certificatesv1.CertificateSigningRequest) (string, error)
}

// FromSigner returns a Provider of this name. The signer judges its evidence.
func FromSigner(name string, signer ClusterAPISigner) Provider { return fromSigner{name, signer} }

type fromSigner struct {
	name   string
	signer ClusterAPISigner
}

func (p fromSigner) Name() string { return p.name }

var errNoMachine = errors.New("the machine that the evidence belongs to is not known yet")

// Verify asks the signer.
func (p fromSigner) Verify(ctx context.Context, q Question) verifier.Evidence {
	evidence := verifier.Evidence{Provider: p.name}
	if err := p.signer.VerifyClientAttestationData(ctx, q.Request); err != nil {
		evidence.Err = err
		return evidence
	}
	name, err := p.signer.MachineName(ctx, q.Request)
	if err == nil && name == "" {
		err = errNoMachine
	}
	evidence.Machine, evidence.Err = name, err
	return evidence
}

// InsecureSigner is the signer of the provider insecure, which has no evidence: the requester
// counts as the machine that its bootstrap token was made for. It is used only if the Rules have an
// InsecureSigner.
type InsecureSigner struct{ Tokens TokenSource }

var _ ClusterAPISigner = InsecureSigner{}

// insecureDocument is the whole evidence. It is compared byte for byte.
const insecureDocument = `{"version":"insecure/v1"}`

// VerifyClientAttestationData checks the document.
func (InsecureSigner) VerifyClientAttestationData(_ context.Context, request *certificatesv1.CertificateSigningRequest) error {
	content, err := attestation.Parse(request.Spec.Request)
	if err != nil || content.Provider != verifier.InsecureProvider || string(content.Data) != insecureDocument {
		return verifier.Refusals{{Reason: verifier.ReasonMalformedRequest, Message: "the document is not that of insecure/v1"}}
	}
	return nil
}

// VerifyServingAttestationData refuses: without evidence there are no serving certificates.
func (InsecureSigner) VerifyServingAttestationData(context.Context, *certificatesv1.CertificateSigningRequest) error {
	return ErrNoServingEvidence
}

// ErrNoServingEvidence refuses a request for a serving certificate, if the provider defines no
// evidence for serving certificates.
var ErrNoServingEvidence = verifier.Refusals{{Reason: verifier.ReasonProviderMismatch, Message: "this provider has no evidence for serving certificates"}}

// MachineName returns the machine that the token was made for.
func (s InsecureSigner) MachineName(ctx context.Context, request *certificatesv1.CertificateSigningRequest) (string, error) {
	id, ok := verifier.TokenID(request.Spec.Username)
	if !ok || s.Tokens == nil {
		return "", nil
	}
	token, err := s.Tokens.Token(ctx, id, time.Now())
	return token.Machine.Name, err
}
