// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"crypto/x509"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// NodeSchedule computes when one node renews, retries and checks for announced renewals. It calls
// the functions that Run and Work call, so that test/reliability/fleet can simulate fleets. It does
// no I/O, and the caller provides the clock.
type NodeSchedule struct {
	node   nodestate.Node
	state  cache.State
	status nodestate.Status
}

// NewNodeSchedule returns the schedule of a node without a certificate, whose provider renews.
// checkInterval is the setting, 0 for no checks.
func NewNodeSchedule(checkInterval time.Duration, now func() time.Time) *NodeSchedule {
	s := &NodeSchedule{node: nodestate.Node{Access: nodeaccess.Node{Provider: "tpm", Renews: true}, CheckInterval: checkInterval, Now: now}}
	s.status = s.node.StatusOf(nil, &s.state)
	return s
}

// Install records a new certificate, as a worker does.
func (s *NodeSchedule) Install(leaf *x509.Certificate) {
	addCertificate(&s.state, &cache.Result{}, leaf.NotAfter, s.node.Now())
	s.status = s.node.StatusOf(&cache.Pair{Leaf: leaf}, &s.state)
}

// Fail records the failure of a worker. retryAfter is the API server's Retry-After, or 0.
func (s *NodeSchedule) Fail(why reason.Reason, retryAfter time.Duration) {
	var notAfter time.Time
	if s.status.Pair != nil {
		notAfter = s.status.Pair.Leaf.NotAfter
	}
	addFailure(&s.state, &cache.Result{Reason: string(why)}, retryAfter, notAfter, s.node.Now())
	if s.status.CanWait {
		spreadAfterOutage(&s.state, notAfter, s.node.Now())
	}
}

// Check records a check for announced renewals that found none.
func (s *NodeSchedule) Check() { s.state.Announcement = &cache.Announcement{Checked: s.node.Now()} }

// Due reports whether a run wants a new certificate.
func (s *NodeSchedule) Due() bool {
	s.status = s.node.StatusOf(s.status.Pair, &s.state)
	return s.status.Pair == nil || s.status.Due != ""
}

// CheckDue reports whether a run wants a check for announced renewals.
func (s *NodeSchedule) CheckDue() bool { return !s.Due() && s.status.CheckDue() }

// TooEarly returns the time until a run may start another worker, 0 if it may start one now.
func (s *NodeSchedule) TooEarly() time.Duration {
	if next := s.status.NextAttempt(); !next.IsZero() {
		return next.Sub(s.node.Now())
	}
	return 0
}

// Expiration returns the expirationTimestamp that a run prints: client-go runs the plugin again
// then. Call it only if the node has a certificate.
func (s *NodeSchedule) Expiration() time.Time {
	s.Due() // judges the certificate at this time
	return s.status.Expiration(s.node.Now())
}
