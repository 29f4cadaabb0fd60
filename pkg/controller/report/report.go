// SPDX-License-Identifier: Apache-2.0

// Package report reports decisions: in the process log, in metrics, in Events, and in the decision
// log.
package report

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
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/act"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/collect"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/decisionlog"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// Config configures a reporter.
type Config struct {
	Rules  *verifier.Rules
	Issuer signing.Issuer
	Audit  bool
	// Decisions says where final decisions are recorded. Source is the source of the machines, as
	// in records.
	Decisions decisionlog.Config
	Source    string
	// RevocationLog has the log lines about revocations.
	RevocationLog logr.Logger
	// Metrics are optional.
	Metrics *telemetry.Metrics
	// Events records Events on requests and Nodes. RecordEvents records Events on records and on
	// the machines that own them. New wraps both in telemetry.NewDedupRecorder.
	Events, RecordEvents events.EventRecorder
	// Live reads from the API server.
	Live    client.Reader
	Retries *fairqueue.Retries[collect.WaitingEvidence]
	Now     func() time.Time
}

// Reporter reports decisions.
type Reporter struct {
	Config
	recorder *recorder
	// eventLimits bounds the Events about denied and waiting requests of each requester.
	eventLimits *fairqueue.Limiters
	// reported has what was reported: NODE/REASON, record/UID/REASON, and requests that could not
	// be written (UID/WriteRefused).
	reported telemetry.Once
}

// New makes a reporter.
func New(config Config) *Reporter {
	config.Events, config.RecordEvents = telemetry.NewDedupRecorder(config.Events), telemetry.NewDedupRecorder(config.RecordEvents)
	return &Reporter{Config: config, recorder: newRecorder(config), eventLimits: fairqueue.NewLimiters(act.EventRate)}
}

// Report reports a decision: in the log and the decision log, in metrics, and in Events on the
// request and on its Node, if there is one. A certificate for a record causes Events on Node and
// Machine alone. The reason for which a request waits is reported once: an Event costs more than
// the decision, and hundreds of requests may wait.
func (r *Reporter) Report(ctx context.Context, in *collect.Inputs, d verifier.Decision, done act.Written, took time.Duration) {
	object := in.Request
	switch d.Outcome {
	case verifier.Ignore:
		return
	case verifier.Wait:
		if !r.Retries.MarkReported(object.Name, object.UID, d.Refusals.Error()) {
			return
		}
	default:
		r.Retries.Forget(object.Name)
	}
	node := in.Claim.NodeName
	if in.Node == verifier.Absent {
		node = ""
	}
	reason, message := string(act.ReasonApproved), r.describe(in, d, done)
	switch {
	case len(d.Refusals) > 0:
		reason = string(d.Refusals.Reason())
	case d.Outcome == verifier.Challenge:
		reason = string(act.ReasonChallenged)
	case d.Outcome == verifier.Rehearsed:
		reason = attestation.ReasonRehearsalPassed
	case d.Outcome == verifier.ApproveServing:
		reason = string(act.ReasonServing)
	case d.Outcome == verifier.ApproveUnattested:
		reason = string(act.ReasonUnattested)
	}
	about := collect.SubjectOf(in, d)
	r.Log(ctx, in, d, done, about, reason, message)
	if in.Claim.Rehearsal {
		return // its verdict is in the request, and nothing was decided
	}
	r.Metrics.Decided(object, d, reason, took, r.Now())
	r.warnOwner(in, d, done, reason, about.Note(message))
	for _, warning := range d.Warnings {
		r.Event(ctx, object, node, corev1.EventTypeWarning, string(warning.Reason), about.Note(warning.Message))
	}
	note := about.Note(message)
	switch {
	case d.Outcome == verifier.Challenge, d.Outcome == verifier.Approve && r.Issuer.Issues():
		// An intermediate step. An Event would cost as much as the step.
	case done.Record != nil:
		// The conditions of the request and of the record already say so.
		r.eventOnMachine(done.Record, corev1.EventTypeNormal, reason, text.Quote(object.Name, collect.MaxName)+": "+note)
		r.eventOnNode(ctx, object, node, corev1.EventTypeNormal, reason, note)
	case d.Outcome == verifier.Wait && !r.eventLimits.Take(object.Spec.Username, r.Now()):
		// A waiting request over the limit gets no Event.
	case d.Outcome == verifier.Deny && !r.eventLimits.Take(object.Spec.Username, r.Now()):
		// A denied request over the limit gets only an Event on its Node.
		r.eventOnNode(ctx, object, node, corev1.EventTypeWarning, reason, note)
	case d.Outcome == verifier.Deny, d.Outcome == verifier.Fail, d.Outcome == verifier.ApproveUnattested:
		r.Event(ctx, object, node, corev1.EventTypeWarning, reason, note)
	default:
		r.Event(ctx, object, node, corev1.EventTypeNormal, reason, note)
	}
}

// RecordIssued records a published certificate for which this process made no decision record. The
// facts come from the record.
func (r *Reporter) RecordIssued(ctx context.Context, object, hello *certificatesv1.CertificateSigningRequest, attested verifier.Record) {
	r.recorder.recordIssued(ctx, object, hello, attested)
}

// Log writes the log line about a decision, and records a final decision.
func (r *Reporter) Log(ctx context.Context, in *collect.Inputs, d verifier.Decision, done act.Written, about collect.Subject, reason, message string) {
	line := append([]any{
		"request", in.Request.Name, "signer", in.Request.Spec.SignerName, "requester", in.Request.Spec.Username,
		"outcome", d.Outcome.String(), "reason", reason, "message", message, "audit", r.Audit,
	}, about.Fields()...)
	if len(d.Warnings) > 0 {
		line = append(line, "warnings", d.Warnings.Error())
	}
	if record := r.recorder.record(in, d, done, about, reason); record != nil {
		line = append(line, "record", record)
	}
	log.FromContext(ctx).Info("decided", line...)
}

// Event records an Event on a request, and on the Node whose name it requests, if that Node exists.
// The Node's owner needs to know, also if another requester filed the request.
func (r *Reporter) Event(ctx context.Context, object *certificatesv1.CertificateSigningRequest, node, kind, reason, message string) {
	r.Events.Eventf(object, nil, kind, reason, "Decide", "%s", message)
	r.eventOnNode(ctx, object, node, kind, reason, message)
}

// eventOnNode records an Event on the Node alone, once a minute for each reason. It does nothing if
// the Node cannot be read.
func (r *Reporter) eventOnNode(ctx context.Context, object *certificatesv1.CertificateSigningRequest, node, kind, reason, message string) {
	if node == "" {
		return
	}
	key := node + "/" + reason
	if !r.reported.MarkReported(key, "", r.Now(), time.Minute) {
		return
	}
	regarding := nodeReference(object, node)
	if regarding == nil {
		var err error
		if regarding, err = collect.GetNode(ctx, r.Live, node); regarding == nil || err != nil {
			r.reported.Forget(key)
			return
		}
	}
	r.Events.Eventf(regarding, object, kind, reason, "Decide", "%s: %s", text.Quote(object.Name, collect.MaxName), message)
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
