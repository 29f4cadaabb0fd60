// SPDX-License-Identifier: Apache-2.0

package report

import (
	"context"
	"fmt"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
	corev1 "k8s.io/api/core/v1"
)

// Applied reports in the logs and in Events that certificates were revoked, or that a machine
// was suspended or resumed. The Events are on the record, its machine, and the Node.
func (r *Reporter) Applied(ctx context.Context, a revocation.Application) {
	kind, reason, message := corev1.EventTypeWarning, v1alpha1.ReasonRevoked, "from now on API servers refuse writes with "+text.Count(len(a.Certificates), "certificate")
	switch a.Action {
	case revocation.Suspended:
		reason, message = v1alpha1.ReasonSuspended, "the machine gets no certificate, and API servers refuse its writes"
	case revocation.Resumed:
		kind, reason, message = corev1.EventTypeNormal, v1alpha1.ReasonResumed, "the machine may attest again"
	}
	if a.Object != "" {
		message += fmt.Sprintf(", by %s: %s", a.Object, a.Reason)
	}
	line := []any{"action", a.Action, "node", a.Record.Spec.NodeName, "machine", a.Record.Spec.Machine.Name, "reason", reason, "message", message}
	if document := r.recorder.recordApplied(a); document != nil {
		line = append(line, "record", document)
	}
	r.RevocationLog.Info("applied", line...)
	r.EventOnRecord(a.Record, kind, reason, message)
	r.EventOnNamedNode(ctx, a.Record.Spec.NodeName, kind, reason, message)
}
