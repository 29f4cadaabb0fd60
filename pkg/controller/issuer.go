// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// issuer issues the certificates of requests that this Controller has approved. It is chosen once,
// by Config.CA: either this Controller signs, or it only approves.
type issuer interface {
	// issues reports whether this Controller issues client certificates. Otherwise an approval is
	// its last step, and another signer issues.
	issues() bool
	// judge decides on an approved request.
	judge(rules *verifier.Rules, in *inputs) verifier.Decision
	// ca returns the CA to sign with.
	ca(ctx context.Context, now time.Time) (*signing.CA, error)
}

func newIssuer(source signing.Source) issuer {
	if source == nil {
		return anotherSigner{}
	}
	return ownCA{source}
}

// ownCA signs with the CA of a source. If none is available, the source reports why.
type ownCA struct{ source signing.Source }

func (ownCA) issues() bool { return true }

func (ownCA) judge(rules *verifier.Rules, in *inputs) verifier.Decision {
	return rules.JudgeSigning(in.Input)
}

func (o ownCA) ca(ctx context.Context, now time.Time) (*signing.CA, error) {
	return o.source.CA(ctx, now)
}

// anotherSigner stands for a signer such as kube-controller-manager. An approved request of ours
// fails at its deadline, if that signer has not issued a certificate.
type anotherSigner struct{}

func (anotherSigner) issues() bool { return false }

func (anotherSigner) judge(rules *verifier.Rules, in *inputs) verifier.Decision {
	if in.isRecorded() {
		return rules.JudgeUnsigned(in.Input)
	}
	return rules.JudgeSigning(in.Input)
}

func (anotherSigner) ca(context.Context, time.Time) (*signing.CA, error) {
	return nil, errors.New("this controller has no CA: another signer issues")
}
