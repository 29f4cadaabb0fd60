// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"math"
	"net/http"
	"slices"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

const (
	// announcementTimeout bounds each of the two steps of a check.
	announcementTimeout = 5 * time.Second
	// reportPause is the time between two tries to report a new certificate that policies refuse.
	reportPause = 500 * time.Millisecond
	// refusedGrace is the time after a request for a certificate in which no refusal counts:
	// policies may not have the new certificate yet.
	refusedGrace = time.Minute
	// refusedRenewal names the renewal that a node makes because the API server refuses its
	// certificate. No announced renewal has it, since it is not the name of an object.
	refusedRenewal = "(certificate refused)"
	// underWay bounds the time of a check. A worker that takes longer has died.
	underWay = time.Minute
)

// checks reports whether this node checks for announced renewals. A node that cannot request the
// next certificate with its own cannot renew.
func (a *Authenticator) checks() bool {
	return a.checkInterval > 0 && a.invalid == nil && a.renews()
}

// jittered returns the interval, shortened by up to a quarter. The reduction depends on the
// certificate and the time of the last check alone. So a fleet spreads out, and each run computes
// the same time.
func (a *Authenticator) jittered(fingerprint string, last time.Time) time.Duration {
	sum := sha256.Sum256(binary.BigEndian.AppendUint64([]byte(fingerprint), uint64(last.Unix()))) //nolint:gosec // G115: any bits will do
	fraction := float64(binary.BigEndian.Uint64(sum[:])) / math.MaxUint64
	return a.checkInterval - time.Duration(fraction*float64(a.checkInterval)/4)
}

// nextCheck returns the time of the next check for announced renewals, in whole seconds. The start
// of a certificate counts as a check, since an announcement from before that time does not select
// the certificate.
func (s *certificateStatus) nextCheck(a *Authenticator) time.Time {
	now, last := a.now(), time.Time{}
	for _, at := range []time.Time{s.pair.Leaf.NotBefore, s.announcement.Checked} {
		// A time in the future was written before the clock was set back. Ignore it.
		if at.After(last) && !at.After(now) {
			last = at
		}
	}
	if last.IsZero() {
		return last
	}
	return last.Add(a.jittered(s.pair.Fingerprint(), last)).Truncate(time.Second)
}

// checkDue reports whether a worker must check for announced renewals now: the last check is too
// old, or the kubelet's certificate was not reported. A certificate that is due anyway needs no
// check, unless its renewal waits.
func (s *certificateStatus) checkDue(a *Authenticator) bool {
	if !a.checks() || s.pair == nil || s.due != "" && !s.waits() {
		return false
	}
	return !a.now().Before(s.nextCheck(a)) || s.printed() && s.reportOwed() && s.announcement.NotReported != s.pair.Fingerprint()
}

// waits reports whether a due renewal waits for the back-off after an outage (spreadAfterOutage).
func (s *certificateStatus) waits() bool { return s.due != "" && s.canWait && s.postponed }

// untilStart returns the time until a worker may start, 0 if it may start now. A check that is due
// may start while a renewal waits.
func (s *certificateStatus) untilStart(a *Authenticator, state *cache.State) time.Duration {
	if s.waits() && s.checkDue(a) {
		return 0
	}
	return nodestate.UntilNextAttempt(state, s.canWait, a.now())
}

// checkUnderWay reports whether a worker is checking now.
func (s *certificateStatus) checkUnderWay(a *Authenticator) bool {
	since := a.now().Sub(s.announcement.Checked)
	return s.announcement.UnderWay && since >= 0 && since < underWay
}

// printed reports whether an earlier run has printed the certificate for client-go.
func (s *certificateStatus) printed() bool {
	return s.note.Parent.PID != 0 && s.note.Certificate == s.pair.Fingerprint()
}

// reportOwed reports whether the Node must name the certificate, and does not yet.
func (s *certificateStatus) reportOwed() bool {
	return s.announcement.Exists && s.announcement.Reported != s.pair.Fingerprint()
}

// announcedRenewal returns the announced renewal that selects the certificate, nil if none does.
func (s *certificateStatus) announcedRenewal() *cache.Renewal {
	if s.announcement.Certificate != s.pair.Fingerprint() {
		return nil
	}
	return s.announcement.Renewal
}

