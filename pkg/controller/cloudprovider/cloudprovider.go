// SPDX-License-Identifier: Apache-2.0

// Package cloudprovider implements evidence.Provider for the identities of the clouds' instances.
// It joins the verifier of a cloud, the cache of the service that the verifier needs, and the
// machines.
package cloudprovider

import (
	"context"
	"fmt"
	"slices"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/cloud"
)

// Provider is an evidence.Provider of a cloud. It has one round.
type Provider struct {
	// Cloud is the provider's name in requests.
	Cloud string
	// Judge returns what the cloud vouches for. The error is a verifier.Refusals if the evidence is
	// false. Any other error makes the request wait.
	Judge Judge
	// Machines are asked which machine has the instance's provider ID.
	Machines evidence.MachineSource
	// Rules know the sources that name instances.
	Rules *verifier.Rules
}

// Judge judges the evidence of a request. providerID is the one that the request claims, if a
// machine has it, else "". It is only a hint: it says nothing about who filed the request.
type Judge func(ctx context.Context, request verifier.Filed, providerID string) (*cloud.Verified, error)

// WithoutService returns the Judge of a verifier that needs no service and no machine.
func WithoutService(verify func(verifier.Filed) (*cloud.Verified, error)) Judge {
	return func(_ context.Context, request verifier.Filed, _ string) (*cloud.Verified, error) {
		return verify(request)
	}
}

// Name returns the name of the cloud's provider.
func (p Provider) Name() string { return p.Cloud }

// Verify judges the evidence, and finds the instance's machine.
func (p Provider) Verify(ctx context.Context, q evidence.Question) verifier.Evidence {
	found := verifier.Evidence{Provider: p.Cloud}
	machines, err := evidence.MachinesOf(ctx, p.Machines, q.Now)
	if err != nil {
		found.Err = fmt.Errorf("machines: %w", err)
		return found
	}
	verified, err := p.Judge(ctx, verifier.FiledOf(q.Request), p.claimed(q, machines))
	if err != nil {
		found.Err = err
		return found
	}
	instance := verified.Instance
	found.EK, found.Instance = instance.Fingerprint(), &instance
	found.PCRBank, found.PCRs = verified.PCRBank, verified.PCRs
	found.Machine = p.machineOf(verified, found.EK, machines)
	return found
}

// claimed returns the provider ID that a request claims, "" if no machine has it.
func (p Provider) claimed(q evidence.Question, machines []verifier.Machine) string {
	claim, _ := p.Rules.ParseClaim(q.Request)
	if slices.ContainsFunc(machines, func(m verifier.Machine) bool { return m.ProviderID == claim.ProviderID }) {
		return claim.ProviderID
	}
	return ""
}

// machineOf returns the name of the one machine that has the instance's provider ID. It returns ""
// if there is none, or if a source names the instance by its fingerprint: then the rules find the
// machine. It returns "" for two machines, too: a new one has to wait, and one with a record goes
// on.
func (p Provider) machineOf(verified *cloud.Verified, fingerprint string, machines []verifier.Machine) string {
	name, count := "", 0
	for i := range machines {
		m := &machines[i]
		if p.Rules.NamesEK(m, fingerprint) {
			return ""
		}
		if m.ProviderID != "" && verified.HasProviderID(m.ProviderID) {
			name = m.Ref.Name
			count++
		}
	}
	if count > 1 {
		return ""
	}
	return name
}
