// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// annotateTimeout bounds the write of publishWaiting, which blocks a worker.
const annotateTimeout = 2 * time.Second

// publishWaiting writes the reason for which a request waits into its annotation, if the reason has
// changed. Each requester has a rate limit for these writes, the same as for Events. Like a denial,
// a write counts against the requester's fair share. A write that failed or is over the limit is
// retried when the request is next requeued: no decision reads the annotation.
func (c *Controller) publishWaiting(ctx context.Context, object *certificatesv1.CertificateSigningRequest, s *snapshot, d verifier.Decision) {
	reason := d.Refusals.Reason()
	text := verifier.WaitingText(reason)
	if c.Audit && !s.claim.Rehearsal || text == "" || c.retries.Published(object.Name, object.UID) == string(reason) || !c.waitingLimits.Take(object.Spec.Username, c.Now()) {
		return
	}
	began := time.Now()
	bounded, cancel := context.WithTimeout(ctx, annotateTimeout)
	defer cancel()
	values := map[string]any{attestation.AnnotationWaiting: attestation.Statement{Reason: string(reason), Text: text}.String()}
	if s.claim.Rehearsal {
		values[attestation.AnnotationVerdict] = nil // from before a restart, or from the requester
	}
	_, err := c.actor.annotate(bounded, object, values)
	c.queue.Charge(object.Spec.Username, time.Since(began))
	switch {
	case err == nil:
		c.retries.SetPublished(object.Name, object.UID, string(reason))
	case isWriteRefused(err):
		c.reporter.reportWriteRefused(ctx, object, err)
	default:
		log.FromContext(ctx).V(1).Info("what the request waits for was not written into it", "request", object.Name, "cause", err.Error())
	}
}
