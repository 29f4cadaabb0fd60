// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"context"
	"crypto"
	"errors"
	"fmt"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// prepare makes a key and the first request, and writes both down before anybody hears of them.
func (w *worker) prepare(ctx context.Context, s standing, to nodeaccess.Access) (*cache.Pending, error) {
	w.enter(StepPrepare)
	pending, _, err := w.build(ctx, s.node, to.Cluster, w.version, w.readState().Remembered[w.provider.Name()])
	if err != nil {
		return nil, err
	}
	if pending.Last().Hello {
		pending.Requester = to.Requester()
	}
	w.enter(StepSave)
	return pending, w.lock.SetPending(pending)
}

// prove makes the request that answers the challenge, and writes it down beside the hello. Nothing of the secret that the challenge
// holds outlives the provider's call.
func (w *worker) prove(ctx context.Context, pending *cache.Pending, answer string, fresh bool) error {
	w.enter(StepProve)
	key, err := csr.ParseKey(pending.Key)
	if err != nil {
		return err
	}
	hello := *pending.Last()
	content, err := attestation.Parse(hello.Request)
	if err != nil {
		return &provider.Error{Class: provider.Stale, Err: err}
	}
	request := evidenceFor(pending, content.PKCS10, key.Public())
	request.Challenge = &provider.Challenge{
		HelloName: hello.Name, HelloUID: hello.UID, HelloRequest: hello.Request,
		Answer: []byte(answer), Fresh: fresh,
	}
	evidence, err := w.provider.Evidence(ctx, request)
	if err != nil {
		return w.attest("evidence", err)
	}
	if err := w.add(pending, cache.PendingRequest{Name: request.Name}, content.PKCS10, evidence); err != nil {
		return err
	}
	w.enter(StepSave)
	return w.lock.SetPending(pending)
}

// build makes a key and the first request in memory. It writes nothing, for a dry run's sake.
func (o *Options) build(ctx context.Context, node string, cluster cache.Origin, version attestation.Version, remembered string) (*cache.Pending, crypto.PublicKey, error) {
	id := csr.Identity{NodeName: node, ProviderID: o.providerID}
	if id.ProviderID == "" {
		found, err := o.provider.ProviderID(ctx)
		if err != nil {
			return nil, nil, o.attest("provider ID", err)
		}
		id.ProviderID = found
	}
	key, keyPEM, err := csr.NewKey()
	if err != nil {
		return nil, nil, err
	}
	pkcs10, err := csr.PKCS10(id, key)
	if err != nil {
		return nil, nil, o.attest("request", err)
	}
	pending := &cache.Pending{
		Provider: o.provider.Name(), NodeName: id.NodeName, ProviderID: id.ProviderID,
		SignerName: o.signerName, ExpirationSeconds: o.expirationSeconds,
		Cluster: cluster, Key: keyPEM,
	}
	request := evidenceFor(pending, pkcs10, key.Public())
	var evidence []byte
	challenger, hello := o.provider.(provider.Challenger)
	if hello {
		if request.Version = version; version == "" {
			request.Version = challenger.Versions()[0]
		}
		request.Remembered = remembered
		pending.AttestationVersion = string(request.Version)
		evidence, pending.Remember, err = challenger.Hello(ctx, request)
	} else {
		evidence, err = o.provider.Evidence(ctx, request)
	}
	if err != nil {
		return nil, nil, o.attest("evidence", err)
	}
	return pending, key.Public(), o.add(pending, cache.PendingRequest{Name: request.Name, Hello: hello}, pkcs10, evidence)
}

// evidenceFor returns what a provider is told of the next request of pending, under a new name.
func evidenceFor(pending *cache.Pending, pkcs10 []byte, key crypto.PublicKey) provider.Request {
	request := provider.Request{
		PKCS10: pkcs10, NodeName: pending.NodeName, ProviderID: pending.ProviderID,
		Name: csr.NewName(), SignerName: pending.SignerName, ExpirationSeconds: pending.ExpirationSeconds,
		Version: attestation.Version(pending.AttestationVersion),
	}
	for _, usage := range csr.Usages(key) {
		request.Usages = append(request.Usages, string(usage))
	}
	return request
}

// add appends the request with its evidence to those of pending.
func (o *Options) add(pending *cache.Pending, next cache.PendingRequest, pkcs10, evidence []byte) (err error) {
	next.Filed = o.now().UTC()
	next.Request, err = attestation.Request{PKCS10: pkcs10, Provider: o.provider.Name(), Data: evidence}.Marshal()
	if err != nil {
		return o.attest("request", err)
	}
	pending.Requests = append(pending.Requests, next)
	return nil
}

// attest sorts an error of the provider.
func (o *Options) attest(what string, err error) error {
	failure := &Failure{AttestationFailed, "", fmt.Errorf("provider %s: %s: %w", o.provider.Name(), what, err)}
	var sorted *provider.Error
	if errors.As(err, &sorted) {
		failure.Hint = sorted.Hint
		switch sorted.Class {
		case provider.NoDevice:
			failure.Reason = TPMAbsent
		case provider.DeviceFailed:
			failure.Reason = TPMError
		}
	}
	return failure
}
