// SPDX-License-Identifier: Apache-2.0

// Package null is the attestor that takes everything for evidence, and the shape of a provider out
// of the tree. It is for tests: in this module no shipped binary can have it.
package null

import (
	"context"
	"crypto/x509"
	"errors"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
)

// The provider's name, and the signer that it is for.
const (
	Name       = "null"
	SignerName = "cluster.x-k8s.io/kube-apiserver-client-kubelet-null"
)

// Signer approves of everything, and believes what node it is said to be for.
type Signer struct{}

var _ evidence.ClusterAPISigner = Signer{}

// VerifyClientAttestationData returns nil.
func (Signer) VerifyClientAttestationData(context.Context, *certificatesv1.CertificateSigningRequest) error {
	return nil
}

// VerifyServingAttestationData returns nil.
func (Signer) VerifyServingAttestationData(context.Context, *certificatesv1.CertificateSigningRequest) error {
	return nil
}

// MachineName returns the node name that is asked for: for tests, machines are called like their
// nodes.
func (Signer) MachineName(_ context.Context, request *certificatesv1.CertificateSigningRequest) (string, error) {
	content, err := attestation.Parse(request.Spec.Request)
	if err != nil {
		return "", err
	}
	asks, err := x509.ParseCertificateRequest(content.PKCS10)
	if err != nil {
		return "", err
	}
	name, ok := strings.CutPrefix(asks.Subject.CommonName, "system:node:")
	if !ok {
		return "", errors.New("it is for no node")
	}
	return name, nil
}
