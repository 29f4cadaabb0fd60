// SPDX-License-Identifier: Apache-2.0

package tpmprovider

import (
	"context"
	"fmt"
	"slices"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// Signer is a evidence.ClusterAPISigner for TPMs. It is for an infrastructure provider whose own
// approver needs the machine of a proof. It verifies like a Controller, and makes no challenges.
type Signer struct {
	Provider
	// Requests reads hellos. It must not be a cache.
	Requests client.Reader
	Machines evidence.MachineSource
}

var _ evidence.ClusterAPISigner = Signer{}

// VerifyClientAttestationData verifies a proof.
func (s Signer) VerifyClientAttestationData(ctx context.Context, request *certificatesv1.CertificateSigningRequest) error {
	_, err := s.machine(ctx, request)
	return err
}

// VerifyServingAttestationData refuses. A kubelet files its own requests for serving certificates,
// which have no evidence.
func (Signer) VerifyServingAttestationData(context.Context, *certificatesv1.CertificateSigningRequest) error {
	return evidence.ErrNoServingEvidence
}

// MachineName returns the one machine for which the source names the EK in the proof, "" if there
// is none.
func (s Signer) MachineName(ctx context.Context, request *certificatesv1.CertificateSigningRequest) (string, error) {
	return s.machine(ctx, request)
}

func (s Signer) machine(ctx context.Context, request *certificatesv1.CertificateSigningRequest) (string, error) {
	now := time.Now()
	hello, err := evidence.FindHello(ctx, s.Requests, s.Provider, request)
	if err != nil {
		return "", err
	}
	machines, err := s.Machines.Machines(ctx, now)
	if err != nil {
		return "", fmt.Errorf("machines: %w", err)
	}
	ek := s.EK(request, hello)
	named := slices.ContainsFunc(machines, func(m verifier.Machine) bool { return m.HasEK(ek) })
	evidence := s.Verify(ctx, evidence.Question{Request: request, Hello: hello, Named: named, Now: now})
	if evidence.Err != nil {
		return "", evidence.Err
	}
	machines = slices.DeleteFunc(machines, func(m verifier.Machine) bool { return !m.HasEK(evidence.EK) })
	switch len(machines) {
	case 0:
		return "", nil
	case 1:
		return machines[0].Ref.Name, nil
	}
	return "", verifier.Refusals{{Reason: verifier.ReasonAmbiguousMachine, Message: "the endorsement key is named for more than one machine"}}
}
