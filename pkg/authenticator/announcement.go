// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

const (
	// announcementTimeout bounds each of the two calls of a check.
	announcementTimeout = 5 * time.Second
	// underWay is how long a check may be under way. After that its worker has died.
	underWay = time.Minute
	// maxRenewalName is that of Kubernetes, in bytes.
	maxRenewalName = 253
)

// checks reports whether this node checks for announced renewals. A node whose certificate cannot
// ask for the next one has nothing to renew with.
func (a *Authenticator) checks() bool {
	return a.checkInterval > 0 && a.invalid == nil && a.renews()
}

// jittered returns the interval, less up to a quarter of it. The certificate and the time of the
// last check decide how much. So a fleet spreads out, and each run gets the same time.
func (a *Authenticator) jittered(fingerprint string, last time.Time) time.Duration {
	sum := sha256.Sum256(binary.BigEndian.AppendUint64([]byte(fingerprint), uint64(last.Unix()))) //nolint:gosec // G115: any bits will do
	fraction := float64(binary.BigEndian.Uint64(sum[:])) / math.MaxUint64
	return a.checkInterval - time.Duration(fraction*float64(a.checkInterval)/4)
}

// nextCheck returns when the next check for announced renewals is due, in whole seconds. A
// certificate counts as checked when it begins: nothing that was announced earlier selects it.
func (s *certificateStatus) nextCheck(a *Authenticator) time.Time {
	now, last := a.now(), time.Time{}
	for _, at := range []time.Time{s.pair.Leaf.NotBefore, s.announcement.Checked} {
		// A time that is ahead is from before the clock was set back, and means nothing.
		if at.After(last) && !at.After(now) {
			last = at
		}
	}
	if last.IsZero() {
		return last
	}
	return last.Add(a.jittered(s.pair.Fingerprint(), last)).Truncate(time.Second)
}

// checkDue reports whether a worker is to check for announced renewals now: the last check is old,
// or the certificate that the kubelet uses was not reported. A certificate that is to be replaced
// anyway needs no check.
func (s *certificateStatus) checkDue(a *Authenticator) bool {
	if !a.checks() || s.pair == nil || s.due != "" {
		return false
	}
	return !a.now().Before(s.nextCheck(a)) || s.printed() && s.reportOwed() && s.announcement.NotReported != s.pair.Fingerprint()
}

// checkUnderWay reports whether a worker checks now.
func (s *certificateStatus) checkUnderWay(a *Authenticator) bool {
	since := a.now().Sub(s.announcement.Checked)
	return s.announcement.UnderWay && since >= 0 && since < underWay
}

// printed reports whether an earlier run has printed the certificate for client-go.
func (s *certificateStatus) printed() bool {
	return s.note.Parent.PID != 0 && s.note.Certificate == s.pair.Fingerprint()
}

// reportOwed reports whether the Node is to name the certificate, and does not yet.
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

// bound returns the expirationTimestamp that has client-go ask again in time for the next check and
// for an announced renewal. It is until if that comes first, and not after now if client-go is to ask
// again soon.
func (s *certificateStatus) bound(a *Authenticator, now, until time.Time) time.Time {
	if !a.checks() {
		return until
	}
	next := s.nextCheck(a)
	switch {
	case s.checkFailed: // no worker could be started
		next = now.Add(a.jittered(s.pair.Fingerprint(), now)).Truncate(time.Second)
	case s.checkDue(a), s.checkUnderWay(a):
		next = now // the next run finds the result
	case s.reportOwed() && s.note.Certificate != "" && !s.printed():
		next = now // the next run has this certificate reported
	}
	if renewal := s.announcedRenewal(); renewal != nil && renewal.DueAt.Before(next) {
		next = renewal.DueAt
	}
	if next.Before(until) {
		return next
	}
	return until
}

// near returns the expirationTimestamp while a better certificate is awaited, or the result of a
// check.
func (a *Authenticator) near(pair *cache.Pair, now time.Time) time.Time {
	near := nearExpiration(pair.Leaf, now)
	if latest := now.Add(a.checkInterval).Truncate(time.Second); a.checks() && latest.Before(near) {
		return latest
	}
	return near
}

// ensureCheck has a worker check for announced renewals, and waits for nothing. It reports whether a
// worker runs.
func (s supervisor) ensureCheck(status certificateStatus) bool {
	if s.workerRuns() {
		return true
	}
	_, err := s.startUnlessRunning(status)
	return err == nil
}

