// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"context"
	"net/http"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

const (
	// reviewTimeout bounds the one call to the network that a run makes itself.
	reviewTimeout = time.Second
	// reviewInterval is how often it may make it.
	reviewInterval = time.Minute
)

// noticeRejection asks the API server about the certificate when the same parent asks again before the time it was given, at
// most once a minute. Only a 401 marks the certificate as rejected: when in doubt, it is printed.
func (o *Options) noticeRejection(ctx context.Context, s *standing) {
	if s.pair == nil || o.invalid != nil {
		return
	}
	fingerprint, now := s.pair.Fingerprint(), o.now()
	early := s.note.Certificate == fingerprint && o.Parent.PID != 0 && s.note.Parent == o.Parent && now.Unix() < s.note.Until
	if !early && !s.rejected {
		return
	}
	if since := now.Sub(time.Unix(s.note.Reviewed, 0)); since >= 0 && since < reviewInterval {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, reviewTimeout)
	defer cancel()
	review, err := o.review(ctx, s.pair)
	if err == nil {
		s.rejected = review.Status == http.StatusUnauthorized
		s.due = o.whyDue(*s)
	}
	s.note.Reviewed, s.note.Rejected = now.Unix(), s.rejected
	o.note.write(s.note) // for the worker, and for the runs beside this one
}

// review asks the API server whom it takes a certificate for.
func (o *Options) review(ctx context.Context, pair *cache.Pair) (nodeaccess.Review, error) {
	to, err := o.ownAccess(pair)
	if err != nil {
		return nodeaccess.Review{}, err
	}
	return to.Review(ctx)
}

// accepts reports whether the API server took the certificate for the node that it names.
func accepts(review nodeaccess.Review, pair *cache.Pair) bool {
	return review.Status == http.StatusCreated && review.Username == pair.Leaf.Subject.CommonName
}
