// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"context"
	"crypto/x509"
	"fmt"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// askedRenewal names the renewal that a person asked for. No announced renewal has it, since it is
// not the name of an object.
const askedRenewal = "(asked for)"

// Renew replaces the certificate now, or gets the first one. It ends the pause after a denial or a
// failure. Unlike AwaitFirst it returns the first worker's failure. Until then it calls remark with
// each reason for which the request waits, and with the provider's caution. After a failure, runs
// of the kubelet continue to ask for the renewal, with the usual back-off.
func (a *Authenticator) Renew(ctx context.Context, wait time.Duration, remark func(error)) (*x509.Certificate, error) {
	if a.invalid != nil {
		return nil, AsFailure(a.invalid)
	}
	if status := a.loadStatus(); status.permanent {
		return nil, AsFailure(status.problem)
	}
	if err := a.askForRenewal(ctx); err != nil {
		return nil, AsFailure(err)
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
	status, err := supervisor.awaitWorker(ctx, a.loadStatus(), wait, answer)
	if err != nil {
		return nil, status.explain(err)
	}
	supervisor.awaitWorkerEnd()
	return status.pair.Leaf, nil
}

// askForRenewal records that the certificate is to be replaced, and ends the back-off. It leaves a
// worker alone that already requests a certificate.
func (a *Authenticator) askForRenewal(ctx context.Context) error {
	if status := a.loadStatus(); (status.pair == nil || status.due != "") && a.supervisor().workerRuns() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, lockWait) // a check for announced renewals may run
	defer cancel()
	lock, err := a.dir.WaitLock(ctx)
	if err != nil {
		return err
	}
	defer lock.Unlock()
	status := a.loadStatus()
	state := readState(a.dir)
	if err := a.supervisor().recordDeath(lock, state); err != nil {
		return err
	}
	state.NextAttempt, state.UrgentAttempt = time.Time{}, time.Time{}
	if status.pair != nil {
		if state.Announcement == nil {
			state.Announcement = &cache.Announcement{}
		}
		now := a.now().UTC().Truncate(time.Second)
		state.Announcement.Certificate = status.pair.Fingerprint()
		state.Announcement.Renewal = &cache.Renewal{Name: askedRenewal, IssuedBefore: now, DueAt: now}
	}
	if err := lock.SetState(state); err != nil {
		return fmt.Errorf("ask for a renewal: %w", err)
	}
	return nil
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
