// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"context"
	"crypto/x509"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/enrol"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
)

// startRetryPause is the time between two attempts to start a worker during a back-off.
const startRetryPause = 500 * time.Millisecond

// AwaitFirst waits until the node has a usable certificate. It starts workers as Run does. After
// wait it returns a *Failure that says why there is no certificate yet. Until then it calls remark
// with each new reason, with the reason for which the request waits, and with the provider's
// caution.
func (a *Authenticator) AwaitFirst(ctx context.Context, wait time.Duration, remark func(error)) (*x509.Certificate, error) {
	if a.node.Invalid != nil {
		return nil, reason.AsFailure(a.node.Invalid)
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	deadline := time.Now().Add(wait)
	answer := &Answer{}
	once := remarkOnce(remark)
	supervisor := a.supervisor()
	supervisor.progress = func() {
		if waits := a.progress(); waits != nil {
			once(waits)
		}
	}
	var last reason.Reason
	for {
		status := a.node.Load()
		if status.Permanent {
			return nil, reason.AsFailure(status.Problem)
		}
		if status.Pair != nil && !status.Rejected && !status.Foreign {
			supervisor.awaitWorkerEnd()
			return status.Pair.Leaf, nil
		}
		after, failure := supervisor.awaitWorker(ctx, status, time.Until(deadline), answer)
		for _, r := range answer.Remarks { // each start of a worker adds the provider's caution
			once(r)
		}
		answer.Remarks = nil
		if failure == nil && after.Pair != nil {
			continue
		}
		if ctx.Err() != nil {
			return nil, supervisor.whyNotYet(wait)
		}
		if why := reason.AsFailure(failure).Reason; why != last {
			last = why
			remark(failure)
		}
		select {
		case <-ctx.Done():
			return nil, failure
		case <-time.After(startRetryPause):
		}
	}
}

// unanswered is the time without an answer after which a remark is shown.
const unanswered = 5 * time.Second

// progress returns what the pending request waits for. It is nil while that is not known, and until
// the time unanswered has passed since the request was filed.
func (a *Authenticator) progress() *reason.Failure {
	pending, err := a.node.Dir().Pending()
	if err != nil || pending == nil || pending.Last().UID == "" {
		return nil //nolint:nilerr // the worker reports what is wrong with the file
	}
	state := nodestate.ReadState(a.node.Dir())
	if _, known := nodestate.WaitsFor(pending, state); !known && a.node.Now().Sub(pending.Last().FiledAt) < unanswered {
		return nil
	}
	return enrol.StillWaiting(pending, state)
}
