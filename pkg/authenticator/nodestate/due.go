// SPDX-License-Identifier: Apache-2.0

package nodestate

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// underWay bounds the time of a check. A worker that takes longer has died.
const underWay = time.Minute

// AskedRenewal names the renewal that a person asked for. An announced renewal cannot have this
// name: parentheses are not valid in names of objects.
const AskedRenewal = "(asked for)"

// Checks reports whether this node checks for announced renewals. A node that cannot request the
// next certificate with its own cannot renew.
func (n *Node) Checks() bool {
	return n.CheckInterval > 0 && n.Invalid == nil && n.Access.Renews
}

// jittered returns the interval, shortened by up to a quarter. The reduction depends on the
// certificate and the time of the last check alone. So a fleet spreads out, and each run computes
// the same time.
func (n *Node) jittered(fingerprint string, last time.Time) time.Duration {
	sum := sha256.Sum256(binary.BigEndian.AppendUint64([]byte(fingerprint), uint64(last.Unix()))) //nolint:gosec // G115: any bits will do
	fraction := float64(binary.BigEndian.Uint64(sum[:])) / math.MaxUint64
	return n.CheckInterval - time.Duration(fraction*float64(n.CheckInterval)/4)
}

// NextCheck returns the time of the next check for announced renewals, in whole seconds. The start
// of a certificate counts as a check, since an announcement from before that time does not select
// the certificate.
func (s *Status) NextCheck() time.Time {
	now, last := s.node.Now(), time.Time{}
	for _, at := range []time.Time{s.Pair.Leaf.NotBefore, s.Announcement.Checked} {
		// A time in the future was written before the clock was set back. Ignore it.
		if at.After(last) && !at.After(now) {
			last = at
		}
	}
	if last.IsZero() {
		return last
	}
	return last.Add(s.node.jittered(s.Pair.Fingerprint(), last)).Truncate(time.Second)
}

// CheckDue reports whether a worker must check for announced renewals now: the last check is too
// old, or the kubelet's certificate was not reported. A certificate that is due anyway needs no
// check, unless its renewal waits.
func (s *Status) CheckDue() bool {
	if !s.node.Checks() || s.Pair == nil || s.Due != "" && !s.Waits() {
		return false
	}
	return !s.node.Now().Before(s.NextCheck()) || s.Printed() && s.ReportOwed() && s.Announcement.NotReported != s.Pair.Fingerprint()
}

// Waits reports whether a due renewal waits for the back-off after an outage
// (enrol.SpreadAfterOutage).
func (s *Status) Waits() bool { return s.Due != "" && s.CanWait && s.postponed }

// UntilStart returns the time until a worker may start, 0 if it may start now. A check that is due
// may start while a renewal waits.
func (s *Status) UntilStart() time.Duration {
	if s.Waits() && s.CheckDue() {
		return 0
	}
	return untilNextAttempt(s.State, s.CanWait, s.node.Now())
}

// NextAttempt returns the end of the back-off, the zero time if a worker may start now.
func (s *Status) NextAttempt() time.Time {
	if untilNextAttempt(s.State, s.CanWait, s.node.Now()) == 0 {
		return time.Time{}
	}
	return nextAttempt(s.State, s.CanWait)
}

// checkUnderWay reports whether a worker is checking now.
func (s *Status) checkUnderWay() bool {
	since := s.node.Now().Sub(s.Announcement.Checked)
	return s.Announcement.UnderWay && since >= 0 && since < underWay
}

// Printed reports whether an earlier run has printed the certificate for client-go.
func (s *Status) Printed() bool {
	return s.Note.Parent.PID != 0 && s.Note.Certificate == s.Pair.Fingerprint()
}

// ReportOwed reports whether the Node must name the certificate, and does not yet.
func (s *Status) ReportOwed() bool {
	return s.Announcement.Exists && s.Announcement.Reported != s.Pair.Fingerprint()
}

