// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// askedRenewal names the renewal that a person asked for. An announced renewal cannot have this
// name: parentheses are not valid in names of objects.
const askedRenewal = "(asked for)"

// Renew replaces the certificate now, or gets the first one. It ends the pause after a denial or a
// failure. Unlike AwaitFirst it returns the first worker's failure. Until then it calls remark with
// each reason for which the request waits, and with the provider's caution. After a failure, runs
// of the kubelet continue to ask for the renewal, with the usual back-off.
func (a *Authenticator) Renew(ctx context.Context, wait time.Duration, remark func(error)) (*x509.Certificate, error) {
	if a.invalid != nil {
		return nil, reason.AsFailure(a.invalid)
	}
	status := a.loadStatus()
	if status.permanent {
		return nil, reason.AsFailure(status.problem)
	}
	if status.pair != nil {
		// Without a credential for the request, the certificate must not become due.
		if _, _, err := a.access(status); err != nil {
			return nil, reason.AsFailure(err)
		}
	}
	if err := a.askForRenewal(ctx, status); err != nil {
		return nil, reason.AsFailure(err)
	}
	asked := a.loadStatus()
	if asked.pair != nil && asked.due == "" {
		return asked.pair.Leaf, nil // a worker has just installed it
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	answer, supervisor := &Answer{}, a.supervisor()
	once := remarkOnce(remark)
	supervisor.progress = func() {
		for _, r := range answer.Remarks {
			once(r)
		}
		if waits := a.progress(); waits != nil {
			once(waits)
		}
	}
	after, err := supervisor.awaitWorker(ctx, asked, wait, answer)
	if err != nil {
		return nil, after.explain(err)
	}
	supervisor.awaitWorkerEnd()
	return after.pair.Leaf, nil
}

// askForRenewal records that the certificate is to be replaced, and ends the back-off. It leaves a
// worker alone that already requests a certificate.
func (a *Authenticator) askForRenewal(ctx context.Context, before certificateStatus) error {
	requests := func(s certificateStatus) bool { // a worker requests a certificate, and does not only check
		return (s.pair == nil || s.due != "" && !s.waits()) && a.supervisor().workerRuns()
	}
	if requests(before) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, lockWait) // a check for announced renewals may run
	defer cancel()
	lock, err := a.dir.WaitLock(ctx)
	if errors.Is(err, cache.ErrLocked) && requests(a.loadStatus()) {
		return nil
	}
	if err != nil {
		return err
	}
	defer lock.Unlock()
	status := a.loadStatus()
	if status.pair != nil && (before.pair == nil || status.pair.Fingerprint() != before.pair.Fingerprint()) {
		return nil // a worker has replaced it meanwhile
	}
	state, err := a.dir.State()
	if cache.MustBeSetAside(err) {
		_, err = a.dir.SetAside(cache.StateFile, a.now())
		state = &cache.State{}
	}
	if err != nil {
		return err
	}
	if err := a.supervisor().recordDeath(lock, state); err != nil {
		return err
	}
	state.NextAttempt, state.UrgentAttempt = time.Time{}, time.Time{}
	if status.pair != nil {
		status.askFor(state, a.now().UTC().Truncate(time.Second))
	}
	if err := lock.SetState(state); err != nil {
		return fmt.Errorf("ask for a renewal: %w", err)
	}
	return nil
}

// askFor makes the certificate due now, in state. If an announced renewal selects the certificate,
// that one is due, so that it does not select the next certificate, too.
func (s *certificateStatus) askFor(state *cache.State, now time.Time) {
	if state.Announcement == nil {
		state.Announcement = &cache.Announcement{}
	}
	if s.announcedRenewal() != nil {
		state.Announcement.Renewal.DueAt = now
		return
	}
	state.Announcement.Certificate = s.pair.Fingerprint()
	state.Announcement.Renewal = &cache.Renewal{Name: askedRenewal, IssuedBefore: now, DueAt: now}
}

// remarkOnce returns a function that passes each text on once.
func remarkOnce(remark func(error)) func(error) {
	remarked := map[string]bool{}
	return func(r error) {
		if !remarked[r.Error()] {
			remarked[r.Error()] = true
			remark(r)
		}
	}
}
