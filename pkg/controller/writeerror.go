// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// ReasonWriteRefused is a reason of Events only: a decision could not be written.
const ReasonWriteRefused verifier.Reason = "WriteRefused"

// writeError is what the API server answered to a write.
type writeError struct{ err error }

func (e *writeError) Error() string { return e.err.Error() }
func (e *writeError) Unwrap() error { return e.err }

// written marks the error of a write, nil if there is none.
func written(err error) error {
	if err == nil {
		return nil
	}
	return &writeError{err}
}

// isWriteRefused reports whether the API server refused a write for good: RBAC, an admission plugin
// or validation. A conflict or a timeout is none of these: a retry may succeed.
func isWriteRefused(err error) bool {
	var write *writeError
	return errors.As(err, &write) &&
		(apierrors.IsForbidden(err) || apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) || apierrors.IsRequestEntityTooLargeError(err))
}

// reportWriteRefused records an Event on a request whose decision the API server refused. The write
// is retried after a back-off of a second at most. The Event is not repeated for 14 minutes.
func (r *reporter) reportWriteRefused(ctx context.Context, object *certificatesv1.CertificateSigningRequest, err error) {
	key, now := string(object.UID)+"/"+string(ReasonWriteRefused), r.Now()
	if last, ok := r.last.Get(key); ok && now.Sub(last.(time.Time)) < telemetry.DedupInterval {
		return
	}
	if !r.eventLimits.Take(object.Spec.Username, now) {
		return
	}
	r.last.Add(key, now)
	r.event(ctx, object, "", corev1.EventTypeWarning, string(ReasonWriteRefused), text.Line("the API server refuses a write, which is retried: "+err.Error(), maxNote))
}

// maxNote bounds an Event's note, in bytes, with what text.Line adds. The API server takes 1 KiB.
const maxNote = telemetry.MaxMessage - 4

// writeRecord writes a record under the version that was read.
func (a *actor) writeRecord(ctx context.Context, record *v1alpha1.NodeAttestation) error {
	return written(a.records.Write(ctx, record, a.Now()))
}
