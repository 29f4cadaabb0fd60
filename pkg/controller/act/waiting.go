// SPDX-License-Identifier: Apache-2.0

package act

import (
	"context"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/collect"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// Wait remembers a waiting request and its evidence. It returns the time until the next decision.
func (a *Actor) Wait(in *collect.Inputs, d verifier.Decision) time.Duration {
	request, cause := in.Request, string(d.Refusals.Reason())
	if in.Claim.Rehearsal {
		cause = "" // the gauge of waiting requests counts real ones only
	}
	after := a.Retries.Remember(fairqueue.Waiting{
		Name: request.Name, UID: request.UID, Claim: in.QueueClaim(), Cause: cause,
		Created: request.CreationTimestamp.Time, Deadline: a.Rules.Deadline(request),
	}, in.Now)
	last, known := a.Retries.Memo(request.Name, request.UID, in.Now)
	if fresh, ok := in.Remembered(); ok && (!known || last.By != fresh.By) {
		a.Retries.Keep(request.Name, request.UID, fresh, in.Now)
	}
	return after
}

// annotateTimeout bounds the write of PublishWaiting, which blocks a worker.
const annotateTimeout = 2 * time.Second

// PublishWaiting writes the reason for which a request waits into its annotation, if the reason has
// changed. Each requester has a rate limit for these writes, the same as for Events. Like a denial,
// a write counts against the requester's fair share. A write that failed or is over the limit is
// retried when the request is next requeued: no decision reads the annotation. So an error is only
// reported.
func (a *Actor) PublishWaiting(ctx context.Context, in *collect.Inputs, reason verifier.Reason) error {
	request := in.Request
	text := verifier.WaitingText(reason)
	if text == "" || a.Retries.Published(request.Name, request.UID) == string(reason) || !a.WaitingLimits.Take(request.Spec.Username, a.Now()) {
		return nil
	}
	began := time.Now()
	bounded, cancel := context.WithTimeout(ctx, annotateTimeout)
	defer cancel()
	values := map[string]any{attestation.AnnotationWaiting: attestation.Statement{Reason: string(reason), Text: text}.String()}
	if in.Claim.Rehearsal {
		values[attestation.AnnotationVerdict] = nil // from before a restart, or from the requester
	}
	_, err := a.Annotate(bounded, request, values)
	a.Queue.Charge(request.Spec.Username, time.Since(began))
	if err == nil {
		a.Retries.SetPublished(request.Name, request.UID, string(reason))
	}
	return err
}
