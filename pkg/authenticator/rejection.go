// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"context"
	"net/http"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
)

// reviewInterval is the shortest time between two reviews of the certificate.
const reviewInterval = time.Minute

// noticeRejection asks the API server whether it rejects the certificate. It asks if the same
// parent runs the plugin again before the last expirationTimestamp, or if the certificate was
// rejected before. It asks at most once a minute. Only a 401 marks the certificate as rejected. In
// doubt, the certificate is printed.
func (a *Authenticator) noticeRejection(ctx context.Context, status *nodestate.Status) {
	if status.Pair == nil || a.node.Invalid != nil {
		return
	}
	last, fingerprint, now := &status.Note, status.Pair.Fingerprint(), a.node.Now()
	early := last.Certificate == fingerprint && a.parent.PID != 0 && last.Parent == a.parent && now.Unix() < last.Until
	if !early && !status.Rejected {
		return
	}
	if since := now.Sub(time.Unix(last.Reviewed, 0)); since >= 0 && since < reviewInterval {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, a.enroller.ReviewTimeout)
	defer cancel()
	if review, err := a.node.Access.Review(ctx, status.Pair); err == nil {
		rejected := status.Rejected
		switch { // an overloaded API server gives neither answer
		case review.Status == http.StatusUnauthorized:
			rejected = true
		case review.Accepts(status.Pair):
			rejected = false
		}
		status.SetRejected(rejected)
	}
	last.Reviewed, last.Rejected = now.Unix(), status.Rejected
	a.node.Note.Write(*last) // for the worker, and for other runs
}
