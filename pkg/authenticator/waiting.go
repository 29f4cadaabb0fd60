// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"fmt"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// unanswered is how long a request may be without an answer before that is remarkable.
const unanswered = 5 * time.Second

// noteWaiting writes down what the controller says a request waits for, for runs and for the
// commands that read files alone. Without that write they know less, and nothing else differs.
func (e *enrolment) noteWaiting(object *certificatesv1.CertificateSigningRequest) {
	annotation := object.Annotations[attestation.AnnotationWaiting]
	waiting, err := attestation.ParseWaiting(annotation)
	state, seen := readState(e.dir), cache.Waiting{Request: object.Name, Annotation: annotation}
	if err != nil || state.Waiting != nil && *state.Waiting == seen {
		return
	}
	e.log.Info("the request waits", "request", object.Name, "reason", waiting.Reason, "says", waiting.Text)
	state.Waiting = &seen
	if err := e.lock.SetState(state); err != nil {
		e.log.Info("what it waits for was not written down", "cause", err.Error())
	}
}

// WaitsFor returns what the controller has said last that the pending request waits for. It returns
// false if the controller has said nothing.
func WaitsFor(pending *cache.Pending, state *cache.State) (attestation.Waiting, bool) {
	if state.Waiting == nil || state.Waiting.Request != pending.Last().Name {
		return attestation.Waiting{}, false
	}
	waiting, err := attestation.ParseWaiting(state.Waiting.Annotation)
	return waiting, err == nil
}

// stillWaiting says what a pending request waits for, and what can be done about it.
func stillWaiting(pending *cache.Pending, state *cache.State) *Failure {
	last, answer := pending.Last(), "issued a certificate"
	if last.Hello {
		answer = "sent a challenge"
	}
	failure := &Failure{WaitingForSigner, "see: kubectl describe csr " + last.Name,
		fmt.Errorf("CertificateSigningRequest %s: signer %s has not %s yet", last.Name, signerOf(pending), answer)}
	if waiting, ok := WaitsFor(pending, state); ok {
		failure.Hint, failure.Err = waiting.Text, fmt.Errorf("%w: %s", failure.Err, waiting.Reason)
	}
	return failure
}

// progress says what the pending request waits for. It is nil before that is known, or for a while
// after the request was filed.
func (a *Authenticator) progress() *Failure {
	pending, err := a.dir.Pending()
	if err != nil || pending == nil || pending.Last().UID == "" {
		return nil //nolint:nilerr // the worker says what is wrong with the file
	}
	state := readState(a.dir)
	if _, known := WaitsFor(pending, state); !known && a.now().Sub(pending.Last().Filed) < unanswered {
		return nil
	}
	return stillWaiting(pending, state)
}
