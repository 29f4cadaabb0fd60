// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/enrol"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// Renew replaces the certificate now, or gets the first one. It ends the pause after a denial or a
// failure. Unlike AwaitFirst it returns the first worker's failure. Until then it calls remark with
// each reason for which the request waits, and with the provider's caution. After a failure, runs
// of the kubelet continue to ask for the renewal, with the usual back-off.
func (a *Authenticator) Renew(ctx context.Context, wait time.Duration, remark func(error)) (*x509.Certificate, error) {
	if a.node.Invalid != nil {
		return nil, reason.AsFailure(a.node.Invalid)
	}
	status := a.node.Load()
	if status.Permanent {
		return nil, reason.AsFailure(status.Problem)
	}
	if status.Pair != nil {
		// Without a credential for the request, the certificate must not become due.
		if _, _, err := status.Access(); err != nil {
			return nil, reason.AsFailure(err)
		}
	}
	if err := a.askForRenewal(ctx, status); err != nil {
		return nil, reason.AsFailure(err)
	}
	asked := a.node.Load()
	if asked.Pair != nil && asked.Due == "" {
		return asked.Pair.Leaf, nil // a worker has just installed it
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
		return nil, after.Explain(err)
	}
	supervisor.awaitWorkerEnd()
	return after.Pair.Leaf, nil
}

// askForRenewal records that the certificate is to be replaced, and ends the back-off. It leaves a
// worker alone that already requests a certificate.
func (a *Authenticator) askForRenewal(ctx context.Context, before nodestate.Status) error {
	requests := func(s nodestate.Status) bool { // a worker requests a certificate, and does not only check
		return (s.Pair == nil || s.Due != "" && !s.Waits()) && a.supervisor().workerRuns()
	}
	if requests(before) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, enrol.LockWait) // a check for announced renewals may run
	defer cancel()
	lock, err := a.node.Dir().WaitLock(ctx)
	if errors.Is(err, cache.ErrLocked) && requests(a.node.Load()) {
		return nil
	}
	if err != nil {
		return err
	}
	defer lock.Unlock()
	status := a.node.Load()
	if status.Pair != nil && (before.Pair == nil || status.Pair.Fingerprint() != before.Pair.Fingerprint()) {
		return nil // a worker has replaced it meanwhile
	}
	state, err := a.node.Dir().State()
	if cache.MustBeSetAside(err) {
		_, err = a.node.Dir().SetAside(cache.StateFile, a.node.Now())
		state = &cache.State{}
	}
	if err != nil {
		return err
	}
	if err := a.enroller.RecordDeath(lock, state); err != nil {
		return err
	}
	state.NextAttempt, state.UrgentAttempt = time.Time{}, time.Time{}
	if status.Pair != nil {
		askFor(status, state, a.node.Now().UTC().Truncate(time.Second))
	}
	if err := lock.SetState(state); err != nil {
		return fmt.Errorf("ask for a renewal: %w", err)
	}
	return nil
}

// askFor makes the certificate due now, in state. If an announced renewal selects the certificate,
// that one is due, so that it does not select the next certificate, too.
func askFor(status nodestate.Status, state *cache.State, now time.Time) {
	if state.Announcement == nil {
		state.Announcement = &cache.Announcement{}
	}
	if status.AnnouncedRenewal() != nil {
		state.Announcement.Renewal.DueAt = now
		return
	}
	state.Announcement.Certificate = status.Pair.Fingerprint()
	state.Announcement.Renewal = &cache.Renewal{Name: nodestate.AskedRenewal, IssuedBefore: now, DueAt: now}
}
