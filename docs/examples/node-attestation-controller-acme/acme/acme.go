// SPDX-License-Identifier: Apache-2.0

// Package acme shows what an infrastructure provider implements for its controller: what evidence
// is worth, and which machine it is of. Who may ask, for which node name, and what the record says,
// the rules judge.
package acme

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"slices"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/docs/examples/acme/identity"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// The reasons of this provider. They need not be registered anywhere: they begin with Attestation
// and the provider's name, and never change.
const (
	// ReasonMalformed: the request or the document is not in its one encoding, or is of another
	// provider or version.
	ReasonMalformed verifier.Reason = "AttestationAcmeMalformed"
	// ReasonSignature: the platform has not signed the document.
	ReasonSignature verifier.Reason = "AttestationAcmeSignature"
	// ReasonRequest: it was signed for another request, or another audience. It was copied.
	ReasonRequest verifier.Reason = "AttestationAcmeRequest"
	// ReasonAge: it was signed too long before the request was filed, or after.
	ReasonAge verifier.Reason = "AttestationAcmeAge"
)

// A document is signed just before the request is filed, unless the API server is away for a while.
// Evidence is judged at the time when the request was filed, by the API server's clock. So it does
// not expire while the request waits for its machine.
const (
	maxAge = 10 * time.Minute
	// maxAhead is how far the platform's clock may be ahead.
	maxAhead = time.Minute
)

// Signer judges the documents of the platform. The zero value judges nothing: requests wait.
type Signer struct {
	// PlatformKey is the platform's.
	PlatformKey ed25519.PublicKey
	// Machines are those of the cluster, by the provider IDs that an authority gave them.
	Machines evidence.MachineSource
}

var _ evidence.ClusterAPISigner = Signer{}

// VerifyClientAttestationData checks that the platform signed the document for this request, not
// long before it was filed.
func (s Signer) VerifyClientAttestationData(_ context.Context, request *certificatesv1.CertificateSigningRequest) error {
	_, err := s.verify(request)
	return err
}

// VerifyServingAttestationData refuses: a kubelet files its own requests for serving certificates,
// and adds no evidence to them.
func (Signer) VerifyServingAttestationData(context.Context, *certificatesv1.CertificateSigningRequest) error {
	return refuse(verifier.ReasonProviderMismatch, "this provider has no evidence for serving certificates")
}

// MachineName returns the machine that has the instance's provider ID. No machine may have it yet:
// then the request waits.
func (s Signer) MachineName(ctx context.Context, request *certificatesv1.CertificateSigningRequest) (string, error) {
	says, err := s.verify(request)
	if err != nil {
		return "", err
	}
	machines, err := s.Machines.Machines(ctx, time.Now())
	if err != nil {
		return "", fmt.Errorf("machines: %w", err)
	}
	id := identity.ProviderID(says.Instance)
	machines = slices.DeleteFunc(machines, func(m verifier.Machine) bool { return m.ProviderID != id })
	switch len(machines) {
	case 0:
		return "", nil
	case 1:
		return machines[0].Ref.Name, nil
	}
	return "", refuse(verifier.ReasonAmbiguousMachine, "more than one machine has the provider ID %s", id)
}

var errNoKey = errors.New("there is no key of the platform to verify with")

// verify returns what the platform says of the machine that filed a request.
func (s Signer) verify(request *certificatesv1.CertificateSigningRequest) (identity.Statement, error) {
	if len(s.PlatformKey) != ed25519.PublicKeySize {
		return identity.Statement{}, errNoKey // the operator's to mend: no verdict on the node
	}
	content, err := attestation.Parse(request.Spec.Request)
	if err != nil {
		return identity.Statement{}, refuse(ReasonMalformed, "%v", err)
	}
	if content.Provider != identity.Provider {
		return identity.Statement{}, refuse(ReasonMalformed, "the evidence is another provider's")
	}
	document, says, err := identity.Parse(content.Data)
	if err != nil {
		return identity.Statement{}, refuse(ReasonMalformed, "%v", err)
	}
	age := request.CreationTimestamp.Sub(time.Unix(says.IssuedAt, 0))
	switch {
	case !document.SignedBy(s.PlatformKey): // before anything that it says
		err = refuse(ReasonSignature, "the platform has not signed the document")
	case says.Audience != identity.Audience:
		err = refuse(ReasonRequest, "the document is for another audience")
	case !bytes.Equal(says.Nonce, identity.Nonce(request.Spec.SignerName, request.Name, content.PKCS10)):
		err = refuse(ReasonRequest, "the document is for another request")
	case age > maxAge || age < -maxAhead:
		err = refuse(ReasonAge, "the document was not signed within %s before the request was filed", maxAge)
	}
	if err != nil {
		return identity.Statement{}, err
	}
	return says, nil
}

// refuse returns an error for which the request is denied; the node reads it.
func refuse(reason verifier.Reason, format string, arguments ...any) error {
	var refusals verifier.Refusals
	refusals.Add(reason, format, arguments...)
	return refusals
}