// bound returns the time of the next run: the earliest of until, the next check, and the announced
// renewal. A time that is not after now means soon: then expiration uses near.
func (s *certificateStatus) bound(a *Authenticator, now, until time.Time) time.Time {
	if !a.checks() {
		return until
	}
	next := s.nextCheck(a)
	switch {
	case s.checkNotStarted: // no worker could be started
		next = now.Add(a.jittered(s.pair.Fingerprint(), now)).Truncate(time.Second)
	case s.checkDue(a), s.checkUnderWay(a):
		next = now // the next run reads the result
	case s.reportOwed() && s.note.Certificate != "" && !s.printed():
		next = now // the next run starts the report of this certificate
	}
	if renewal := s.announcedRenewal(); renewal != nil && renewal.DueAt.Before(next) {
		next = renewal.DueAt
	}
	if next.Before(until) {
		return next
	}
	return until
}

// near returns the expirationTimestamp while a worker is getting a better certificate or is
// checking.
func (a *Authenticator) near(pair *cache.Pair, now time.Time) time.Time {
	near := nodestate.NearExpiration(pair.Leaf, now)
	if latest := now.Add(a.checkInterval).Truncate(time.Second); a.checks() && latest.Before(near) {
		return latest
	}
	return near
}

// ensureCheck starts a worker that checks for announced renewals, without waiting for it. It
// reports whether a worker runs.
func (s supervisor) ensureCheck(status certificateStatus) bool {
	if s.workerRuns() {
		return true
	}
	_, err := s.startUnlessRunning(status)
	return err == nil
}

// checkAnnouncement checks whether the cluster has announced renewals, and reports the certificate
// that the kubelet uses. It returns the new status. It records errors in the state file: they are
// no failure of the worker.
func (w *worker) checkAnnouncement(ctx context.Context, status certificateStatus) certificateStatus {
	w.enter(StepAnnouncement)
	found := status.announcement
	found.Checked, found.UnderWay, found.Worker = w.plugin.now().UTC(), true, w.result.Worker
	// Write the time first, so that no other worker starts at once if this one dies.
	if !w.saveAnnouncement(func(a *cache.Announcement) { *a = found }) {
		return status
	}
	w.onlyChecked = true
	to, err := w.plugin.node().OwnAccess(status.pair)
	if err == nil {
		err = w.readAnnouncement(ctx, to, status, &found)
	}
	found.Problem = problem(err)
	if err == nil && found.Exists && status.printed() && found.Reported != status.pair.Fingerprint() {
		w.enter(StepReport)
		w.report(ctx, to, status.pair, &found)
	}
	found.UnderWay = false
	w.saveAnnouncement(func(a *cache.Announcement) { *a = found })
	w.log.Info("checked for announced renewals", "exist", found.Exists, "renewal", found.Renewal, "problem", found.Problem, "reportProblem", found.ReportProblem)
	return w.plugin.loadStatus()
}

// saveAnnouncement writes the result of a check into the state file, and reports whether that
// worked.
func (w *worker) saveAnnouncement(change func(*cache.Announcement)) bool {
	state := nodestate.ReadState(w.plugin.dir)
	if state.Announcement == nil {
		state.Announcement = &cache.Announcement{}
	}
	change(state.Announcement)
	if err := w.lock.SetState(state); err != nil {
		w.log.Info("cannot save the result of the check for announced renewals", "cause", err.Error())
		return false
	}
	return true
}

// problem returns the text of an error for the state file, in a bounded length. A peer may have
// written a part of it.
func problem(err error) string {
	if err == nil {
		return ""
	}
	return text.Line(reason.BareURL(err).Error(), reason.MaxMessage)
}

// readAnnouncement reads the announcement from the API server, and sets in found the renewal that
// selects the certificate. On an error it does not change found.
func (w *worker) readAnnouncement(ctx context.Context, to nodeaccess.Access, status certificateStatus, found *cache.Announcement) error {
	ctx, cancel := context.WithTimeout(ctx, announcementTimeout)
	defer cancel()
	announced, err := to.Announcement(ctx)
	if err != nil {
		return err
	}
	var renewal *cache.Renewal
	var done []cache.Renewal
	if announced != nil {
		renewal, done = selectRenewal(*announced, status.pair, found.Done)
	}
	now := w.plugin.now().UTC().Truncate(time.Second)
	if announced != nil && (renewal == nil || now.Before(renewal.DueAt)) && w.writesAreRefused(ctx, to, status.pair) {
		renewal = &cache.Renewal{Name: refusedRenewal, IssuedBefore: now, DueAt: now}
	}
	found.Answered, found.Exists = w.plugin.now().UTC(), announced != nil
	found.Certificate, found.Renewal, found.Done = status.pair.Fingerprint(), renewal, done
	return nil
}

