// SPDX-License-Identifier: Apache-2.0

// Package acme shows what an infrastructure provider implements on the node: here the evidence is an identity document that the
// platform signs and the hypervisor puts into a file.
package acme

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// Name is the provider's name in requests and configuration.
const Name = "acme"

const (
	version      = "acme/v1"
	identityFile = "/run/acme/identity.jwt"
	machineFile  = "/run/acme/machine-id"
)

// Factory makes the provider.
func Factory() provider.Factory {
	return provider.Factory{
		Name:     Name,
		Versions: []string{version},
		New:      func(provider.Settings) (provider.Provider, error) { return acme{}, nil },
	}
}

type acme struct{}

func (acme) Name() string       { return Name }
func (acme) SignerName() string { return "cluster.x-k8s.io/kube-apiserver-client-kubelet-acme" }
func (acme) Renews() bool       { return true }
func (acme) Caution() string    { return "" }

// ProviderID is the machine's spec.providerID, as the cloud controller manager of Acme writes it.
func (acme) ProviderID(context.Context) (string, error) {
	id, err := os.ReadFile(machineFile)
	if err != nil {
		return "", fmt.Errorf("machine ID: %w", err)
	}
	return "acme://" + string(bytes.TrimSpace(id)), nil
}

// Evidence binds the platform's document to this request by its hash: alone, the document would serve whoever copies it.
func (acme) Evidence(_ context.Context, request provider.Request) ([]byte, error) {
	identity, err := os.ReadFile(identityFile)
	if err != nil {
		return nil, fmt.Errorf("identity document: %w", err)
	}
	sum := sha256.Sum256(request.PKCS10)
	return json.Marshal(struct {
		Version  string `json:"version"`
		Request  []byte `json:"requestSHA256"`
		Identity string `json:"identity"`
	}{version, sum[:], string(identity)})
}
