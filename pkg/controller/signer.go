// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// ClusterAPISigner is what an infrastructure provider implements for evidence of its own, of one round: the interface of the Cluster API
// proposal "Kubelet Authentication", on certificates.k8s.io/v1 and with a context. FromSigner makes a Provider of it. Who may ask, for
// which node name, and what the record says, is not its business: the rules judge that for every provider alike.
//
// An error that is a verifier.Refusals says that the evidence is false, and the request is denied; the node is told, so there are no secrets
// in it, and nothing of the policy. With any other error it could not be judged, and the request waits; that is for the log.
type ClusterAPISigner interface {
	// VerifyClientAttestationData returns nil if the evidence in a request for a client certificate is genuine, and about this very
	// request: its key, and nobody else's.
	VerifyClientAttestationData(ctx context.Context, request *certificatesv1.CertificateSigningRequest) error
	// VerifyServingAttestationData does the same for a serving certificate.
	VerifyServingAttestationData(ctx context.Context, request *certificatesv1.CertificateSigningRequest) error
	// MachineName returns which machine the evidence is of, as the MachineSource names it, by nothing but what was verified; empty if that is
	// not known yet.
	MachineName(ctx context.Context, request *certificatesv1.CertificateSigningRequest) (string, error)
}

// FromSigner returns the Provider of that name whose evidence the signer judges.
func FromSigner(name string, signer ClusterAPISigner) Provider { return fromSigner{name, signer} }

type fromSigner struct {
	name   string
	signer ClusterAPISigner
}

func (p fromSigner) Name() string { return p.name }

var errNoMachine = errors.New("it is not known yet which machine the evidence is of")

// Judge asks the signer.
func (p fromSigner) Judge(ctx context.Context, q Question) verifier.Evidence {
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

// InsecureSigner is the signer of the provider insecure, which has no evidence: whichever machine the bootstrap token was made for, that it
// is. Only Rules with an InsecureSigner ask it.
type InsecureSigner struct{ Tokens TokenSource }

var _ ClusterAPISigner = InsecureSigner{}

// insecureDocument is all the evidence there is, byte for byte.
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
	return errNoServing
}

var errNoServing = verifier.Refusals{{Reason: verifier.ReasonProviderMismatch, Message: "this provider has no evidence for serving certificates"}}

// MachineName returns the machine that the token was made for.
func (s InsecureSigner) MachineName(ctx context.Context, request *certificatesv1.CertificateSigningRequest) (string, error) {
	id, ok := verifier.TokenID(request.Spec.Username)
	if !ok || s.Tokens == nil {
		return "", nil
	}
	token, err := s.Tokens.Token(ctx, id, time.Now())
	return token.Machine.Name, err
}

// TPMSigner answers for the provider tpm what the controller itself finds out on its way: for a provider whose own approver wants to know
// which machine a proof is of. It challenges nobody.
type TPMSigner struct {
	TPM
	// Requests reads hellos, from the API server itself.
	Requests client.Reader
	Machines MachineSource
}

var _ ClusterAPISigner = TPMSigner{}

// VerifyClientAttestationData judges a proof.
func (s TPMSigner) VerifyClientAttestationData(ctx context.Context, request *certificatesv1.CertificateSigningRequest) error {
	_, err := s.machine(ctx, request)
	return err
}

// VerifyServingAttestationData refuses: a kubelet files its own requests for serving certificates, and adds no evidence to them.
func (TPMSigner) VerifyServingAttestationData(context.Context, *certificatesv1.CertificateSigningRequest) error {
	return errNoServing
}

// MachineName returns the one machine for which the source names the EK that the proof shows.
func (s TPMSigner) MachineName(ctx context.Context, request *certificatesv1.CertificateSigningRequest) (string, error) {
	return s.machine(ctx, request)
}

func (s TPMSigner) machine(ctx context.Context, request *certificatesv1.CertificateSigningRequest) (string, error) {
	now := time.Now()
	hello, err := helloOf(ctx, s.Requests, s.TPM, request)
	if err != nil {
		return "", err
	}
	machines, err := s.Machines.Machines(ctx, now)
	if err != nil {
		return "", fmt.Errorf("machines: %w", err)
	}
	ek := s.EK(request, hello)
	evidence := s.Judge(ctx, Question{Request: request, Hello: hello, Named: namesEK(machines, ek), Now: now})
	if evidence.Err != nil {
		return "", evidence.Err
	}
	machines = slices.DeleteFunc(machines, func(m verifier.Machine) bool { return !hasEK(m, evidence.EK) })
	switch len(machines) {
	case 0:
		return "", nil
	case 1:
		return machines[0].Ref.Name, nil
	}
	return "", verifier.Refusals{{Reason: verifier.ReasonAmbiguousMachine, Message: "the endorsement key is named for more than one machine"}}
}

func hasEK(m verifier.Machine, ek string) bool {
	return ek != "" && slices.ContainsFunc(m.EKs, func(n verifier.NamedEK) bool { return n.EK == ek })
}

func namesEK(machines []verifier.Machine, ek string) bool {
	return slices.ContainsFunc(machines, func(m verifier.Machine) bool { return hasEK(m, ek) })
}
