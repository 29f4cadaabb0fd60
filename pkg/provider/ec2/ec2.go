// SPDX-License-Identifier: Apache-2.0

// Package ec2 is the node's half of provider ec2. Its evidence is an attestation document of the
// NitroTPM: AWS signs the instance's ID, the PCRs of its TPM, and a nonce that is bound to the
// request.
package ec2

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation/nitrotpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/metadata"
	providertpm "github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm"
)

const (
	// Name is the provider's name in requests and in the configuration.
	Name = "ec2"
	// SignerName is the signer to request from.
	SignerName = "cluster.x-k8s.io/kube-apiserver-client-kubelet-ec2"
)

// Factory makes the provider. Its settings are the TPM's device, the directory for the lock, and
// the cluster's UID.
func Factory() provider.Factory {
	return provider.Factory{
		Name:     Name,
		Versions: []string{attestation.VersionEC2},
		New: func(s provider.Settings) (provider.Provider, error) {
			if err := attestation.CheckClusterUID(s.ClusterUID); err != nil {
				return nil, fmt.Errorf("cluster UID: %w", err)
			}
			// The kernel's resource manager passes on only the commands that the TPM lists. AWS's
			// tool does without the resource manager.
			devices := []string{"/dev/tpmrm0", "/dev/tpm0"}
			if s.TPMDevice != "" {
				devices = []string{s.TPMDevice}
			}
			return Provider{Devices: devices, RuntimeDir: s.RuntimeDir, ClusterUID: s.ClusterUID}, nil
		},
	}
}

// Provider implements provider.Provider.
type Provider struct {
	// Devices are the devices of the one TPM. The first that takes the vendor command is used.
	Devices []string
	// RuntimeDir is a directory that only root can write, for the TPM's lock.
	RuntimeDir string
	// Metadata asks the instance's metadata service for the provider ID. Evidence does not need it.
	Metadata metadata.Client
	// ClusterUID is the node's clusterUID setting, empty if unset.
	ClusterUID string
}

var _ provider.Provider = Provider{}

// Name returns "ec2".
func (Provider) Name() string { return Name }

// SignerName returns the default signer.
func (Provider) SignerName() string { return SignerName }

// Renews is true: each renewal comes with evidence of its own.
func (Provider) Renews() bool { return true }

// Caution is empty: only root can use the TPM's device.
func (Provider) Caution() string { return "" }

// ProviderID returns aws:///<zone>/<instance ID>, as the cloud provider's controller sets it. It is
// empty if nothing answers: the metadata service can be switched off, and the evidence does
// without.
func (p Provider) ProviderID(ctx context.Context) (string, error) {
	session, err := p.Metadata.EC2(ctx)
	if failed, ok := errors.AsType[*provider.Error](err); ok && failed.Class == provider.NoDevice && ctx.Err() == nil {
		return "", nil
	}
	// An instance whose owner switched the service off gets this status.
	if refused, ok := errors.AsType[*metadata.StatusError](err); ok && refused.Status == http.StatusForbidden {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	return session.ProviderID(ctx)
}

// Evidence has the NitroTPM make a document for this request, and no other: every node can read it
// in the request.
func (p Provider) Evidence(ctx context.Context, request provider.Request) ([]byte, error) {
	nonce := request.Binding(attestation.VersionEC2, p.ClusterUID).Nonce()
	answer, err := p.ask(ctx, nitrotpm.Request(nonce[:]))
	if err != nil {
		return nil, classifyError(err)
	}
	document, err := nitrotpm.ParseResponse(answer)
	if err != nil {
		return nil, failure("does the TPM come from EC2? see its maker with: kubelet-authenticator tpm selftest", err)
	}
	// A document that would be denied is not filed: here the error reaches the operator who can fix
	// it.
	signed, err := nitrotpm.Parse(document)
	if err == nil && (!bytes.Equal(signed.Nonce, nonce[:]) || signed.UserData != nil || signed.PublicKey != nil) {
		err = errors.New("it is for another request")
	}
	if err != nil {
		return nil, failure("is there a newer release of this program? AWS may have changed the document", fmt.Errorf("NitroTPM document: %w", err))
	}
	return attestation.Identity{Version: attestation.VersionEC2, ClusterUID: p.ClusterUID, Statement: document}.Marshal()
}

// ask sends a message to the first device that takes it.
func (p Provider) ask(ctx context.Context, message []byte) ([]byte, error) {
	var first error
	for _, device := range p.Devices {
		answer, err := tpm.Run(ctx, tpm.Options{Device: device, LockDir: p.RuntimeDir}, func(t *tpm.TPM) ([]byte, error) {
			return t.NSMRequest(message, nitrotpm.MessageSize)
		})
		_, absent := errors.AsType[*tpm.OpenError](err)
		if !absent && !errors.Is(err, tpm.ErrNoNSM) {
			return answer, err
		}
		if first == nil || !absent {
			first = err // that of a device that is there says more
		}
	}
	return nil, first
}

// classifyError adds class and hint to an error of the TPM.
func classifyError(err error) error {
	foreign := &tpm.ForeignIndexError{}
	switch {
	case errors.Is(err, tpm.ErrNoNSM):
		return failure("is this an EC2 instance with a NitroTPM, and was its image registered with TpmSupport v2.0? "+
			"without one, use provider ec2-role", err)
	case errors.As(err, &foreign):
		return failure(fmt.Sprintf("see what it is with tpm2_nvreadpublic; if nothing needs it: tpm2_nvundefine %#08x", foreign.Index), err)
	case errors.Is(err, tpm2.TPMRCBadAuth), errors.Is(err, tpm2.TPMRCAuthFail):
		return failure("a password is set for the TPM's owner hierarchy, and this program uses the empty one: "+
			"remove it with tpm2_changeauth -c owner -p OLD", err)
	case errors.Is(err, tpm2.TPMRCNVSpace):
		return failure("the TPM's NV memory is full: see the indices with tpm2_nvreadpublic, and remove what nothing needs", err)
	}
	return providertpm.ClassifyError(err)
}

func failure(hint string, err error) error {
	return &provider.Error{Class: provider.DeviceFailed, Hint: hint, Err: err}
}
