// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"fmt"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// conclude takes what has become of the request: a certificate is checked and installed, anything else is a failure. The pending
// request has then served its time.
func (w *worker) conclude(decision csr.Decision, pending *cache.Pending) error {
	w.spent = true
	pair, err := w.check(decision, pending)
	if err != nil {
		return err
	}
	w.enter(StepInstall)
	if err := w.remember(pending); err != nil {
		w.spent = false
		return err
	}
	if err := w.lock.Install(pair); err != nil {
		w.spent = false
		return err
	}
	w.installed = pair
	w.log.Info("installed", "node", pending.NodeName, "notAfter", pair.Leaf.NotAfter)
	return nil
}

// remember notes what the provider wants back next time, before the certificate is installed: whoever issued it has pinned that, and
// a kill in between must not lose it.
func (w *worker) remember(pending *cache.Pending) error {
	state := w.readState()
	if state.Remembered[pending.Provider] == pending.Remember {
		return nil
	}
	if state.Remembered == nil {
		state.Remembered = map[string]string{}
	}
	state.Remembered[pending.Provider] = pending.Remember
	return w.lock.SetState(state)
}

// check turns a decision into a certificate that may be installed, or says why not.
func (w *worker) check(decision csr.Decision, pending *cache.Pending) (*cache.Pair, error) {
	w.enter(StepCheck)
	name := pending.Last().Name
	why := func(reason Reason, verb, hint string) error {
		return &Failure{reason, hint, fmt.Errorf("CertificateSigningRequest %s: %s by signer %s: %q: %q", name, verb, signerOf(pending), decision.Reason, decision.Message)}
	}
	switch decision.Outcome {
	case csr.Denied:
		if pending.Last().Hello && decision.Reason == attestation.ReasonVersion {
			return nil, w.noCommonVersion(decision, pending)
		}
		hint := "ask whoever runs the approver; a new request follows after a pause"
		if decision.Reason == attestation.ReasonNodeRegistered {
			hint = fmt.Sprintf("if this machine is that node and its record was lost, delete the Node: kubectl delete node %s; a new request follows after a pause", pending.NodeName)
		}
		return nil, why(RequestDenied, "denied", hint)
	case csr.Failed:
		return nil, why(RequestFailed, "failed", "ask whoever runs the signer; a new request follows after a pause")
	case csr.Issued:
		return w.checkIssued(decision.Certificate, pending)
	default:
		return nil, fmt.Errorf("CertificateSigningRequest %s: unknown outcome %d", name, decision.Outcome)
	}
}

const versionHint = "bring the plugin and the controller to releases that have a version in common"

// noCommonVersion names both lists.
func (w *worker) noCommonVersion(decision csr.Decision, pending *cache.Pending) error {
	accepted := attestation.Versions{attestation.Version(pending.AttestationVersion)}
	if challenger, ok := w.provider.(provider.Challenger); ok {
		accepted = challenger.Versions()
	}
	return &Failure{RequestDenied, versionHint,
		fmt.Errorf("CertificateSigningRequest %s: no common version of the evidence: this plugin accepts %s, the controller serves %q",
			pending.Last().Name, accepted, text.Line(decision.Versions, 256))}
}

// checkIssued accepts a certificate only if its key is ours and it is for this node, for client authentication, and valid now.
func (w *worker) checkIssued(certificate []byte, pending *cache.Pending) (*cache.Pair, error) {
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
		err = cache.CheckNodeCertificate(leaf, pending.NodeName, w.now())
	}
	if err != nil {
		return nil, AsFailure(fmt.Errorf("CertificateSigningRequest %s: issued %w", pending.Last().Name, err))
	}
	return &cache.Pair{Chain: chain, Key: pending.Key, Leaf: leaf, Origin: &pending.Cluster}, nil
}
