// SPDX-License-Identifier: Apache-2.0

package enrol

import (
	"errors"
	"fmt"
	"strings"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// conclude checks and installs the certificate. Any other decision is a failure. The pending
// request is then spent, unless a write failed: then the next worker gets the decision again.
func (e *enrolment) conclude(decision csr.Decision) error {
	e.worker.spent = true
	pair, err := e.check(decision)
	if err != nil {
		return err
	}
	e.worker.enter(StepInstall)
	if err := e.saveBeforeInstall(); err != nil {
		e.worker.spent = false
		return err
	}
	if err := e.worker.lock.Install(pair); err != nil {
		e.worker.spent = false
		return err
	}
	e.worker.installed = pair
	e.worker.log.Info("installed", "node", e.pending.NodeName, "notAfter", pair.Leaf.NotAfter)
	return nil
}

// saveBeforeInstall records the state that must survive a crash after the installation. This is the
// provider with its remembered value, which the issuer has pinned, and the finished announced
// renewal.
func (e *enrolment) saveBeforeInstall() error {
	state, pending := nodestate.ReadState(e.worker.enroller.Node.Dir()), e.pending
	done := markRenewalDone(state, e.worker.replaced, pending.Requests[0].FiledAt)
	if state.Provider == pending.Provider && state.Remembered[pending.Provider] == pending.Remember && !done {
		return nil
	}
	state.Provider = pending.Provider
	if state.Remembered == nil {
		state.Remembered = map[string]string{}
	}
	state.Remembered[pending.Provider] = pending.Remember
	return e.worker.lock.SetState(state)
}

// check returns the certificate if it may be installed, else an error.
func (e *enrolment) check(decision csr.Decision) (*cache.Pair, error) {
	e.worker.enter(StepCheck)
	pending := e.pending
	name := pending.Last().Name
	why := func(r reason.Reason, verb, hint string) error {
		return r.Failure(hint, fmt.Errorf("CertificateSigningRequest %s: %s by signer %s: %q", name, verb, nodestate.SignerOf(pending), text.WithReason(decision.Reason, decision.Message)))
	}
	switch decision.Outcome {
	case csr.Denied:
		if pending.Last().Hello && decision.Reason == attestation.ReasonVersion {
			return nil, e.noCommonVersion(decision)
		}
		if decision.Reason == attestation.ReasonSuspended {
			return nil, why(reason.MachineSuspended, "denied", nodeaccess.Suspended.Remedy())
		}
		hint := explainHint(decision.Reason, "approver")
		if decision.Reason == attestation.ReasonNodeRegistered {
			hint = fmt.Sprintf("if this machine is that node and its record was lost, delete the Node: kubectl delete node %s; a new request follows after a pause, or with the command renew", pending.NodeName)
		}
		denied := why(reason.RequestDenied, "denied", hint)
		if decision.Reason == attestation.ReasonUnknownCredential || decision.Reason == attestation.ReasonRequesterNotAllowed {
			return nil, &credentialDeniedError{denied}
		}
		return nil, denied
	case csr.Failed:
		return nil, why(reason.RequestFailed, "failed", explainHint(decision.Reason, "signer"))
	case csr.Issued:
		return e.checkIssued(decision.Certificate)
	default:
		return nil, fmt.Errorf("CertificateSigningRequest %s: unknown outcome %d", name, decision.Outcome)
	}
}

// explainHint names the command that explains a reason of node-attestation-controller. Another
// approver or signer may have decided, with a reason of its own.
func explainHint(reason, decider string) string {
	hint := "ask the operator of the " + decider
	if isWord(reason) {
		hint += "; kubectl attest explain " + reason + " says what a reason of node-attestation-controller means"
	}
	return hint + "; a new request follows after a pause, or with the command renew"
}

// isWord reports whether a text can be typed into a shell as it is.
func isWord(s string) bool {
	return s != "" && !strings.ContainsFunc(s, func(r rune) bool { return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') })
}

const versionHint = "bring the plugin and the controller to releases that have a version in common"

// noCommonVersion returns a Failure with the versions of both sides.
func (e *enrolment) noCommonVersion(decision csr.Decision) error {
	pending := e.pending
	accepted := attestation.Versions{attestation.Version(pending.AttestationVersion)}
	if challenger, ok := e.worker.enroller.Provider.(provider.Challenger); ok {
		accepted = challenger.Versions()
	}
	return reason.RequestDenied.Failure(versionHint,
		fmt.Errorf("CertificateSigningRequest %s: no common version of the evidence: this plugin accepts %s, the controller serves %q",
			pending.Last().Name, accepted, text.Line(decision.Versions, 256)))
}

// takesEarly reports whether to install a certificate that is not yet valid by this machine's
// clock. It returns true if that clock is evidently wrong, or if there is no certificate to
// replace. The API server judges by its own clock.
func (e *enrolment) takesEarly() bool {
	held := e.status.Pair
	return held == nil || e.worker.enroller.Node.Now().Before(e.worker.enroller.Built) || e.worker.enroller.Node.Now().Before(held.Leaf.NotBefore)
}

// checkIssued accepts a certificate only if its key is ours, it is for this node and for client
// authentication, and it has not expired. takesEarly decides if it is not valid yet.
func (e *enrolment) checkIssued(certificate []byte) (*cache.Pair, error) {
	pending := e.pending
	key, err := csr.ParseKey(pending.Key)
	if err != nil {
		return nil, err
	}
	chain, leaf, err := csr.ParseCertificates(certificate)
	switch {
	case err != nil:
		err = &cache.UnusableError{Problem: err.Error()}
	case !cache.SameKey(leaf, key.Public()):
		err = &cache.UnusableError{Problem: "it is for another key"}
	default:
		err = cache.CheckNodeCertificate(leaf, pending.NodeName, e.worker.enroller.Node.Now())
	}
	var unusable *cache.UnusableError
	if errors.As(err, &unusable) && unusable.Early && e.takesEarly() {
		e.worker.log.Info("the certificate is installed although it is not valid yet: check this machine's clock and the signer's", "problem", unusable.Problem)
		err = nil
	}
	if err != nil {
		return nil, reason.AsFailure(fmt.Errorf("CertificateSigningRequest %s: issued %w", pending.Last().Name, err))
	}
	return &cache.Pair{Chain: chain, Key: pending.Key, Leaf: leaf, Origin: &pending.Cluster}, nil
}

// credentialDeniedError is a denial of the credential, not of the machine.
type credentialDeniedError struct{ error }

func (e *credentialDeniedError) Unwrap() error { return e.error }
