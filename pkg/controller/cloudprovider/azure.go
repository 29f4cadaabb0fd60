// SPDX-License-Identifier: Apache-2.0

package cloudprovider

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/azurevm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/lookup"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/azure"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/cloud"
)

const (
	// vmIDFresh is how long a vmId is kept. minVMIDAge is the least age at which another VM's
	// document makes the controller ask again: the VM may have been made anew under its name.
	vmIDFresh, minVMIDAge = time.Hour, 30 * time.Second
	// tokenMargin is how long before its end a token is replaced.
	tokenMargin = 5 * time.Minute
)

// VMIDs has the vmIds of Azure's VMs by their resource IDs.
type VMIDs struct {
	client *azurevm.Client
	ids    *lookup.Cache[string]
	tokens *lookup.Cache[azurevm.Token]
}

// NewVMIDs returns the vmIds that a client reads.
func NewVMIDs(client *azurevm.Client, metrics *telemetry.LookupMetrics) *VMIDs {
	config := lookup.Config{Service: azure.Name, Concurrency: 8, Timeout: 25 * time.Second, Size: 16384, Metrics: metrics}
	token := config
	token.Size, token.Concurrency = 1, 1
	return &VMIDs{client: client, ids: lookup.New[string](config), tokens: lookup.New[azurevm.Token](token)}
}

// of returns the vmId of a resource.
func (l *VMIDs) of(ctx context.Context, id azure.ResourceID) (string, error) {
	return l.ids.Get(ctx, id.String(), func(ctx context.Context) (string, time.Duration, error) {
		token, err := l.tokens.Get(ctx, "", func(ctx context.Context) (azurevm.Token, time.Duration, error) {
			token, err := l.client.Token(ctx)
			return token, time.Until(token.Expires) - tokenMargin, err
		})
		if err != nil {
			return "", 0, err
		}
		vmID, err := l.client.VMID(ctx, token, id)
		if refused, ok := errors.AsType[*azurevm.StatusError](err); ok && refused.Status == http.StatusUnauthorized {
			l.tokens.Expire("", minVMIDAge)
		}
		return vmID, vmIDFresh, err
	})
}

// Azure returns the Judge of provider azure. ids is nil if there is no look-up: then only sources
// name instances. The node's claim says which VM is looked up, and Azure Resource Manager says
// whether that is the one that signed.
func Azure(v *azure.Verifier, ids *VMIDs) Judge {
	return func(ctx context.Context, request verifier.Filed, providerID string) (*cloud.Verified, error) {
		verified, err := v.Verify(request)
		if err != nil || ids == nil {
			return verified, err
		}
		resource, err := azure.ParseProviderID(providerID)
		if err != nil || resource.Subscription != verified.Instance.Account {
			return verified, nil //nolint:nilerr // no machine has the provider ID of this instance
		}
		// Without an answer the document alone counts: a record that pins the VM suffices for a
		// renewal. A new machine waits.
		vmID, err := ids.of(ctx, resource)
		if err != nil {
			return verified, nil //nolint:nilerr // the cache counts it
		}
		if vmID != verified.Instance.ID {
			ids.ids.Expire(resource.String(), minVMIDAge)
		}
		azure.Connect(verified, resource, vmID)
		return verified, nil
	}
}
