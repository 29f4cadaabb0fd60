// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// maxReported bounds how many reports are remembered. One that was forgotten is repeated.
const maxReported = 20_000

// denialEventRate bounds the Events about denials to one requester: an Event costs the API server as
// much as the denial.
var denialEventRate = fairqueue.Rate{Every: time.Second, Burst: 50}

// report reports a decision: in the log, in metrics, and in Events on the request and on its Node,
// if there is one. What a request waits for is reported once: an Event costs more than the
// decision, and hundreds of requests may wait.
func (c *Controller) report(ctx context.Context, object *certificatesv1.CertificateSigningRequest, s *snapshot, d verifier.Decision, took time.Duration) {
	switch d.Outcome {
	case verifier.Ignore:
		return
	case verifier.Wait:
		if !c.retries.News(object.Name, object.UID, d.Refusals.Error()) {
			return
		}
	default:
		c.retries.Forget(object.Name)
	}
	node := s.claim.NodeName
	reason, message := string(ReasonApproved), d.Outcome.String()
	switch {
	case len(d.Refusals) > 0:
		reason, message = string(d.Refusals.Reason()), d.Refusals.Error()
	case d.Outcome == verifier.Challenge:
		reason, message = string(ReasonChallenged), "the hello is answered by a challenge"
	case d.Outcome == verifier.ApproveServing:
		reason = string(ReasonServing)
	case d.Outcome == verifier.ApproveUnattested:
		reason, message = string(ReasonUnattested), "approved without evidence, since the node is in unattestedNodes"
	}
	line := []any{
		"request", object.Name, "signer", object.Spec.SignerName, "requester", object.Spec.Username,
		"class", d.Class.String(), "outcome", d.Outcome.String(), "reason", reason, "message", message, "audit", c.Audit,
	}
	if len(d.Warnings) > 0 {
		line = append(line, "warnings", d.Warnings.Error())
	}
	log.FromContext(ctx).Info("decided", line...)
	c.Metrics.Decided(object, d, reason, took, c.Now())
	for _, warning := range d.Warnings {
		c.event(ctx, object, node, corev1.EventTypeWarning, string(warning.Reason), warning.Message)
	}
	switch {
	case d.Outcome == verifier.Challenge, d.Outcome == verifier.Approve && c.CA != nil:
		// An intermediate step. An Event would cost as much as the step.
	case d.Outcome == verifier.Deny && !c.denialEvents.Take(object.Spec.Username, c.Now()):
		c.eventOnNode(ctx, object, node, corev1.EventTypeWarning, reason, message)
	case d.Outcome == verifier.Deny, d.Outcome == verifier.Fail, d.Outcome == verifier.ApproveUnattested:
		c.event(ctx, object, node, corev1.EventTypeWarning, reason, message)
	default:
		c.event(ctx, object, node, corev1.EventTypeNormal, reason, message)
	}
}

// event records an Event on a request and on the Node of the name that it asks for, if there is one.
// The Node's owner wants to know, whoever the requester is.
func (c *Controller) event(ctx context.Context, object *certificatesv1.CertificateSigningRequest, node, kind, reason, message string) {
	c.events.Eventf(object, nil, kind, reason, "Decide", "%s", telemetry.Message(message))
	c.eventOnNode(ctx, object, node, kind, reason, message)
}

// eventOnNode records an Event on the Node alone, once a minute for each reason. If the Node cannot
// be read, there is none.
func (c *Controller) eventOnNode(ctx context.Context, object *certificatesv1.CertificateSigningRequest, node, kind, reason, message string) {
	if node == "" {
		return
	}
	key, now := node+"/"+reason, c.Now()
	if last, ok := c.lastReported.Get(key); ok && now.Sub(last.(time.Time)) < time.Minute {
		return
	}
	regarding := nodeReference(object, node)
	if regarding == nil {
		var err error
		if regarding, err = c.getNode(ctx, node); regarding == nil || err != nil {
			return
		}
	}
	c.lastReported.Add(key, now)
	c.events.Eventf(regarding, object, kind, reason, "Decide", "%s: %s", object.Name, telemetry.Message(message))
}

// nodeReference returns a reference to the Node that files a request for itself, nil for another
// requester. As in the kubelet's own Events, the UID is the node's name, which saves reading the
// Node. kubectl describe shows Events with either UID.
func nodeReference(object *certificatesv1.CertificateSigningRequest, node string) *metav1.PartialObjectMetadata {
	if object.Spec.Username != "system:node:"+node {
		return nil
	}
	reference := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: node, UID: types.UID(node)}}
	reference.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Node"))
	return reference
}
