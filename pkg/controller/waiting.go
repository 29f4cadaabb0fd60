// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// waitingEvidence is the remembered evidence of a waiting request. It is valid only for the same
// key.
type waitingEvidence struct {
	by       evidenceKey
	evidence verifier.Evidence
}

// wait remembers a waiting request, and its evidence, unless that could not be judged. It writes
// into the request what it waits for. It returns the time until the next decision.
func (c *Controller) wait(ctx context.Context, in *inputs, d verifier.Decision) time.Duration {
	request, cause := in.Request, string(d.Refusals.Reason())
	if in.claim.Rehearsal {
		cause = "" // the gauge of waiting requests counts real ones only
	}
	after := c.retries.Remember(fairqueue.Waiting{
		Name: request.Name, UID: request.UID, Claim: in.queueClaim(), Cause: cause,
		Created: request.CreationTimestamp.Time, Deadline: c.Rules.Deadline(request),
	}, in.Now)
	fresh := waitingEvidence{evidenceKeyOf(in.question()), in.Evidence}
	last, known := c.retries.Memo(request.Name, request.UID, in.Now)
	if err := in.Evidence.Err; (!known || last.by != fresh.by) && (err == nil || isVerdict(err)) {
		c.retries.Keep(request.Name, request.UID, fresh, in.Now)
	}
	if c.mayWrite(in.claim) {
		c.publishWaiting(ctx, in, d.Refusals.Reason())
	}
	return after
}

// annotateTimeout bounds the write of publishWaiting, which blocks a worker.
const annotateTimeout = 2 * time.Second

// publishWaiting writes the reason for which a request waits into its annotation, if the reason has
// changed. Each requester has a rate limit for these writes, the same as for Events. Like a denial,
// a write counts against the requester's fair share. A write that failed or is over the limit is
// retried when the request is next requeued: no decision reads the annotation.
func (c *Controller) publishWaiting(ctx context.Context, in *inputs, reason verifier.Reason) {
	request := in.Request
	text := verifier.WaitingText(reason)
	if text == "" || c.retries.Published(request.Name, request.UID) == string(reason) || !c.waitingLimits.Take(request.Spec.Username, c.Now()) {
		return
	}
	began := time.Now()
	bounded, cancel := context.WithTimeout(ctx, annotateTimeout)
	defer cancel()
	values := map[string]any{attestation.AnnotationWaiting: attestation.Statement{Reason: string(reason), Text: text}.String()}
	if in.claim.Rehearsal {
		values[attestation.AnnotationVerdict] = nil // from before a restart, or from the requester
	}
	_, err := c.actor.annotate(bounded, request, values)
	c.queue.Charge(request.Spec.Username, time.Since(began))
	switch {
	case err == nil:
		c.retries.SetPublished(request.Name, request.UID, string(reason))
	case isWriteRefused(err):
		c.reporter.reportWriteRefused(ctx, request, err)
	default:
		log.FromContext(ctx).V(1).Info("what the request waits for was not written into it", "request", request.Name, "cause", err.Error())
	}
}
