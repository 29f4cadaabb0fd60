// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
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
	_, status, err := o.review(ctx, s.pair)
	if err == nil {
		s.rejected = status == http.StatusUnauthorized
		s.due = o.whyDue(*s)
	}
	s.note.Reviewed, s.note.Rejected = now.Unix(), s.rejected
	o.note.write(s.note) // for the worker, and for the runs beside this one
}

// review has the API server say whom it takes a certificate for (authentication.k8s.io/v1 SelfSubjectReview). status is that of
// HTTP.
func (o *Options) review(ctx context.Context, pair *cache.Pair) (username string, status int, err error) {
	a, err := o.ownAccess(pair)
	if err != nil {
		return "", 0, err
	}
	client, err := csr.HTTPClient(a.config)
	if err != nil {
		return "", 0, fmt.Errorf("review certificate: %w", err)
	}
	target, err := url.JoinPath(a.config.Host, "/apis/authentication.k8s.io/v1/selfsubjectreviews")
	if err != nil {
		return "", 0, fmt.Errorf("review certificate: %w", err)
	}
	const body = `{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}`
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, target, strings.NewReader(body))
	if err != nil {
		return "", 0, fmt.Errorf("review certificate: %w", err)
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Accept", "application/json")
	response, err := client.Do(request)
	if err != nil {
		return "", 0, fmt.Errorf("review certificate: %w", err)
	}
	defer func() { _ = response.Body.Close() }()
	var answer struct {
		Status struct {
			UserInfo struct {
				Username string `json:"username"`
			} `json:"userInfo"`
		} `json:"status"`
	}
	if response.StatusCode == http.StatusCreated {
		if err := json.NewDecoder(io.LimitReader(response.Body, 1<<20)).Decode(&answer); err != nil {
			return "", 0, fmt.Errorf("review certificate: %w", err)
		}
	}
	return answer.Status.UserInfo.Username, response.StatusCode, nil
}