// writesAreRefused reports whether the API server refuses writes with the certificate because it is
// revoked. That can happen without an announced renewal: after an etcd restore, after a suspension
// has ended, or if the certificate was issued long after its request. A certificate that was just
// issued may be refused until policies have it.
func (w *worker) writesAreRefused(ctx context.Context, to nodeaccess.Access, pair *cache.Pair) bool {
	last := nodestate.ReadState(w.plugin.dir).Last
	if last != nil && w.plugin.now().Sub(last.Finished).Abs() < refusedGrace {
		return false
	}
	return isRevoked(to.TryWrite(ctx, pair.NodeName()))
}

// isRevoked reports whether an API server's answer says that the certificate is revoked.
func isRevoked(err error) bool {
	var refused *nodeaccess.StatusError
	return errors.As(err, &refused) && refused.Status == http.StatusForbidden && nodeaccess.ClassifyRefusal(refused.Message) == nodeaccess.Revoked
}

// selectRenewal returns the announced renewal that selects a certificate, nil if none does. still
// has those of done that are still announced.
func selectRenewal(announced attestation.Announcement, pair *cache.Pair, done []cache.Renewal) (selected *cache.Renewal, still []cache.Renewal) {
	var names []string
	byName := map[string]cache.Renewal{}
	for _, r := range announced.Renewals {
		renewal := cache.Renewal{Name: r.Name, IssuedBefore: r.IssuedBefore.UTC()}
		byName[r.Name] = renewal
		if i := slices.IndexFunc(done, renewal.Same); i >= 0 {
			names, still = append(names, r.Name), append(still, done[i])
		}
	}
	name, at, due := announced.Due(pair.NodeName(), pair.Leaf.NotBefore, names)
	if !due {
		return nil, still
	}
	renewal := byName[name]
	renewal.DueAt = at.UTC().Truncate(time.Second)
	return &renewal, still
}

// report writes the fingerprint of the certificate that the kubelet uses into an annotation of the
// Node.
func (w *worker) report(ctx context.Context, to nodeaccess.Access, pair *cache.Pair, found *cache.Announcement) {
	ctx, cancel := context.WithTimeout(ctx, announcementTimeout)
	defer cancel()
	fingerprint := pair.Fingerprint()
	err := to.Annotate(ctx, pair.NodeName(), attestation.AnnotationCertificate, fingerprint)
	// the policies may not know the new certificate yet
	for isRevoked(err) && waited(ctx, reportPause) {
		err = to.Annotate(ctx, pair.NodeName(), attestation.AnnotationCertificate, fingerprint)
	}
	found.ReportProblem = problem(err)
	if err != nil {
		found.NotReported = fingerprint
		return
	}
	found.Reported, found.NotReported = fingerprint, ""
}

// waited waits, and reports whether ctx is still valid.
func waited(ctx context.Context, pause time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(pause):
		return true
	}
}

// markRenewalDone adds the announced renewal of the replaced certificate to those that are done,
// and reports whether it did. Otherwise the renewal could also select the new certificate, whose
// NotBefore may be backdated. filed is the time of the new certificate's request, which is before
// its issuance.
func markRenewalDone(state *cache.State, replaced *cache.Pair, filed time.Time) bool {
	found := state.Announcement
	if found == nil || found.Renewal == nil || found.Renewal.Name == askedRenewal || replaced == nil || found.Certificate != replaced.Fingerprint() ||
		filed.Before(found.Renewal.IssuedBefore) || slices.ContainsFunc(found.Done, found.Renewal.Same) {
		return false
	}
	found.Done = append(found.Done, *found.Renewal)
	return true
}

// clearWorkerID removes the worker's process ID after a check. An earlier release would take a
// worker without a result for a dead one.
func (w *worker) clearWorkerID() {
	if err := w.lock.NameWorker(process.ID{}); err != nil {
		w.log.Info("cannot remove the worker's process ID from the lock file", "cause", err.Error())
	}
}
