// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"crypto/x509"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// NodeSchedule computes when one node renews, retries and checks for announced renewals. It calls
// the functions that Run and Work call, so that test/reliability/fleet can simulate fleets. It does
// no I/O, and the caller provides the clock.
type NodeSchedule struct {
	a      Authenticator
	state  cache.State
	status certificateStatus
}

// renewing is a provider of which a NodeSchedule calls Renews alone.
type renewing struct{ provider.Provider }

func (renewing) Renews() bool { return true }

// NewNodeSchedule returns the schedule of a node without a certificate, whose provider renews.
// checkInterval is the setting, 0 for no checks.
func NewNodeSchedule(checkInterval time.Duration, now func() time.Time) *NodeSchedule {
	return &NodeSchedule{a: Authenticator{provider: renewing{}, checkInterval: checkInterval, now: now}}
}

// Install records a new certificate, as a worker does.
func (s *NodeSchedule) Install(leaf *x509.Certificate) {
	s.status.pair = &cache.Pair{Leaf: leaf}
	addCertificate(&s.state, &cache.Result{}, leaf.NotAfter, s.a.now())
}

// Fail records the failure of a worker. retryAfter is the API server's Retry-After, or 0.
func (s *NodeSchedule) Fail(why reason.Reason, retryAfter time.Duration) {
	var notAfter time.Time
	if s.status.pair != nil {
		notAfter = s.status.pair.Leaf.NotAfter
	}
	addFailure(&s.state, &cache.Result{Reason: string(why)}, retryAfter, notAfter, s.a.now())
	if s.status.canWait {
		spreadAfterOutage(&s.state, notAfter, s.a.now())
	}
}

// Check records a check for announced renewals that found none.
func (s *NodeSchedule) Check() { s.status.announcement.Checked = s.a.now() }

// Due reports whether a run wants a new certificate.
func (s *NodeSchedule) Due() bool {
	if s.status.pair == nil {
		return true
	}
	s.status.judgeDue(&s.a)
	return s.status.due != ""
}

// CheckDue reports whether a run wants a check for announced renewals.
func (s *NodeSchedule) CheckDue() bool { return !s.Due() && s.status.checkDue(&s.a) }

// TooEarly returns the time until a run may start another worker, 0 if it may start one now.
func (s *NodeSchedule) TooEarly() time.Duration {
	return nodestate.UntilNextAttempt(&s.state, s.status.canWait, s.a.now())
}

// Expiration returns the expirationTimestamp that a run prints: client-go runs the plugin again
// then. Call it only if the node has a certificate.
func (s *NodeSchedule) Expiration() time.Time {
	s.Due() // sets status.due
	return s.a.expiration(s.status, s.a.now())
}
