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

// accepted says whose writes the policies accept, as of the last round.
type accepted struct {
	// restricted are the nodes with a revoked certificate. Policies refuse their writes, except with
	// the certificates in since.
	restricted map[string]bool
	// since has, by fingerprint, the time when the policies got the certificate.
	since map[string]time.Time
}

// next returns the state after a round. failed has the errors of policies that could not be
// written. A policy that is missing refuses nothing.
func (a *accepted) next(lists map[int32]v1alpha1.RevocationSliceSpec, failed map[string]error, now time.Time) *accepted {
	next := &accepted{restricted: map[string]bool{}, since: map[string]time.Time{}}
	behind := map[string]bool{} // nodes with a policy that could not be written
	for number, list := range lists {
		err := failed[PolicyName(number)]
		if number > Policies || errors.Is(err, errMissing) {
			continue
		}
		for _, c := range list.Certificates {
			next.restricted[c.NodeName] = true
			behind[c.NodeName] = behind[c.NodeName] || err != nil
		}
	}
	for _, list := range lists {
		for _, c := range list.Current {
			if behind[c.NodeName] {
				continue
			}
			next.since[c.SHA256] = now
			if a != nil && !a.since[c.SHA256].IsZero() {
				next.since[c.SHA256] = a.since[c.SHA256]
			}
		}
	}
	return next
}

// UntilAccepted returns how long to wait until API servers accept writes with a certificate that
// was just written into a node's record: 0 if they do, or if revocation is not running. If no policy
// has the certificate, the next round begins now. A node that uses a certificate before that gets
// some refusals, and an alert reports a revoked certificate in use.
func (e *Enforcer) UntilAccepted(node, fingerprint string) time.Duration {
	a := e.accepted.Load()
	if a == nil || !a.restricted[node] {
		return 0
	}
	since, written := a.since[fingerprint]
	if !written {
		e.wake()
		return unwrittenDelay
	}
	return max(0, acceptDelay-time.Since(since))
}
