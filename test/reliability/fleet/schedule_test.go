// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"crypto/x509"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/enrol"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// nodeSchedule computes when one node renews, retries and checks for announced renewals. It calls
// the functions that a run and a worker call. It does no I/O, and its clock is the simulation's.
type nodeSchedule struct {
	node   nodestate.Node
	state  cache.State
	status nodestate.Status
}

// newNodeSchedule returns the schedule of a node without a certificate, whose provider renews.
// checkInterval is the setting, 0 for no checks.
func newNodeSchedule(checkInterval time.Duration, now func() time.Time) *nodeSchedule {
	s := &nodeSchedule{node: nodestate.Node{Access: nodeaccess.Node{Provider: "tpm", Renews: true}, CheckInterval: checkInterval, Now: now}}
	s.status = s.node.StatusOf(nil, &s.state)
	return s
}

// install records a new certificate, as a worker does.
func (s *nodeSchedule) install(leaf *x509.Certificate) {
	enrol.AddCertificate(&s.state, &cache.Result{}, leaf.NotAfter, s.node.Now())
	s.status = s.node.StatusOf(&cache.Pair{Leaf: leaf}, &s.state)
}

// fail records the failure of a worker. retryAfter is the API server's Retry-After, or 0.
func (s *nodeSchedule) fail(why reason.Reason, retryAfter time.Duration) {
	var notAfter time.Time
	if s.status.Pair != nil {
		notAfter = s.status.Pair.Leaf.NotAfter
	}
	enrol.AddFailure(&s.state, &cache.Result{Reason: string(why)}, retryAfter, notAfter, s.node.Now())
	if s.status.CanWait {
		enrol.SpreadAfterOutage(&s.state, notAfter, s.node.Now())
	}
}

// check records a check for announced renewals that found none.
func (s *nodeSchedule) check() { s.state.Announcement = &cache.Announcement{Checked: s.node.Now()} }

// due reports whether a run wants a new certificate.
func (s *nodeSchedule) due() bool {
	s.status = s.node.StatusOf(s.status.Pair, &s.state)
	return s.status.Pair == nil || s.status.Due != ""
}

// checkDue reports whether a run wants a check for announced renewals.
func (s *nodeSchedule) checkDue() bool { return !s.due() && s.status.CheckDue() }

// tooEarly returns the time until a run may start another worker, 0 if it may start one now.
func (s *nodeSchedule) tooEarly() time.Duration {
	if next := s.status.NextAttempt(); !next.IsZero() {
		return next.Sub(s.node.Now())
	}
	return 0
}

// expiration returns the expirationTimestamp that a run prints: client-go runs the plugin again
// then. Call it only if the node has a certificate.
func (s *nodeSchedule) expiration() time.Time {
	s.due() // judges the certificate at this time
	return s.status.Expiration(s.node.Now())
}
