// SPDX-License-Identifier: Apache-2.0

package enrol

import (
	"crypto/x509"
	"encoding/binary"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// If an API server sheds load in between, the back-off of a denied node must not restart.
func TestOverloadDoesNotShortenTheBackOffAfterDenials(t *testing.T) {
	state := &cache.State{}
	fail := func(why reason.Reason, wasted bool) time.Duration {
		AddFailure(state, &cache.Result{Reason: string(why), Wasted: wasted}, 0, time.Time{}, plugintest.Noon)
		return state.NextAttempt.Sub(plugintest.Noon)
	}
	for range 8 {
		fail(reason.RequestDenied, false)
		if got := fail(reason.APIOverloaded, false); got > 3*time.Second {
			t.Errorf("one overload: %s", got)
		}
	}
	if got := fail(reason.RequestDenied, false); got < reason.BackOffLater.Delay(100, 0, 0) {
		t.Errorf("the ninth denial: %s", got)
	}
	if got := fail(reason.APIOverloaded, true); got < reason.BackOffLater.Delay(100, 0, 0) {
		t.Errorf("overloaded, after requests that came to nothing: %s", got)
	}
	AddCertificate(state, &cache.Result{}, plugintest.Noon.Add(time.Hour), plugintest.Noon)
	if got := fail(reason.RequestDenied, false); got > reason.BackOffLater.Delay(1, 0, 0)*3/2 {
		t.Errorf("the first denial after a certificate: %s", got)
	}
}

// Failures of another kind start a new count: a network that was long away does not make the first
// denial cost 10 minutes.
func TestFailuresAreCountedByKind(t *testing.T) {
	state := &cache.State{}
	fail := func(why reason.Reason) time.Duration {
		AddFailure(state, &cache.Result{Reason: string(why)}, 0, time.Time{}, plugintest.Noon)
		return max(state.NextAttempt.Sub(plugintest.Noon), 0)
	}
	for range 7 {
		fail(reason.APIUnreachable)
	}
	if got := fail(reason.RequestDenied); got < 30*time.Second || got > 45*time.Second {
		t.Errorf("the first denial after failures of the network: %s", got)
	}
	if got := fail(reason.WaitingForSigner); got != 0 {
		t.Errorf("pending: %s", got)
	}
	if got := fail(reason.RequestFailed); got < time.Minute {
		t.Errorf("the second request that came to nothing: %s", got)
	}
	if got := fail(reason.APIUnreachable); got < time.Second || got > 1500*time.Millisecond {
		t.Errorf("the network again: %s", got)
	}
	for range 7 {
		fail(reason.APIUnreachable)
	}
	fail(reason.WaitingForSigner) // the network is back, the request is filed
	if got := fail(reason.RequestDenied); got > 45*time.Second {
		t.Errorf("the first denial, of a request that was pending for a while: %s", got)
	}
}

// The shortest certificates that work are renewed as soon as they are due, however often.
func TestShortCertificatesAreNotPausedFor(t *testing.T) {
	for _, backdated := range []time.Duration{0, 5 * time.Minute} {
		state := &cache.State{}
		now := plugintest.Noon
		for i := range uint64(100) {
			leaf := &x509.Certificate{Raw: binary.BigEndian.AppendUint64(nil, i), NotBefore: now.Add(-backdated), NotAfter: now.Add(10 * time.Minute)}
			AddCertificate(state, &cache.Result{}, leaf.NotAfter, now)
			due := nodestate.RenewAt(leaf)
			if state.NextAttempt.After(due) {
				t.Fatalf("certificate %d, backdated by %v: due after %v, but not asked for before %v", i, backdated, due.Sub(now), state.NextAttempt.Sub(now))
			}
			now = due
		}
	}
}

// Certificates that are wanted again in short order are paused for, but never past the middle of
// what remains.
func TestHastyCertificatesArePausedFor(t *testing.T) {
	state := &cache.State{}
	now := plugintest.Noon
	issue := func(lifetime time.Duration) time.Duration {
		AddCertificate(state, &cache.Result{}, now.Add(lifetime), now)
		return max(state.NextAttempt.Sub(now), 0)
	}
	if got := issue(time.Hour); got != 0 {
		t.Errorf("the first: %s", got)
	}
	now = now.Add(time.Second)
	if got := issue(time.Hour); got < 30*time.Second || got > 45*time.Second {
		t.Errorf("the second: %s", got)
	}
	now = now.Add(time.Minute)
	if got := issue(time.Hour); got < time.Minute {
		t.Errorf("the third: %s", got)
	}
	now = now.Add(time.Minute)
	if got := issue(20 * time.Second); got != 10*time.Second {
		t.Errorf("one of 20 s: %s", got)
	}
	now = now.Add(-time.Hour) // the clock is set back
	if got := issue(time.Hour); got != 0 {
		t.Errorf("after one of the future: %s", got)
	}
	now = now.Add(hastyWithin)
	if got := issue(time.Hour); got != 0 {
		t.Errorf("after a while: %s", got)
	}
}

// unreachable is n failures in a row to reach the API server, the last of them now.
func unreachable(n int, why reason.Reason, notAfter time.Time) *cache.State {
	state := &cache.State{}
	for range n {
		AddFailure(state, &cache.Result{Reason: string(why)}, 0, notAfter, plugintest.Noon)
		SpreadAfterOutage(state, notAfter, plugintest.Noon)
	}
	return state
}

// If renewals became due during an outage of the API server, the fleet must not renew within one
// minute after it. A failure of one node alone keeps the short back-off. So does a certificate that
// is about to end.
func TestSpreadAfterOutage(t *testing.T) {
	t.Parallel()
	const minute, day = time.Minute, 24 * time.Hour
	for _, c := range []struct {
		reason      reason.Reason
		failures    int
		left        time.Duration
		least, most time.Duration
	}{
		{reason.APIUnreachable, 1, day, time.Second, 1500 * time.Millisecond},
		{reason.APIUnreachable, 2, day, 40 * minute, 60 * minute},
		{reason.APIUnreachable, 100, day, 40 * minute, 60 * minute},
		{reason.APIOverloaded, 2, day, 40 * minute, 60 * minute},
		{reason.APIUnreachable, 2, 160 * minute, 20 * minute, 30 * minute},
		{reason.APIUnreachable, 100, 3 * minute, 22500 * time.Millisecond, 33750 * time.Millisecond},
		{reason.APIUnreachable, 100, 40 * time.Second, 15 * time.Second, 22500 * time.Millisecond}, // the back-off is longer
		{reason.TPMError, 100, day, 15 * time.Second, 22500 * time.Millisecond},
		{reason.RequestDenied, 100, day, 10 * minute, 15 * minute},
		{reason.WaitingForSigner, 100, day, -1 << 63, 0},
	} {
		for range 100 {
			state := unreachable(c.failures, c.reason, plugintest.Noon.Add(c.left))
			if got := state.NextAttempt.Sub(plugintest.Noon); got < c.least || got > c.most {
				t.Errorf("%s, %d times, %v left: after %v, want %v to %v", c.reason, c.failures, c.left, got, c.least, c.most)
			}
		}
	}
}

// However long the outage is, the delay leaves a node several attempts.
func TestSpreadLeavesAttempts(t *testing.T) {
	for _, lifetime := range []time.Duration{10 * time.Minute, time.Hour, 24 * time.Hour, 168 * time.Hour} {
		state, now, attempts := &cache.State{}, plugintest.Noon, 0
		notAfter := plugintest.Noon.Add(lifetime / 10) // the latest renewal point
		for ; now.Before(notAfter.Add(-reason.BackOffLater.Delay(1, 0, 0))); attempts++ {
			AddFailure(state, &cache.Result{Reason: string(reason.APIUnreachable)}, 0, notAfter, now)
			SpreadAfterOutage(state, notAfter, now)
			now = state.NextAttempt
		}
		if attempts < 4 {
			t.Errorf("%v: %d attempts", lifetime, attempts)
		}
	}
}

// However often it fails, there is another attempt before the certificate ends.
func TestBackOffEndsBeforeTheCertificate(t *testing.T) {
	state := &cache.State{}
	for range 10 {
		AddFailure(state, &cache.Result{Reason: string(reason.RequestDenied)}, 0, plugintest.Noon.Add(4*time.Minute), plugintest.Noon)
	}
	if got := state.NextAttempt.Sub(plugintest.Noon); got != 2*time.Minute {
		t.Errorf("4 minutes before the end: %s", got)
	}
	AddFailure(state, &cache.Result{Reason: string(reason.RequestDenied)}, 0, plugintest.Noon.Add(10*time.Second), plugintest.Noon)
	if got := state.NextAttempt.Sub(plugintest.Noon); got != 30*time.Second {
		t.Errorf("10 s before the end: %s", got)
	}
}

func TestNextAttemptRespectsRetryAfter(t *testing.T) {
	state := &cache.State{}
	AddFailure(state, &cache.Result{Reason: string(reason.APIOverloaded)}, 40*time.Second, time.Time{}, plugintest.Noon)
	if got := state.NextAttempt.Sub(plugintest.Noon); got < 40*time.Second || got > time.Minute {
		t.Errorf("the next attempt is after %v", got)
	}
}
