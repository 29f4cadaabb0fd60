// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"context"
	"crypto"
	"fmt"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// prepare makes a key and a request with the provider's evidence, and writes both down before anybody hears of them.
func (w *worker) prepare(ctx context.Context, s standing, to access) (*cache.Pending, error) {
	w.enter(StepPrepare)
	pending, _, err := w.build(ctx, s.node, to.cluster)
	if err != nil {
		return nil, err
	}
	w.enter(StepSave)
	return pending, w.lock.SetPending(pending)
}

// build makes a key and a request in memory. It writes nothing, for a dry run's sake.
func (o *Options) build(ctx context.Context, node string, cluster cache.Origin) (*cache.Pending, crypto.PublicKey, error) {
	attest := func(what string, err error) error {
		return &Failure{AttestationFailed, "", fmt.Errorf("provider %s: %s: %w", o.provider.Name(), what, err)}
	}
	id := csr.Identity{NodeName: node, ProviderID: o.providerID}
	if id.ProviderID == "" {
		found, err := o.provider.ProviderID(ctx)
		if err != nil {
			return nil, nil, attest("provider ID", err)
		}
		id.ProviderID = found
	}
	key, keyPEM, err := csr.NewKey()
	if err != nil {
		return nil, nil, err
	}
	pkcs10, err := csr.PKCS10(id, key)
	if err != nil {
		return nil, nil, attest("request", err)
	}
	name := csr.NewName()
	evidence, err := o.provider.Evidence(ctx, provider.Request{
		PKCS10: pkcs10, NodeName: id.NodeName, ProviderID: id.ProviderID,
		Name: name, SignerName: o.signerName, ExpirationSeconds: o.expirationSeconds,
	})
	if err != nil {
		return nil, nil, attest("evidence", err)
	}
	request, err := attestation.Request{PKCS10: pkcs10, Provider: o.provider.Name(), Data: evidence}.Marshal()
	if err != nil {
		return nil, nil, attest("request", err)
	}
	return &cache.Pending{
		Provider: o.provider.Name(), NodeName: id.NodeName, ProviderID: id.ProviderID,
		SignerName: o.signerName, ExpirationSeconds: o.expirationSeconds,
		Cluster: cluster, Key: keyPEM,
		Requests: []cache.PendingRequest{{Name: name, Request: request, Filed: o.now().UTC()}},
	}, key.Public(), nil
}
