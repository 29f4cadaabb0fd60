// SPDX-License-Identifier: Apache-2.0

package enrol

import (
	"context"
	"crypto"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// requestBuilder builds the requests for a certificate in memory. It writes nothing, so that a dry
// run can use it.
type requestBuilder struct {
	provider          provider.Provider
	providerID        string
	signerName        string
	expirationSeconds *int32
	now               func() time.Time
}

func (e *Enroller) requestBuilder() requestBuilder {
	return requestBuilder{e.Provider, e.ProviderID, e.SignerName, e.ExpirationSeconds, e.Node.Now}
}

// first makes a key and the first request. An empty version means the newest. remembered is the
// value that the provider stored with its last certificate.
func (b requestBuilder) first(ctx context.Context, node string, cluster cache.Origin, version attestation.Version, remembered string) (*cache.Pending, crypto.PublicKey, error) {
	id := csr.Identity{NodeName: node, ProviderID: b.providerID}
	if id.ProviderID == "" {
		found, err := b.provider.ProviderID(ctx)
		if err != nil {
			return nil, nil, reason.ClassifyProviderError(b.provider, "provider ID", err)
		}
		id.ProviderID = found
	}
	key, keyPEM, err := csr.NewKey()
	if err != nil {
		return nil, nil, err
	}
	pkcs10, err := csr.PKCS10(id, key)
	if err != nil {
		return nil, nil, reason.ClassifyProviderError(b.provider, "request", err)
	}
	pending := &cache.Pending{
		Provider: b.provider.Name(), NodeName: id.NodeName, ProviderID: id.ProviderID,
		SignerName: b.signerName, ExpirationSeconds: b.expirationSeconds,
		Cluster: cluster, Key: keyPEM,
	}
	request := evidenceFor(pending, pkcs10, key.Public())
	var evidence []byte
	challenger, hello := b.provider.(provider.Challenger)
	if hello {
		if request.Version = version; version == "" {
			request.Version = challenger.Versions()[0]
		}
		request.Remembered = remembered
		pending.AttestationVersion = string(request.Version)
		evidence, pending.Remember, err = challenger.Hello(ctx, request)
	} else {
		evidence, err = b.provider.Evidence(ctx, request)
	}
	if err != nil {
		return nil, nil, reason.ClassifyProviderError(b.provider, "evidence", err)
	}
	return pending, key.Public(), b.add(pending, cache.PendingRequest{Name: request.Name, Hello: hello}, pkcs10, evidence)
}

// allows reports whether the settings allow the value that the provider remembers.
func allows(p provider.Provider, remember string) bool {
	chooser, ok := p.(provider.Chooser)
	return !ok || chooser.Allows(remember)
}

// proof adds the request that answers the hello's challenge. fresh says that the challenge came
// while this worker watched the hello.
func (b requestBuilder) proof(ctx context.Context, pending *cache.Pending, answer string, fresh bool) error {
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
	evidence, err := b.provider.Evidence(ctx, request)
	if err != nil {
		return reason.ClassifyProviderError(b.provider, "evidence", err)
	}
	return b.add(pending, cache.PendingRequest{Name: request.Name}, content.PKCS10, evidence)
}

// evidenceFor returns the provider's input for the next request of pending, under a new name.
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
func (b requestBuilder) add(pending *cache.Pending, next cache.PendingRequest, pkcs10, evidence []byte) (err error) {
	next.FiledAt = b.now().UTC()
	next.Request, err = attestation.Request{PKCS10: pkcs10, Provider: b.provider.Name(), Data: evidence}.Marshal()
	if err != nil {
		return reason.ClassifyProviderError(b.provider, "request", err)
	}
	pending.Requests = append(pending.Requests, next)
	return nil
}