// AnnouncedRenewal returns the announced renewal that selects the certificate, nil if none does.
func (s *Status) AnnouncedRenewal() *cache.Renewal {
	if s.Announcement.Certificate != s.Pair.Fingerprint() {
		return nil
	}
	return s.Announcement.Renewal
}

// bound returns the time of the next run: the earliest of until, the next check, and the announced
// renewal. A time that is not after now means soon: then Expiration uses near.
func (s *Status) bound(now, until time.Time) time.Time {
	if !s.node.Checks() {
		return until
	}
	next := s.NextCheck()
	switch {
	case s.CheckNotStarted: // no worker could be started
		next = now.Add(s.node.jittered(s.Pair.Fingerprint(), now)).Truncate(time.Second)
	case s.CheckDue(), s.checkUnderWay():
		next = now // the next run reads the result
	case s.ReportOwed() && s.Note.Certificate != "" && !s.Printed():
		next = now // the next run starts the report of this certificate
	}
	if renewal := s.AnnouncedRenewal(); renewal != nil && renewal.DueAt.Before(next) {
		next = renewal.DueAt
	}
	if next.Before(until) {
		return next
	}
	return until
}

// near returns the expirationTimestamp while a worker is getting a better certificate or is
// checking.
func (n *Node) near(pair *cache.Pair, now time.Time) time.Time {
	near := NearExpiration(pair.Leaf, now)
	if latest := now.Add(n.CheckInterval).Truncate(time.Second); n.Checks() && latest.Before(near) {
		return latest
	}
	return near
}

// Expiration returns the expirationTimestamp. client-go runs the plugin again then.
func (s *Status) Expiration(now time.Time) time.Time {
	renews := s.node.Access.Renews || s.node.Access.Provider == ""
	expiration := s.bound(now, SteadyExpiration(s.Pair.Leaf, renews))
	if s.Due != "" || !expiration.After(now) {
		expiration = s.node.near(s.Pair, now)
	}
	return expiration
}

// judge judges a certificate that can be printed.
func (s *Status) judge() {
	s.Rejected = s.Note.Rejected && s.Note.Certificate == s.Pair.Fingerprint()
	if found := s.State.Announcement; found != nil && (s.node.Checks() || found.Renewal != nil && found.Renewal.Name == AskedRenewal) {
		s.Announcement = *found
	}
	if s.node.Checks() {
		now := s.node.Now()
		s.postponed = untilNextAttempt(s.State, true, now) > 0 && untilNextAttempt(s.State, false, now) == 0
	}
	s.judgeDue()
}

// judgeDue sets why a printable certificate must be replaced, and whether that can wait.
func (s *Status) judgeDue() {
	s.Due, s.CanWait = "", false
	renewal := s.AnnouncedRenewal()
	announced := renewal != nil && !s.node.Now().Before(renewal.DueAt)
	switch {
	case s.Rejected:
		s.Due = "the API server rejects it"
	case s.Foreign:
		s.Due = fmt.Sprintf("it came from the cluster at %.253s, and the kubelet uses another cluster, with another CA", s.Pair.Origin.Server)
	case s.Pair.Exposed:
		s.Due = "others could read its key"
	case s.node.Access.Renews && !s.node.Now().Before(RenewAt(s.Pair.Leaf)):
		s.Due, s.CanWait = "its lifetime is nearly over", !announced
	case announced && renewal.Name == AskedRenewal:
		s.Due = "a person asked for a renewal"
	case announced:
		s.Due = "a renewal was announced"
	}
}

// SetRejected records whether the API server rejects the certificate, and judges it again.
func (s *Status) SetRejected(rejected bool) {
	s.Rejected = rejected
	s.judgeDue()
}

// StatusOf judges a certificate, nil for none, without reading a file.
func (n *Node) StatusOf(pair *cache.Pair, state *cache.State) Status {
	s := Status{node: n, Pair: pair, Held: pair, State: state}
	if pair != nil {
		s.judge()
	}
	return s
}