// checkAnnouncement checks whether the cluster has announced renewals, and reports the certificate
// that the kubelet uses. It returns the new status. Whatever fails is written down, and is no
// failure of the worker.
func (w *worker) checkAnnouncement(ctx context.Context, status certificateStatus) certificateStatus {
	w.enter(StepAnnouncement)
	found := status.announcement
	found.Checked, found.UnderWay, found.Worker = w.now().UTC(), true, w.result.Worker
	// First, so that a worker that dies here is not followed by another one at once.
	if !w.saveAnnouncement(func(a *cache.Announcement) { *a = found }) {
		return status
	}
	w.onlyChecked = true
	to, err := w.node().OwnAccess(status.pair)
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
	return w.loadStatus()
}

// saveAnnouncement writes down what a check has found, and reports whether that worked.
func (w *worker) saveAnnouncement(change func(*cache.Announcement)) bool {
	state := readState(w.dir)
	if state.Announcement == nil {
		state.Announcement = &cache.Announcement{}
	}
	change(state.Announcement)
	if err := w.lock.SetState(state); err != nil {
		w.log.Info("the check for announced renewals was not written down", "cause", err.Error())
		return false
	}
	return true
}

// problem is the text of an error for the state file. A peer may have written a part of it.
func problem(err error) string {
	if err == nil {
		return ""
	}
	return text.Line(bareURL(err).Error(), maxMessage)
}

// readAnnouncement asks the API server, and adds to found which renewal selects the certificate. On
// an error found stays as it was.
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
		if renewal, done, err = selectRenewal(*announced, status.pair, found.Done); err != nil {
			return err
		}
	}
	found.Answered, found.Exists = w.now().UTC(), announced != nil
	found.Certificate, found.Renewal, found.Done = status.pair.Fingerprint(), renewal, done
	return nil
}

// selectRenewal returns the announced renewal that selects a certificate, nil if none does, and
// those of done that are still announced.
func selectRenewal(announced attestation.Announcement, pair *cache.Pair, done []cache.Renewal) (selected *cache.Renewal, still []cache.Renewal, err error) {
	var names []string
	byName := map[string]cache.Renewal{}
	for _, r := range announced.Renewals {
		if r.Name == "" || len(r.Name) > maxRenewalName {
			return nil, nil, fmt.Errorf("announcement: a renewal whose name has %d bytes", len(r.Name))
		}
		renewal := cache.Renewal{Name: r.Name, IssuedBefore: r.IssuedBefore.UTC()}
		byName[r.Name] = renewal
		if i := slices.IndexFunc(done, renewal.Same); i >= 0 {
			names, still = append(names, r.Name), append(still, done[i])
		}
	}
	name, at, due := announced.Due(pair.NodeName(), pair.Leaf.NotBefore, names)
	if !due {
		return nil, still, nil
	}
	renewal := byName[name]
	if renewal.DueAt = at.UTC(); at.Before(renewal.IssuedBefore) {
		renewal.DueAt = renewal.IssuedBefore // a certificate that is issued earlier is selected, too
	}
	renewal.DueAt = renewal.DueAt.Truncate(time.Second)
	return &renewal, still, nil
}

// report has the Node name the certificate that the kubelet uses.
func (w *worker) report(ctx context.Context, to nodeaccess.Access, pair *cache.Pair, found *cache.Announcement) {
	ctx, cancel := context.WithTimeout(ctx, announcementTimeout)
	defer cancel()
	fingerprint := pair.Fingerprint()
	err := to.Annotate(ctx, pair.NodeName(), attestation.AnnotationCertificate, fingerprint)
	found.ReportProblem = problem(err)
	if err != nil {
		found.NotReported = fingerprint
		return
	}
	found.Reported, found.NotReported = fingerprint, ""
}

// renewalDone adds the announced renewal of the replaced certificate to those that are done, and
// reports whether it did. The new certificate may begin before it was issued, so that the renewal
// would select it, too. filed is when it was requested: it was issued later.
func renewalDone(state *cache.State, replaced *cache.Pair, filed time.Time) bool {
	found := state.Announcement
	if found == nil || found.Renewal == nil || replaced == nil || found.Certificate != replaced.Fingerprint() ||
		filed.Before(found.Renewal.IssuedBefore) || slices.ContainsFunc(found.Done, found.Renewal.Same) {
		return false
	}
	found.Done = append(found.Done, *found.Renewal)
	return true
}

// stopChecking gives up the worker's place after a check. An earlier release would take a worker
// without a result for one that died.
func (w *worker) stopChecking() {
	if err := w.lock.NameWorker(process.ID{}); err != nil {
		w.log.Info("the worker's place was not given up", "cause", err.Error())
	}
}
