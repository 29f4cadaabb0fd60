// SPDX-License-Identifier: Apache-2.0

package report

import (
	"context"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/act"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/collect"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/log"
)

// ReasonWriteRefused is used in Events only: the API server refused to store a decision.
const ReasonWriteRefused verifier.Reason = "WriteRefused"

// WriteRefused records an Event on a request whose decision the API server refused to store.
// The write is retried after a back-off of at most a second (on rehearsals: ten minutes).
// The Event is not repeated for 14 minutes.
func (r *Reporter) WriteRefused(ctx context.Context, object *certificatesv1.CertificateSigningRequest, err error) {
	key, now := string(object.UID)+"/"+string(ReasonWriteRefused), r.Now()
	if !r.reported.MarkReported(key, "", now, telemetry.DedupInterval) {
		return
	}
	if !r.eventLimits.Take(object.Spec.Username, now) {
		r.reported.Forget(key)
		return
	}
	r.Event(ctx, object, "", corev1.EventTypeWarning, string(ReasonWriteRefused), text.Line("the API server refuses a write, which is retried: "+err.Error(), collect.MaxNote))
}

// Unpublished reports that the reason for which a request waits was not written into it. The
// write is retried when the request is next requeued.
func (r *Reporter) Unpublished(ctx context.Context, object *certificatesv1.CertificateSigningRequest, err error) {
	switch {
	case err == nil:
	case act.IsWriteRefused(err):
		r.WriteRefused(ctx, object, err)
	default:
		log.FromContext(ctx).V(1).Info("what the request waits for was not written into it", "request", object.Name, "cause", err.Error())
	}
}
