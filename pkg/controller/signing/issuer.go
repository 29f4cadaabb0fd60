// SPDX-License-Identifier: Apache-2.0

package signing

import (
	"context"
	"errors"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// Issuer issues the certificates of approved requests: either the controller signs with a CA of its
// own, or it only approves.
type Issuer interface {
	// Issues reports whether the controller issues client certificates. Otherwise an approval is
	// its last step, and another signer issues.
	Issues() bool
	// Judge decides on an approved request. recorded says that a record names the request.
	Judge(rules *verifier.Rules, in verifier.Input, recorded bool) verifier.Decision
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

func (ownCA) Judge(rules *verifier.Rules, in verifier.Input, _ bool) verifier.Decision {
	return rules.JudgeSigning(in)
}

// anotherSigner stands for a signer such as kube-controller-manager. An approved request that a
// record names fails at its deadline, if that signer has not issued a certificate.
type anotherSigner struct{}

func (anotherSigner) Issues() bool { return false }

func (anotherSigner) Judge(rules *verifier.Rules, in verifier.Input, recorded bool) verifier.Decision {
	if recorded {
		return rules.JudgeUnsigned(in)
	}
	return rules.JudgeSigning(in)
}

func (anotherSigner) CA(context.Context, time.Time) (*CA, error) {
	return nil, errors.New("this controller has no CA: another signer issues")
}
