// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// backOff says how soon a worker may be started again after it ended for a reason.
type backOff int

const (
	soon  backOff = iota // nothing was created: 1 to 15 s
	later                // a request came to nothing: 30 s to 10 min
	none                 // a request is pending: it is simply watched on
)

// The bounds of back-off. Jitter only ever adds to them.
const (
	soonFirst, soonMost   = time.Second, 15 * time.Second
	laterFirst, laterMost = 30 * time.Second, 10 * time.Minute
	// backOffCeiling is more than any back-off can be.
	backOffCeiling = 2 * laterMost
)

// delay returns how long to wait after the nth failure in a row, n from 1; random is in [0, 1).
func (b backOff) delay(n int, random float64) time.Duration {
	first, most := soonFirst, soonMost
	switch b {
	case none:
		return 0
	case later:
		first, most = laterFirst, laterMost
	}
	d := first
	for ; n > 1 && d < most; n-- {
		d *= 2
	}
	d = min(d, most)
	if b == later {
		d += time.Duration(random * float64(d) / 5)
	}
	return d
}

// tooEarly returns how long it is until another worker may be started, 0 if it may.
func (o *Options) tooEarly(state *cache.State) time.Duration {
	now := o.now()
	// What was written by a clock that has been set back since says nothing.
	if state.Last == nil || state.Last.Finished.After(now) || state.NextAttempt.Sub(now) > backOffCeiling {
		return 0
	}
	return max(state.NextAttempt.Sub(now), 0)
}

// lastFailure is what the last worker wrote down, for a run that is too early for another.
func lastFailure(last *cache.Result, wait time.Duration) error {
	reason := Reason(last.Reason)
	if reason == "" {
		reason = CertificateUnusable // it was issued, and is no good
	}
	return &Failure{reason, last.Hint, fmt.Errorf("%s (next attempt in %s)", last.Message, wait.Round(time.Second))}
}

// failed notes a failure in state, and how long to wait after it. Failures of another kind start their count anew. While a certificate
// is held, half of what remains of it, to notAfter, may pass at most: there has to be another attempt.
func failed(state *cache.State, result *cache.Result, notAfter, now time.Time) {
	kind, before := backOffAfter(result), none
	if state.Last != nil {
		before = backOffAfter(state.Last)
	}
	// A request that is pending says that what went wrong before it was created goes right again.
	if kind != before && before != none && (kind != none || before == soon) {
		state.Failures = 0
	}
	state.Last, state.NextAttempt = result, time.Time{}
	if kind == none {
		return
	}
	state.Failures++
	pause := kind.delay(state.Failures, rand.Float64()) //nolint:gosec // G404: jitter
	if remains := notAfter.Sub(now); remains > 0 {
		pause = min(pause, max(laterFirst, remains/2))
	}
	state.NextAttempt = now.Add(pause)
}

// backOffAfter is the back-off of the reason, but a request that was given up is one that came to nothing.
func backOffAfter(result *cache.Result) backOff {
	if kind := Reason(result.Reason).info().backOff; kind != soon || !result.Wasted {
		return kind
	}
	return later
}

// hastyWithin is how soon after a certificate was issued the next one counts as hasty.
const hastyWithin = 10 * time.Minute

// issued notes a certificate in state. One that is wanted again at once, since it is rejected, too, or due from the start, would
// make the node file requests without end: from the second in short order on, there is a pause, in which half of what remains may
// pass at most.
func issued(state *cache.State, result *cache.Result, notAfter, now time.Time) {
	if since := now.Sub(state.Issued); since >= 0 && since < hastyWithin {
		state.Hasty++
	} else {
		state.Hasty = 0
	}
	state.Last, state.Failures, state.NextAttempt, state.Issued = result, 0, time.Time{}, now
	if state.Hasty == 0 {
		return
	}
	pause := min(later.delay(state.Hasty, rand.Float64()), notAfter.Sub(now)/2) //nolint:gosec // G404: jitter
	state.NextAttempt = now.Add(pause)
	result.Message = fmt.Sprintf("CertificateSigningRequest %s: a certificate was issued, %d in short order, and another is wanted already",
		result.Request, state.Hasty+1)
	result.Hint = "check that the API server trusts the signer's CA, how long certificates live, and this machine's clock"
}

// recordDeath notes in state that the worker named last died without a result. The first time it is followed at once, since the
// kubelet's restart kills it, too; then there is a back-off. The caller holds the lock.
func (o *Options) recordDeath(lock *cache.Lock, state *cache.State) error {
	dead := o.dir.Worker()
	if dead.PID == 0 || state.Last != nil && state.Last.Worker == dead {
		return nil
	}
	now := o.now().UTC()
	result := &cache.Result{
		Worker: dead, Reason: string(WorkerUnavailable), Started: now, Finished: now,
		Message: "the worker died without a result", Hint: "see " + o.dir.File(cache.LogFile),
	}
	failed(state, result, time.Time{}, now)
	if state.Failures == 1 {
		state.NextAttempt = time.Time{}
	}
	return lock.SetState(state)
}

// readState returns the state, the zero State where it cannot be read: the worker sets it aside.
func (o *Options) readState() *cache.State {
	state, err := o.dir.State()
	if err != nil {
		return &cache.State{}
	}
	return state
}
