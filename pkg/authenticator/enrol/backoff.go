// SPDX-License-Identifier: Apache-2.0

package enrol

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

const (
	// SpreadAfterOutage waits for the remaining lifetime divided by spreadPart, at most spreadMost.
	spreadMost, spreadPart = 40 * time.Minute, 8
	// spreadFrom is the number of failures in a row from which on SpreadAfterOutage adds a delay.
	// After a short outage the normal back-off is enough.
	spreadFrom = 2
)

// LastFailure returns the recorded failure of the last worker, for a run during the back-off.
func LastFailure(last *cache.Result, wait time.Duration) error {
	why := reason.Reason(last.Reason)
	if why == "" {
		why = reason.CertificateUnusable // certificates were issued too often: the result has no Reason
	}
	return why.Failure(last.Hint, fmt.Errorf("%s (next attempt in %s)", last.Message, wait.Round(time.Second)))
}

// AddFailure adds a failure and its back-off to state. retryAfter is the API server's Retry-After,
// or 0. Failures of another kind restart the count at one, unless a request was pending in between.
// Refusals continue from the last refusal, unless a request became pending after a failure of
// another kind. While a certificate is held, the back-off is at most half of the time to notAfter,
// or the shortest back-off of a refusal if that is more. So another attempt follows before the end,
// if that time is left.
func AddFailure(state *cache.State, result *cache.Result, retryAfter time.Duration, notAfter, now time.Time) {
	kind, before := backOffAfter(result), reason.BackOffNone
	if state.Last != nil {
		before = backOffAfter(state.Last)
	}
	switch {
	case kind == reason.BackOffNone && (before == reason.BackOffSoon || before == reason.BackOffBusy):
		// a request is pending, so the earlier failures are over
		state.Failures, state.Refusals = 0, 0
	case kind == reason.BackOffLater:
		state.Failures = state.Refusals // network failures in between do not count
		state.Refusals++
	case kind != reason.BackOffNone && kind != before && before != reason.BackOffNone:
		state.Failures = 0
	}
	state.Last, state.NextAttempt, state.UrgentAttempt = result, time.Time{}, time.Time{}
	if kind == reason.BackOffNone {
		return
	}
	state.Failures++
	pause := kind.Delay(state.Failures, retryAfter, rand.Float64()) //nolint:gosec // G404: jitter
	if remains := notAfter.Sub(now); remains > 0 {
		pause = min(pause, max(reason.BackOffLater.Delay(1, 0, 0), remains/2))
	}
	state.NextAttempt = now.Add(pause)
}

// RecordDeath records that the worker named last died without a result. After the first death the
// next worker may start at once, since a restart of the kubelet kills workers too. Later deaths are
// followed by a back-off. The caller holds the lock.
func (e *Enroller) RecordDeath(lock *cache.Lock, state *cache.State) error {
	dead := e.Node.Dir().Worker()
	if !nodestate.LeftNoResult(dead, state) {
		return nil
	}
	now := e.Node.Now().UTC()
	result := &cache.Result{
		Worker: dead, Reason: string(reason.WorkerUnavailable), Started: now, Finished: now,
		Message: "the worker died without a result", Hint: "see " + e.Node.Dir().File(cache.LogFile),
	}
	AddFailure(state, result, 0, time.Time{}, now)
	if state.Failures == 1 {
		state.NextAttempt = time.Time{}
	}
	return lock.SetState(state)
}

// SpreadAfterOutage delays the next attempt in state if the API server did not answer or sheds
// load. Such a failure affects the whole fleet. Without the delay, all renewals that became due
// during an outage would come in the first minute after it. The current certificate is valid until
// notAfter. Call SpreadAfterOutage only if the certificate is due for its age alone: every other
// replacement is urgent. If it becomes urgent during the delay, UrgentAttempt applies.
func SpreadAfterOutage(state *cache.State, notAfter, now time.Time) {
	if why := reason.Reason(state.Last.Reason); why != reason.APIUnreachable && why != reason.APIOverloaded || state.Failures < spreadFrom {
		return
	}
	pause := min(notAfter.Sub(now)/spreadPart, spreadMost)
	pause += time.Duration(rand.Float64() * float64(pause) / 2) //nolint:gosec // G404: jitter
	if at := now.Add(pause); at.After(state.NextAttempt) {
		state.NextAttempt, state.UrgentAttempt = at, state.NextAttempt
	}
}

// backOffAfter returns the back-off of the reason. A request that was given up counts as failed.
func backOffAfter(result *cache.Result) reason.BackOff {
	kind := reason.Reason(result.Reason).Info().BackOff
	if result.Wasted && (kind == reason.BackOffSoon || kind == reason.BackOffBusy) {
		return reason.BackOffLater
	}
	return kind
}

// A certificate that is issued within hastyWithin of the one before counts as hasty.
const hastyWithin = 10 * time.Minute

// AddCertificate adds a certificate to state. A hasty certificate is followed by a pause of at most
// half of the remaining lifetime. Otherwise the node would file requests without end if each new
// certificate was rejected, or was due at once.
func AddCertificate(state *cache.State, result *cache.Result, notAfter, now time.Time) {
	if since := now.Sub(state.Issued); since >= 0 && since < hastyWithin {
		state.Hasty++
	} else {
		state.Hasty = 0
	}
	state.Last, state.Failures, state.Refusals, state.NextAttempt, state.UrgentAttempt, state.Issued = result, 0, 0, time.Time{}, time.Time{}, now
	if state.Hasty == 0 {
		return
	}
	pause := min(reason.BackOffLater.Delay(state.Hasty, 0, rand.Float64()), notAfter.Sub(now)/2) //nolint:gosec // G404: jitter
	state.NextAttempt = now.Add(pause)
	result.Message = fmt.Sprintf("CertificateSigningRequest %s: %d certificates were issued within a short time, and the plugin needs another one",
		result.Request, state.Hasty+1)
	result.Hint = "check that the API server trusts the signer's CA, how long certificates live, and this machine's clock"
}
