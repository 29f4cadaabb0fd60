// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// wait remembers a waiting request and its evidence. It returns the time until the next decision.
func (a *actor) wait(in *inputs, d verifier.Decision) time.Duration {
	request, cause := in.Request, string(d.Refusals.Reason())
	if in.claim.Rehearsal {
		cause = "" // the gauge of waiting requests counts real ones only
	}
	after := a.retries.Remember(fairqueue.Waiting{
		Name: request.Name, UID: request.UID, Claim: in.queueClaim(), Cause: cause,
		Created: request.CreationTimestamp.Time, Deadline: a.rules.Deadline(request),
	}, in.Now)
	last, known := a.retries.Memo(request.Name, request.UID, in.Now)
	if fresh, ok := in.remembered(); ok && (!known || last.by != fresh.by) {
		a.retries.Keep(request.Name, request.UID, fresh, in.Now)
	}
	return after
}

// annotateTimeout bounds the write of publishWaiting, which blocks a worker.
const annotateTimeout = 2 * time.Second

// publishWaiting writes the reason for which a request waits into its annotation, if the reason has
// changed. Each requester has a rate limit for these writes, the same as for Events. Like a denial,
// a write counts against the requester's fair share. A write that failed or is over the limit is
// retried when the request is next requeued: no decision reads the annotation. So an error is only
// reported.
func (a *actor) publishWaiting(ctx context.Context, in *inputs, reason verifier.Reason) error {
	request := in.Request
	text := verifier.WaitingText(reason)
	if text == "" || a.retries.Published(request.Name, request.UID) == string(reason) || !a.waitingLimits.Take(request.Spec.Username, a.now()) {
		return nil
	}
	began := time.Now()
	bounded, cancel := context.WithTimeout(ctx, annotateTimeout)
	defer cancel()
	values := map[string]any{attestation.AnnotationWaiting: attestation.Statement{Reason: string(reason), Text: text}.String()}
	if in.claim.Rehearsal {
		values[attestation.AnnotationVerdict] = nil // from before a restart, or from the requester
	}
	_, err := a.annotate(bounded, request, values)
	a.queue.Charge(request.Spec.Username, time.Since(began))
	if err == nil {
		a.retries.SetPublished(request.Name, request.UID, string(reason))
	}
	return err
}
