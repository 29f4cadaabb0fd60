// SPDX-License-Identifier: Apache-2.0

package evidence

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// FindHello reads the hello that a proof refers to, by its name. The proof is not trusted: the
// rules check that this is its hello. FindHello returns nil if there is none.
func FindHello(ctx context.Context, reader client.Reader, p Challenger, proof *certificatesv1.CertificateSigningRequest) (*certificatesv1.CertificateSigningRequest, error) {
	name, err := p.HelloOf(proof)
	if err != nil || name == "" {
		return nil, nil //nolint:nilerr // Verify refuses such a proof
	}
	return GetRequest(ctx, reader, name)
}

// GetRequest returns a request. It returns nil if there is no such request.
func GetRequest(ctx context.Context, reader client.Reader, name string) (*certificatesv1.CertificateSigningRequest, error) {
	object := &certificatesv1.CertificateSigningRequest{}
	err := reader.Get(ctx, types.NamespacedName{Name: name}, object)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("request %s: %w", name, err)
	}
	return object, nil
}
