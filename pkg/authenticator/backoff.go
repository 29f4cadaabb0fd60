// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// backOff says how soon a worker may start after the last one failed.
type backOff int

const (
	soon  backOff = iota // nothing was created: 1 to 15 s
	busy                 // the API server sheds load: 2 s to 2 min
	later                // a request failed: 30 s to 10 min
	none                 // a request is pending: the next worker watches it
)

// The bounds of back-off, without jitter.
const (
	soonFirst, soonMost   = time.Second, 15 * time.Second
	busyFirst, busyMost   = 2 * time.Second, 2 * time.Minute
	laterFirst, laterMost = 30 * time.Second, 10 * time.Minute
	// backOffCeiling is more than any back-off can be.
	backOffCeiling = 2 * laterMost
)

// delay returns how long to wait after the nth failure in a row, n from 1. It is retryAfter at
// least, but no more than laterMost of it. random, in [0, 1), adds up to half: nodes that fail
// together must not retry together.
func (b backOff) delay(n int, retryAfter time.Duration, random float64) time.Duration {
	first, most := soonFirst, soonMost
	switch b {
	case none:
		return 0
	case busy:
		first, most = busyFirst, busyMost
	case later:
		first, most = laterFirst, laterMost
	}
	d := first
	for ; n > 1 && d < most; n-- {
		d *= 2
	}
	d = max(min(d, most), min(retryAfter, laterMost))
	return d + time.Duration(random*float64(d)/2)
}

// tooEarly returns how long it is until another worker may be started, 0 if it may.
func tooEarly(state *cache.State, now time.Time) time.Duration {
	// A time from before the clock was set back means nothing.
	if state.Last == nil || state.Last.Finished.After(now) || state.NextAttempt.Sub(now) > backOffCeiling {
		return 0
	}
	return max(state.NextAttempt.Sub(now), 0)
}

// lastFailure is the recorded failure of the last worker, for a run that is too early for another.
func lastFailure(last *cache.Result, wait time.Duration) error {
	reason := Reason(last.Reason)
	if reason == "" {
		reason = certificateUnusable // it was issued, and is no good
	}
	return &Failure{reason, last.Hint, fmt.Errorf("%s (next attempt in %s)", last.Message, wait.Round(time.Second))}
}

// failed adds a failure to state, and how long to wait after it. retryAfter is what the API server
// asked for, or 0. Failures of another kind are counted from one; refusals are counted on from the
// last one. While a certificate is held, the wait is at most half of the time to notAfter, so that
// there is another attempt.
func failed(state *cache.State, result *cache.Result, retryAfter time.Duration, notAfter, now time.Time) {
	kind, before := backOffAfter(result), none
	if state.Last != nil {
		before = backOffAfter(state.Last)
	}
	switch {
	case kind == none && (before == soon || before == busy):
		state.Failures, state.Refusals = 0, 0 // a request is pending: what failed before it was created works again
	case kind == later:
		state.Failures = state.Refusals // failures of the network in between do not count
		state.Refusals++
	case kind != none && kind != before && before != none:
		state.Failures = 0
	}
	state.Last, state.NextAttempt = result, time.Time{}
	if kind == none {
		return
	}
	state.Failures++
	pause := kind.delay(state.Failures, retryAfter, rand.Float64()) //nolint:gosec // G404: jitter
	if remains := notAfter.Sub(now); remains > 0 {
		pause = min(pause, max(laterFirst, remains/2))
	}
	state.NextAttempt = now.Add(pause)
}

// backOffAfter is the back-off of the reason. A request that was given up counts as one that
// failed.
func backOffAfter(result *cache.Result) backOff {
	kind := Reason(result.Reason).info().backOff
	if result.Wasted && (kind == soon || kind == busy) {
		return later
	}
	return kind
}

// hastyWithin is how soon after a certificate was issued the next one counts as hasty.
const hastyWithin = 10 * time.Minute

// issued adds a certificate to state. If each new certificate is rejected too, or due from the
// start, the node would file requests without end. So there is a pause from the second one in short
// order on, at most half of what remains of it.
func issued(state *cache.State, result *cache.Result, notAfter, now time.Time) {
	if since := now.Sub(state.Issued); since >= 0 && since < hastyWithin {
		state.Hasty++
	} else {
		state.Hasty = 0
	}
	state.Last, state.Failures, state.Refusals, state.NextAttempt, state.Issued = result, 0, 0, time.Time{}, now
	if state.Hasty == 0 {
		return
	}
	pause := min(later.delay(state.Hasty, 0, rand.Float64()), notAfter.Sub(now)/2) //nolint:gosec // G404: jitter
	state.NextAttempt = now.Add(pause)
	result.Message = fmt.Sprintf("CertificateSigningRequest %s: a certificate was issued, %d in short order, and another is wanted already",
		result.Request, state.Hasty+1)
	result.Hint = "check that the API server trusts the signer's CA, how long certificates live, and this machine's clock"
}

// readState returns the state, the zero State if it cannot be read: the worker sets such a file
// aside.
func readState(dir cache.Dir) *cache.State {
	state, err := dir.State()
	if err != nil {
		return &cache.State{}
	}
	return state
}
