// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"context"
	"fmt"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// Identity is what an inventory needs to know of this machine. All of it is what the machine says of itself.
type Identity struct {
	NodeName   string `json:"nodeName"`
	ProviderID string `json:"providerID,omitempty"`
	Provider   string `json:"provider"`
	// Device is what the provider found.
	Device any `json:"device"`
}

// Identify finds out what this machine is. It needs no API server, and writes nothing but the provider's lock.
func Identify(ctx context.Context, o Options) (*Identity, error) {
	inspector, err := o.inspector()
	if err != nil {
		return nil, err
	}
	node, err := nodeaccess.FindNodeName(o.nodeName)
	if err != nil {
		return nil, &Failure{Configuration, "set --node-name", err}
	}
	identity := &Identity{NodeName: node.Name, ProviderID: o.providerID, Provider: inspector.Name()}
	if identity.ProviderID == "" {
		if identity.ProviderID, err = inspector.ProviderID(ctx); err != nil {
			return nil, o.attest("provider ID", err)
		}
	}
	if identity.Device, err = inspector.Identify(ctx); err != nil {
		return nil, o.attest("identity", err)
	}
	return identity, nil
}

// SelfTest has the provider try all that it needs of its device, and report each step. It fails if one of them did.
func SelfTest(ctx context.Context, o Options, report func(provider.Check)) error {
	inspector, err := o.inspector()
	if err != nil {
		return err
	}
	if err := inspector.SelfTest(ctx, report); err != nil {
		return o.attest("self-test", err)
	}
	return nil
}

// inspector returns the provider if it can be looked into.
func (o *Options) inspector() (provider.Inspector, error) {
	if o.invalid != nil {
		return nil, o.invalid
	}
	inspector, ok := o.provider.(provider.Inspector)
	if !ok {
		return nil, &Failure{Configuration, "name another with --provider", fmt.Errorf("provider %s: there is no device behind it", o.provider.Name())}
	}
	return inspector, nil
}
