// SPDX-License-Identifier: Apache-2.0

package enrol

import (
	"fmt"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// noteWaiting stores the controller's reason for which a request waits, for runs and for commands
// that only read files. If that write fails, only the messages lack the reason.
func (e *enrolment) noteWaiting(object *certificatesv1.CertificateSigningRequest) {
	annotation := object.Annotations[attestation.AnnotationWaiting]
	waiting, err := attestation.ParseStatement(annotation)
	state, seen := nodestate.ReadState(e.worker.enroller.Node.Dir()), cache.Waiting{Request: object.Name, Annotation: annotation}
	if err != nil || state.Waiting != nil && *state.Waiting == seen {
		return
	}
	e.worker.log.Info("the request waits", "request", object.Name, "reason", waiting.Reason, "says", waiting.Text)
	state.Waiting = &seen
	if err := e.worker.lock.SetState(state); err != nil {
		e.worker.log.Info("cannot save the controller's reason to wait", "cause", err.Error())
	}
}

// StillWaiting returns a Failure with the reason for which a pending request waits, and its remedy.
func StillWaiting(pending *cache.Pending, state *cache.State) *reason.Failure {
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
