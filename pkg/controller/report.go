// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/go-logr/logr"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/decisionlog"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// reportConfig configures a reporter.
type reportConfig struct {
	rules  *verifier.Rules
	issuer signing.Issuer
	audit  bool
	// decisions says where final decisions are recorded. source is the source of the machines, as
	// in records.
	decisions decisionlog.Config
	source    string
	// revocationLog has the log lines about revocations.
	revocationLog logr.Logger
	// metrics are optional.
	metrics *telemetry.Metrics
	// events records Events on requests and Nodes. recordEvents records Events on records and on
	// the machines that own them. newReporter wraps both in telemetry.NewDedupRecorder.
	events, recordEvents events.EventRecorder
	// live reads from the API server.
	live    client.Reader
	retries *fairqueue.Retries[waitingEvidence]
	now     func() time.Time
}

// reporter reports decisions.
type reporter struct {
	reportConfig
	recorder *recorder
	// eventLimits bounds the Events about denied and waiting requests of each requester.
	eventLimits *fairqueue.Limiters
	// reported has what was reported: NODE/REASON, record/UID/REASON, and requests, which were
	// counted (issued/UID) or could not be written (UID/WriteRefused).
	reported telemetry.Once
}

// newReporter makes a reporter.
func newReporter(config reportConfig) *reporter {
	config.events, config.recordEvents = telemetry.NewDedupRecorder(config.events), telemetry.NewDedupRecorder(config.recordEvents)
	return &reporter{reportConfig: config, recorder: newRecorder(config), eventLimits: fairqueue.NewLimiters(eventRate)}
}

// report reports a decision: in the log, in metrics, and in Events on the request and on its Node,
// if there is one. The reason for which a request waits is reported once: an Event costs more than
// the decision, and hundreds of requests may wait.
func (r *reporter) report(ctx context.Context, in *inputs, d verifier.Decision, done written, took time.Duration) {
	object := in.Request
	switch d.Outcome {
	case verifier.Ignore:
		return
	case verifier.Wait:
		if !r.retries.MarkReported(object.Name, object.UID, d.Refusals.Error()) {
			return
		}
	default:
		r.retries.Forget(object.Name)
	}
	node := in.claim.NodeName
	if in.Node == verifier.Absent {
		node = ""
	}
	reason, message := string(ReasonApproved), r.describe(in, d, done)
	switch {
	case len(d.Refusals) > 0:
		reason = string(d.Refusals.Reason())
	case d.Outcome == verifier.Challenge:
		reason = string(ReasonChallenged)
	case d.Outcome == verifier.Rehearsed:
		reason = attestation.ReasonRehearsalPassed
	case d.Outcome == verifier.ApproveServing:
		reason = string(ReasonServing)
	case d.Outcome == verifier.ApproveUnattested:
		reason = string(ReasonUnattested)
	}
	about := subjectOf(in, d)
	r.log(ctx, in, d, done, about, reason, message)
	if in.claim.Rehearsal {
		return // its verdict is in the request, and nothing was decided
	}
	r.metrics.Decided(object, d, reason, took, r.now())
	r.warnOwner(in, d, done, reason, about.note(message))
	for _, warning := range d.Warnings {
		r.event(ctx, object, node, corev1.EventTypeWarning, string(warning.Reason), about.note(warning.Message))
	}
	note := about.note(message)
	switch {
	case d.Outcome == verifier.Challenge, d.Outcome == verifier.Approve && r.issuer.Issues():
		// An intermediate step. An Event would cost as much as the step.
	case done.record != nil:
		// The record gets the Event instead of the request, whose conditions already say so.
		r.eventOnRecord(done.record, corev1.EventTypeNormal, reason, text.Quote(object.Name, maxName)+": "+note)
		r.eventOnNode(ctx, object, node, corev1.EventTypeNormal, reason, note)
	case d.Outcome == verifier.Wait && !r.eventLimits.Take(object.Spec.Username, r.now()):
		// A waiting request over the limit gets no Event.
	case d.Outcome == verifier.Deny && !r.eventLimits.Take(object.Spec.Username, r.now()):
		// A denied request over the limit gets only an Event on its Node.
		r.eventOnNode(ctx, object, node, corev1.EventTypeWarning, reason, note)
	case d.Outcome == verifier.Deny, d.Outcome == verifier.Fail, d.Outcome == verifier.ApproveUnattested:
		r.event(ctx, object, node, corev1.EventTypeWarning, reason, note)
	default:
		r.event(ctx, object, node, corev1.EventTypeNormal, reason, note)
	}
}

// log writes the log line about a decision, and records a final decision.
func (r *reporter) log(ctx context.Context, in *inputs, d verifier.Decision, done written, about Subject, reason, message string) {
	line := append([]any{
		"request", in.Request.Name, "signer", in.Request.Spec.SignerName, "requester", in.Request.Spec.Username,
		"outcome", d.Outcome.String(), "reason", reason, "message", message, "audit", r.audit,
	}, about.fields()...)
	if len(d.Warnings) > 0 {
		line = append(line, "warnings", d.Warnings.Error())
	}
	if record := r.recorder.record(in, d, done, about, reason); record != nil {
		line = append(line, "record", record)
	}
	log.FromContext(ctx).Info("decided", line...)
}

// event records an Event on a request, and on the Node whose name it requests, if that Node exists.
// The Node's owner needs to know, also if another requester filed the request.
func (r *reporter) event(ctx context.Context, object *certificatesv1.CertificateSigningRequest, node, kind, reason, message string) {
	r.events.Eventf(object, nil, kind, reason, "Decide", "%s", message)
	r.eventOnNode(ctx, object, node, kind, reason, message)
}

// eventOnNode records an Event on the Node alone, once a minute for each reason. It does nothing if
// the Node cannot be read.
func (r *reporter) eventOnNode(ctx context.Context, object *certificatesv1.CertificateSigningRequest, node, kind, reason, message string) {
	if node == "" {
		return
	}
	key := node + "/" + reason
	if !r.reported.MarkReported(key, "", r.now(), time.Minute) {
		return
	}
	regarding := nodeReference(object, node)
	if regarding == nil {
		var err error
		if regarding, err = getNode(ctx, r.live, node); regarding == nil || err != nil {
			r.reported.Forget(key)
			return
		}
	}
	r.events.Eventf(regarding, object, kind, reason, "Decide", "%s: %s", text.Quote(object.Name, maxName), message)
}

// nodeReference returns a reference to the Node that filed a request for itself, nil for another
// requester. Its UID is the node's name, as in the kubelet's own Events. That saves reading the
// Node, and kubectl describe shows Events with either UID.
func nodeReference(object *certificatesv1.CertificateSigningRequest, node string) *metav1.PartialObjectMetadata {
	if object.Spec.Username != "system:node:"+node {
		return nil
	}
	reference := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: node, UID: types.UID(node)}}
	reference.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Node"))
	return reference
}
