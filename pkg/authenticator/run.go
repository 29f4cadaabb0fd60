// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// Run is one call of the plugin by client-go. It returns the certificate on disk; the caller prints
// it. If the certificate is due or missing, a worker requests one. From time to time a worker
// checks for announced renewals. Every request of the kubelet waits for Run. So Run waits for the
// worker only if the certificate on disk cannot be used, and only for a bounded time. The error is
// a *Failure, and means that this node has no valid certificate. The Answer is never nil.
func (a *Authenticator) Run(ctx context.Context) (*Answer, error) {
	answer := &Answer{}
	a.enroller.Step(stepStatus)
	status := a.node.Load()
	if a.node.Invalid != nil {
		if status.Pair == nil {
			return answer, reason.AsFailure(a.node.Invalid)
		}
		status.Due = "the configuration is wrong" // so that client-go runs the plugin again soon
		answer.Remarks = append(answer.Remarks, a.node.Invalid)
		return a.respond(status, answer)
	}
	a.noticeRejection(ctx, &status)
	var failure error
	switch {
	case status.Permanent:
		return answer, reason.AsFailure(status.Problem)
	case status.Pair == nil:
		status, failure = a.supervisor().awaitWorker(ctx, status, a.waitTimeout, answer)
	case status.Due != "":
		if wait := a.renewalBudget(status); wait > 0 {
			status, failure = a.supervisor().awaitWorker(ctx, status, wait, answer)
		} else if failure = a.supervisor().ensureWorker(status, answer); errors.Is(failure, cache.ErrLocked) && a.supervisor().workerAppears() {
			failure = nil
		}
		if failure == nil && status.Due != "" {
			failure = a.lastWorkerFailure()
		}
	case status.CheckDue():
		status.CheckNotStarted = !a.supervisor().ensureCheck(status)
	}
	if status.Pair == nil {
		return answer, status.Explain(failure)
	}
	if failure != nil {
		answer.Remarks = append(answer.Remarks, fmt.Errorf("certificate of node %q is still served, but %s: %w", status.Pair.NodeName(), status.Due, failure))
	}
	return a.respond(status, answer)
}

// lastMoments is the remaining lifetime below which a certificate cannot be used. client-go runs
// the plugin again after 1 to 2 s at the earliest, since an expirationTimestamp has whole seconds
// (nodestate.NearExpiration). With less time left, client-go would use the certificate beyond its
// end.
const lastMoments = 2 * nodestate.Nearest

// renewalBudget returns how long a run waits for the certificate that replaces the one on disk. It
// is 0 if the one on disk can still be used: the next run, after at most 30 s, finds the new one. A
// run waits if the certificate is about to end, the API server rejects it, or it is another
// cluster's.
func (a *Authenticator) renewalBudget(status nodestate.Status) time.Duration {
	left := status.Pair.Leaf.NotAfter.Sub(a.node.Now())
	if left > lastMoments && !status.Rejected && !status.Foreign {
		return 0
	}
	return min(a.renewalWait, left)
}

// respond returns the credential, and writes the note about it for the next run.
func (a *Authenticator) respond(status nodestate.Status, answer *Answer) (*Answer, error) {
	a.enroller.Step(stepPrint)
	if status.Remark != nil {
		answer.Remarks = append(answer.Remarks, status.Remark)
	}
	expiration := status.Expiration(a.node.Now())
	data, err := a.exec.render(status.Pair, expiration)
	if err != nil {
		return answer, reason.AsFailure(err)
	}
	answer.Credential = data
	if a.parent.PID != 0 {
		a.noteAnswer(status, expiration)
	}
	return answer, nil
}

// noteAnswer writes the note about this answer. It keeps the time of the last review, even if that
// was about another certificate.
func (a *Authenticator) noteAnswer(status nodestate.Status, until time.Time) {
	n := status.Note
	n.Parent, n.Certificate, n.Until = a.parent, status.Pair.Fingerprint(), until.Unix()
	n.Rejected = n.Rejected && n.Certificate == status.Note.Certificate
	if n == status.Note {
		return
	}
	// A worker may have recorded a rejection meanwhile.
	if latest := a.node.Note.Read(); latest.Certificate == n.Certificate {
		n.Rejected = latest.Rejected
	}
	a.node.Note.Write(n)
}
