// SPDX-License-Identifier: Apache-2.0

package revocation

import (
	"errors"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

const (
	// acceptDelay is the time from a policy's update until each API server applies it. API servers
	// read changed policies once a second.
	acceptDelay = 2 * time.Second
	// unwrittenDelay is the wait for a certificate that no policy has yet. Most policies get it
	// within a quarter of a second.
	unwrittenDelay = acceptDelay + 250*time.Millisecond
)

// policyState is what the policies contained after the last round.
type policyState struct {
	// restricted are the nodes with a revoked certificate. Policies refuse their writes, except
	// with current certificates.
	restricted map[string]bool
	// revoked has the fingerprints of the certificates on lists.
	revoked map[string]bool
	// writtenAt has, by fingerprint, the time when the policies got a current certificate.
	writtenAt map[string]time.Time
}

// next returns the state after a round. failed has the errors of policies that could not be
// written. A policy that is missing refuses nothing.
func (s *policyState) next(lists map[int32]v1alpha1.RevocationSliceSpec, failed map[string]error, now time.Time) *policyState {
	after := &policyState{restricted: map[string]bool{}, revoked: map[string]bool{}, writtenAt: map[string]time.Time{}}
	behind := map[string]bool{} // nodes with a policy that could not be written
	for number, list := range lists {
		err := failed[PolicyName(number)]
		if number > PolicyCount || errors.Is(err, errMissing) {
			continue
		}
		for _, c := range list.Certificates {
			after.restricted[c.NodeName] = true
			behind[c.NodeName] = behind[c.NodeName] || err != nil
		}
	}
	for _, list := range lists {
		for _, c := range list.Certificates {
			after.revoked[c.SHA256] = true
		}
		for _, c := range list.Current {
			if behind[c.NodeName] {
				continue
			}
			after.writtenAt[c.SHA256] = now
			if s != nil && !s.writtenAt[c.SHA256].IsZero() {
				after.writtenAt[c.SHA256] = s.writtenAt[c.SHA256]
			}
		}
	}
	return after
}

// Revoked reports whether a certificate is on a list.
func (e *Enforcer) Revoked(fingerprint string) bool {
	if e == nil {
		return false
	}
	s := e.state.Load()
	return s != nil && s.revoked[fingerprint]
}

// UntilAccepted returns how long to wait until API servers accept writes with a new certificate of
// a node, which must be in the node's record. It returns 0 if the node has no revoked certificate.
// It returns 0 for a revoked certificate, too: no policy will ever accept it (Revoked). If no
// policy has the certificate, UntilAccepted starts a round. The wait has no end while a policy
// cannot be written: a node that used the certificate before would be refused.
//
// Before the first round it waits for startTimeout at most, since revocation may not be set up.
func (e *Enforcer) UntilAccepted(node, fingerprint string) time.Duration {
	if e == nil {
		return 0
	}
	s := e.state.Load()
	if s == nil {
		began := e.runs.Load()
		if began == nil || time.Since(*began) > startTimeout {
			return 0
		}
		return unwrittenDelay
	}
	if !s.restricted[node] || s.revoked[fingerprint] {
		return 0
	}
	at, written := s.writtenAt[fingerprint]
	if !written {
		e.wake()
		return unwrittenDelay
	}
	return max(0, acceptDelay-time.Since(at))
}
