// SPDX-License-Identifier: Apache-2.0

package report

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/act"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/collect"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// describe returns a text about the decision, for the log and Events.
func (r *Reporter) describe(in *collect.Inputs, d verifier.Decision, done act.Written) string {
	switch {
	case len(d.Refusals) > 0:
		return d.Refusals.Error()
	case d.Outcome == verifier.Challenge:
		return "the hello is answered by a challenge"
	case d.Outcome == verifier.Rehearsed:
		return act.PassedText(r.Rules, in, d)
	case d.Outcome == verifier.Approve:
		return fmt.Sprintf("the evidence of machine %s was accepted: signer %s may issue a certificate for node %s",
			d.Grant.Record.Machine.Name, in.Request.Spec.SignerName, d.Grant.NodeName)
	case d.Outcome == verifier.Sign:
		message := fmt.Sprintf("issued a certificate for node %s to machine %s", d.Grant.NodeName, d.Grant.Record.Machine.Name)
		if record := done.Record; record != nil && len(record.Status.Certificates) > 0 {
			newest := record.Status.Certificates[len(record.Status.Certificates)-1]
			message += fmt.Sprintf(", with serial %s, until %s", newest.Serial, newest.NotAfter.UTC().Format(time.RFC3339))
		}
		return message
	case d.Outcome == verifier.ApproveServing:
		return "the addresses of node " + d.Grant.NodeName + " were verified: its serving certificate may be issued"
	case d.Outcome == verifier.SignServing:
		return "issued a serving certificate for node " + d.Grant.NodeName
	case d.Outcome == verifier.ApproveUnattested:
		return "approved without evidence, since the node is in unattestedNodes"
	}
	return d.Outcome.String()
}

// warnOwner records an Event on the record and the machine of a node whose own request was denied
// or failed. It does so once a minute for each reason. Such a node lost its access, or is about to.
// Requests of others that claim its name cause no such Event.
func (r *Reporter) warnOwner(in *collect.Inputs, d verifier.Decision, done act.Written, reason, message string) {
	if done.Request == nil || d.Outcome != verifier.Deny && d.Outcome != verifier.Fail {
		return
	}
	for i := range in.Objects {
		record := &in.Objects[i]
		if in.Request.Spec.Username != "system:node:"+record.Spec.NodeName {
			continue
		}
		if !r.reported.MarkReported("record/"+string(record.UID)+"/"+reason, "", r.Now(), time.Minute) {
			continue
		}
		r.EventOnRecord(record, corev1.EventTypeWarning, reason, text.Quote(in.Request.Name, collect.MaxName)+": "+message)
	}
}

// EventOnRecord records an Event on a record, and on the machine that owns it, if machines are
// objects. Each Event costs the API server a write.
func (r *Reporter) EventOnRecord(record *v1alpha1.NodeAttestation, kind, reason, message string) {
	r.RecordEvents.Eventf(record, nil, kind, reason, "Decide", "%s", message)
	r.eventOnMachine(record, kind, reason, message)
}

// eventOnMachine records an Event on the machine that owns a record, if machines are objects.
func (r *Reporter) eventOnMachine(record *v1alpha1.NodeAttestation, kind, reason, message string) {
	if machine := ownerReference(record); machine != nil {
		r.RecordEvents.Eventf(machine, record, kind, reason, "Decide", "%s", message)
	}
}

// EventOnNamedNode records an Event on a Node, if there is one of that name.
func (r *Reporter) EventOnNamedNode(ctx context.Context, name, kind, reason, message string) {
	if node, err := collect.GetNode(ctx, r.Live, name); err == nil && node != nil {
		r.Events.Eventf(node, nil, kind, reason, "Decide", "%s", message)
	}
}

// ownerReference returns a reference to the machine that owns a record, nil if there is none.
func ownerReference(record *v1alpha1.NodeAttestation) *metav1.PartialObjectMetadata {
	if len(record.OwnerReferences) != 1 {
		return nil
	}
	owner := record.OwnerReferences[0]
	return &metav1.PartialObjectMetadata{
		TypeMeta:   metav1.TypeMeta{APIVersion: owner.APIVersion, Kind: owner.Kind},
		ObjectMeta: metav1.ObjectMeta{Namespace: record.Namespace, Name: owner.Name, UID: owner.UID},
	}
}
