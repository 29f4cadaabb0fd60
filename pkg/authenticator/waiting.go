// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"fmt"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// unanswered is the time without an answer after which a remark is shown.
const unanswered = 5 * time.Second

// noteWaiting stores the controller's reason for which a request waits, for runs and for commands
// that only read files. If that write fails, only the messages lack the reason.
func (e *enrolment) noteWaiting(object *certificatesv1.CertificateSigningRequest) {
	annotation := object.Annotations[attestation.AnnotationWaiting]
	waiting, err := attestation.ParseStatement(annotation)
	state, seen := nodestate.ReadState(e.worker.plugin.node.Dir()), cache.Waiting{Request: object.Name, Annotation: annotation}
	if err != nil || state.Waiting != nil && *state.Waiting == seen {
		return
	}
	e.worker.log.Info("the request waits", "request", object.Name, "reason", waiting.Reason, "says", waiting.Text)
	state.Waiting = &seen
	if err := e.worker.lock.SetState(state); err != nil {
		e.worker.log.Info("cannot save the controller's reason to wait", "cause", err.Error())
	}
}

// stillWaiting returns a Failure with the reason for which a pending request waits, and its remedy.
func stillWaiting(pending *cache.Pending, state *cache.State) *reason.Failure {
	last, answer := pending.Last(), "issued a certificate"
	switch {
	case last.Hello:
		answer = "sent a challenge"
	case attestation.IsRehearsalSigner(pending.SignerName):
		answer = "given its verdict"
	}
	failure := reason.WaitingForSigner.Failure("see: kubectl describe csr "+last.Name,
		fmt.Errorf("CertificateSigningRequest %s: signer %s has not %s yet", last.Name, nodestate.SignerOf(pending), answer))
	if waiting, ok := nodestate.WaitsFor(pending, state); ok {
		failure.Hint, failure.Err = waiting.Text, fmt.Errorf("%w: %s", failure.Err, waiting.Reason)
	}
	return failure
}

// progress returns what the pending request waits for. It is nil while that is not known, and until
// the time unanswered has passed since the request was filed.
func (a *Authenticator) progress() *reason.Failure {
	pending, err := a.node.Dir().Pending()
	if err != nil || pending == nil || pending.Last().UID == "" {
		return nil //nolint:nilerr // the worker reports what is wrong with the file
	}
	state := nodestate.ReadState(a.node.Dir())
	if _, known := nodestate.WaitsFor(pending, state); !known && a.node.Now().Sub(pending.Last().FiledAt) < unanswered {
		return nil
	}
	return stillWaiting(pending, state)
}
