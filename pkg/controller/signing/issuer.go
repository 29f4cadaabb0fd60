// SPDX-License-Identifier: Apache-2.0

package signing

import (
	"context"
	"errors"
	"time"
)

// Issuer issues the certificates of approved requests: either the controller signs with a CA of its
// own, or it only approves.
type Issuer interface {
	// Issues reports whether the controller issues client certificates. Otherwise an approval is
	// its last step, and another signer issues.
	Issues() bool
	// CA returns the CA to sign with.
	CA(ctx context.Context, now time.Time) (*CA, error)
}

// NewIssuer returns the Issuer that signs with the CA of a source. If source is nil, another signer
// issues.
func NewIssuer(source Source) Issuer {
	if source == nil {
		return anotherSigner{}
	}
	return ownCA{source}
}

// ownCA signs with the CA of a source. If none is available, the source reports why.
type ownCA struct{ Source }

func (ownCA) Issues() bool { return true }

// anotherSigner stands for a signer such as kube-controller-manager.
type anotherSigner struct{}

func (anotherSigner) Issues() bool { return false }

func (anotherSigner) CA(context.Context, time.Time) (*CA, error) {
	return nil, errors.New("this controller has no CA: another signer issues")
}
