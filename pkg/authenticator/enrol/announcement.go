// SPDX-License-Identifier: Apache-2.0

package enrol

import (
	"context"
	"errors"
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
)

// checkAnnouncement checks whether the cluster has announced renewals, and reports the certificate
// that the kubelet uses. It returns the new status. It records errors in the state file: they are
// no failure of the worker.
func (w *worker) checkAnnouncement(ctx context.Context, status nodestate.Status) nodestate.Status {
	w.enter(StepAnnouncement)
	found := status.Announcement
	found.Checked, found.UnderWay, found.Worker = w.enroller.Node.Now().UTC(), true, w.result.Worker
	// Write the time first, so that no other worker starts at once if this one dies.
	if !w.saveAnnouncement(func(a *cache.Announcement) { *a = found }) {
		return status
	}
	w.onlyChecked = true
	to, err := w.enroller.Node.Access.OwnAccess(status.Pair)
	if err == nil {
		err = w.readAnnouncement(ctx, to, status, &found)
	}
	found.Problem = problem(err)
	if err == nil && found.Exists && status.Printed() && found.Reported != status.Pair.Fingerprint() {
		w.enter(StepReport)
		w.report(ctx, to, status.Pair, &found)
	}
	found.UnderWay = false
	w.saveAnnouncement(func(a *cache.Announcement) { *a = found })
	w.log.Info("checked for announced renewals", "exist", found.Exists, "renewal", found.Renewal, "problem", found.Problem, "reportProblem", found.ReportProblem)
	return w.enroller.Node.Load()
}

// saveAnnouncement writes the result of a check into the state file, and reports whether that
// worked.
func (w *worker) saveAnnouncement(change func(*cache.Announcement)) bool {
	state := nodestate.ReadState(w.enroller.Node.Dir())
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
func (w *worker) readAnnouncement(ctx context.Context, to nodeaccess.Access, status nodestate.Status, found *cache.Announcement) error {
	ctx, cancel := context.WithTimeout(ctx, announcementTimeout)
	defer cancel()
	announced, err := to.Announcement(ctx)
	if err != nil {
		return err
	}
	var renewal *cache.Renewal
	var done []cache.Renewal
	if announced != nil {
		renewal, done = selectRenewal(*announced, status.Pair, found.Done)
	}
	now := w.enroller.Node.Now().UTC().Truncate(time.Second)
	if announced != nil && (renewal == nil || now.Before(renewal.DueAt)) && w.writesAreRefused(ctx, to, status.Pair) {
		renewal = &cache.Renewal{Name: refusedRenewal, IssuedBefore: now, DueAt: now}
	}
	found.Answered, found.Exists = w.enroller.Node.Now().UTC(), announced != nil
	found.Certificate, found.Renewal, found.Done = status.Pair.Fingerprint(), renewal, done
	return nil
}

// writesAreRefused reports whether the API server refuses writes with the certificate because it is
// revoked. That can happen without an announced renewal: after an etcd restore, after a suspension
// has ended, or if the certificate was issued long after its request. A certificate that was just
// issued may be refused until policies have it.
func (w *worker) writesAreRefused(ctx context.Context, to nodeaccess.Access, pair *cache.Pair) bool {
	last := nodestate.ReadState(w.enroller.Node.Dir()).Last
	if last != nil && w.enroller.Node.Now().Sub(last.Finished).Abs() < refusedGrace {
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
	if found == nil || found.Renewal == nil || found.Renewal.Name == nodestate.AskedRenewal || replaced == nil || found.Certificate != replaced.Fingerprint() ||
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
