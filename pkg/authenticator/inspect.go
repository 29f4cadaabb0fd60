// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"context"
	"fmt"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/trustedfile"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// Identity has the data about this machine for an inventory. All of it comes from the machine
// itself, and nothing vouches for it.
type Identity struct {
	NodeName   string `json:"nodeName"`
	ProviderID string `json:"providerID,omitempty"`
	Provider   string `json:"provider"`
	// Device describes the provider's device.
	Device any `json:"device"`
}

// Identify identifies this machine. It needs no API server, and writes only the provider's lock.
func (a *Authenticator) Identify(ctx context.Context) (*Identity, error) {
	inspector, err := a.inspector(ctx)
	if err != nil {
		return nil, err
	}
	node, err := nodeaccess.FindNodeName(a.node.Name)
	if err != nil {
		return nil, reason.Configuration.Failure(trustedfile.Hint(err, "set --node-name"), err)
	}
	identity := &Identity{NodeName: node.Name, ProviderID: a.enroller.ProviderID, Provider: inspector.Name()}
	if identity.ProviderID == "" {
		if identity.ProviderID, err = inspector.ProviderID(ctx); err != nil {
			return nil, reason.ClassifyProviderError(inspector, "provider ID", err)
		}
	}
	if identity.Device, err = inspector.Identify(ctx); err != nil {
		return nil, reason.ClassifyProviderError(inspector, "identity", err)
	}
	return identity, nil
}

// SelfTest runs the self-test of the provider's device, and reports each step. It fails if a step
// failed.
func (a *Authenticator) SelfTest(ctx context.Context, report func(provider.Check)) error {
	inspector, err := a.inspector(ctx)
	if err != nil {
		return err
	}
	if err := inspector.SelfTest(ctx, report); err != nil {
		return reason.ClassifyProviderError(inspector, "self-test", err)
	}
	return nil
}

// inspector returns the provider if it has a device.
func (a *Authenticator) inspector(ctx context.Context) (provider.Inspector, error) {
	if a.node.Invalid != nil {
		return nil, a.node.Invalid
	}
	decided, _, err := a.enroller.Decided(ctx)
	if err != nil {
		return nil, err
	}
	inspector, ok := decided.Provider.(provider.Inspector)
	if !ok {
		return nil, reason.Configuration.Failure("name another with --provider", fmt.Errorf("provider %s shows no device", decided.Provider.Name()))
	}
	return inspector, nil
}
