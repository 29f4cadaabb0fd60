// SPDX-License-Identifier: Apache-2.0

// Package insecure is the provider without evidence, for places that have no secure mechanism. The
// holder of the bootstrap credential can claim any node name. As the Cluster API proposal "Kubelet
// Authentication" demands, it does not renew.
package insecure

import (
	"context"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// Name is the provider's name in requests and configuration.
const Name = "insecure"

// SignerName is the always-allow signer of node-attestation-controller. It is switched off by
// default.
const SignerName = "cluster.x-k8s.io/kube-apiserver-client-kubelet-insecure"

// version is the version of the document. document is the whole evidence, byte for byte.
const (
	version  = "insecure/v1"
	document = `{"version":"` + version + `"}`
)

// Factory makes the provider. It has no settings.
func Factory() provider.Factory {
	return provider.Factory{
		Name:     Name,
		Versions: []string{version},
		New:      func(provider.Settings) (provider.Provider, error) { return Provider{}, nil },
	}
}

// Provider implements provider.Provider. The zero value is ready.
type Provider struct{}

// Name returns "insecure".
func (Provider) Name() string { return Name }

// SignerName returns the default signer.
func (Provider) SignerName() string { return SignerName }

// Renews is false: with no evidence, a stolen certificate could renew itself for ever.
func (Provider) Renews() bool { return false }

// Caution says what this provider does not protect against.
func (Provider) Caution() string {
	return "provider insecure sends no evidence: whoever holds the bootstrap credential can become any node"
}

// ProviderID returns none: there is nowhere to look.
func (Provider) ProviderID(context.Context) (string, error) { return "", nil }

// Evidence returns the constant document.
func (Provider) Evidence(context.Context, provider.Request) ([]byte, error) {
	return []byte(document), nil
}
