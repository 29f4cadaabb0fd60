// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"crypto/x509"
	"encoding/binary"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// leafOf returns a certificate as far as times go. It has its bytes, which stand for all its other
// content, and its validity.
func leafOf(content uint64, notBefore time.Time, lifetime time.Duration) *x509.Certificate {
	return &x509.Certificate{Raw: binary.BigEndian.AppendUint64(nil, content), NotBefore: notBefore, NotAfter: notBefore.Add(lifetime)}
}

// lifetimes that are promised to work, and many in between.
func lifetimes() []time.Duration {
	const shortest, longest = 10 * time.Minute, 10 * 365 * 24 * time.Hour
	random := rand.New(rand.NewPCG(1, 2))
	all := []time.Duration{shortest, time.Hour, 24 * time.Hour, 168 * time.Hour, 365 * 24 * time.Hour, longest}
	for range 5000 {
		all = append(all, shortest+time.Duration(random.Int64N(int64(longest-shortest))).Truncate(time.Second))
	}
	for range 1000 {
		all = append(all, shortest+time.Duration(random.Int64N(int64(24*time.Hour))).Truncate(time.Second))
	}
	return all
}

func TestRenewalIsBetweenSevenAndNineTenths(t *testing.T) {
	for i, lifetime := range lifetimes() {
		leaf := leafOf(uint64(i), noon, lifetime)
		at := RenewAt(leaf)
		if at.Before(noon.Add(lifetime/10*7)) || at.After(noon.Add(lifetime/10*9)) {
			t.Fatalf("of %v, at %v", lifetime, at.Sub(noon))
		}
		if again := RenewAt(leafOf(uint64(i), noon, lifetime)); !again.Equal(at) {
			t.Fatalf("of the same certificate: at %v, then at %v", at, again)
		}
	}
}

// Machines that were installed together must not renew together.
func TestRenewalsSpreadOut(t *testing.T) {
	const fleet, buckets, lifetime = 1000, 10, 168 * time.Hour
	var count [buckets]int
	for i := range uint64(fleet) {
		part := RenewAt(leafOf(i, noon, lifetime)).Sub(noon.Add(lifetime / 10 * 7))
		count[min(int(part*buckets/(lifetime/5)), buckets-1)]++
	}
	for _, n := range count {
		if n < 60 || n > 140 { // 100 expected, with a standard deviation of 9.5
			t.Fatalf("not uniform: %v", count)
		}
	}
}

func TestSteadyExpiration(t *testing.T) {
	for i, lifetime := range lifetimes() {
		leaf := leafOf(uint64(i), noon, lifetime)
		for _, renews := range []bool{true, false} {
			at := steadyExpiration(leaf, renews)
			switch {
			case !at.Equal(at.Truncate(time.Second)):
				t.Fatalf("%v has a fraction of a second, which the timestamp would lose", at)
			case !steadyExpiration(leaf, renews).Equal(at):
				t.Fatal("it differs between two calls")
			case !at.Before(leaf.NotAfter):
				t.Fatalf("of %v: not before its end", lifetime)
			case renews && (at.After(RenewAt(leaf)) || RenewAt(leaf).Sub(at) >= time.Second):
				t.Fatalf("of %v: %v is not the renewal point %v", lifetime, at, RenewAt(leaf))
			case !renews && leaf.NotAfter.Sub(at) > time.Minute:
				t.Fatalf("of %v: %v before its end", lifetime, leaf.NotAfter.Sub(at))
			}
		}
	}
	// from the end, where the provider does not renew
	for lifetime, want := range map[time.Duration]time.Duration{
		10 * time.Minute: 30 * time.Second,
		20 * time.Minute: time.Minute,
		24 * time.Hour:   time.Minute,
	} {
		if got := noon.Add(lifetime).Sub(steadyExpiration(leafOf(1, noon, lifetime), false)); got != want {
			t.Errorf("of %v: %v before its end, want %v", lifetime, got, want)
		}
	}
}

func TestNearExpiration(t *testing.T) {
	for left, most := range map[time.Duration]time.Duration{
		-time.Second:              2 * time.Second, // while something else is printed all the same
		0:                         2 * time.Second,
		100 * time.Millisecond:    2 * time.Second,
		time.Second:               2 * time.Second,
		4 * time.Second:           2 * time.Second,
		40 * time.Second:          11 * time.Second,
		time.Minute:               16 * time.Second,
		2 * time.Minute:           31 * time.Second,
		time.Hour:                 31 * time.Second,
		10 * 365 * 24 * time.Hour: 31 * time.Second,
	} {
		for _, fraction := range []time.Duration{0, 1, 499 * time.Millisecond, 500 * time.Millisecond, time.Second - 1} {
			now := noon.Add(fraction)
			leaf := leafOf(1, now.Add(left-time.Hour), time.Hour)
			at := nearExpiration(leaf, now)
			if !at.Equal(at.Truncate(time.Second)) {
				t.Errorf("%v left: %v has a fraction of a second", left, at)
			}
			// client-go asks for every request once the timestamp is past: a second of
			// pause at the least.
			if at.Before(now.Add(time.Second)) || at.After(now.Add(most)) {
				t.Errorf("%v left, %v into the second: %v from now, want 1s to %v", left, fraction, at.Sub(now), most)
			}
		}
	}
}

func TestBackOff(t *testing.T) {
	const minute = time.Minute
	for name, c := range map[string]struct {
		cause backOff
		want  []time.Duration // after the first, second, ... failure in a row, without jitter
	}{
		"soon":  {soon, []time.Duration{1e9, 2e9, 4e9, 8e9, 15e9, 15e9, 15e9}},
		"later": {later, []time.Duration{30e9, minute, 2 * minute, 4 * minute, 8 * minute, 10 * minute, 10 * minute}},
		"busy":  {busy, []time.Duration{2e9, 4e9, 8e9, 16e9, 32e9, 64e9, 2 * minute, 2 * minute}},
		"none":  {none, []time.Duration{0, 0, 0}},
	} {
		for i, want := range c.want {
			if got := c.cause.delay(i+1, 0, 0); got != want {
				t.Errorf("%s, %d failures: %v, want %v", name, i+1, got, want)
			}
		}
		last := c.want[len(c.want)-1]
		for _, n := range []int{100, 1_000_000, 1 << 62} {
			if got := c.cause.delay(n, 0, 0); got != last {
				t.Errorf("%s, %d failures: %v, want %v", name, n, got, last)
			}
		}
		for _, n := range []int{0, -1} { // a state file can say anything
			if got := c.cause.delay(n, 0, 0); got != c.want[0] {
				t.Errorf("%s, %d failures: %v, want %v", name, n, got, c.want[0])
			}
		}
	}
}

// Nodes that fail together must not come back together. That holds for each back-off, and for each
// time that the API server asked for.
func TestBackOffHasJitter(t *testing.T) {
	for n := 1; n < 12; n++ {
		for _, cause := range []backOff{soon, busy, later, none} {
			for _, retryAfter := range []time.Duration{0, time.Second, time.Minute, time.Hour} {
				bare := cause.delay(n, retryAfter, 0)
				for _, random := range []float64{0, 0.25, 0.5, 0.999999} {
					got, most := cause.delay(n, retryAfter, random), bare+bare/2
					if got < bare || got > most || random > 0 && bare > 0 && got == bare {
						t.Errorf("cause %d, %d failures, Retry-After %v, %v: %v, want %v to %v", cause, n, retryAfter, random, got, bare, most)
					}
					if got > backOffCeiling {
						t.Errorf("%v is longer than what the run takes for a clock set back", got)
					}
				}
			}
		}
	}
}

func TestBackOffRespectsRetryAfter(t *testing.T) {
	for _, c := range []struct {
		cause            backOff
		n                int
		retryAfter, want time.Duration
	}{
		{busy, 1, time.Second, 2 * time.Second}, // the back-off is longer
		{busy, 1, time.Minute, time.Minute},
		{busy, 100, time.Minute, 2 * time.Minute},
		{busy, 1, 24 * time.Hour, laterMost}, // a server that is wrong must not take the node away
		{soon, 1, time.Minute, time.Minute},
		{none, 1, time.Minute, 0},
	} {
		if got := c.cause.delay(c.n, c.retryAfter, 0); got != c.want {
			t.Errorf("cause %d, %d failures, Retry-After %v: %v, want %v", c.cause, c.n, c.retryAfter, got, c.want)
		}
	}
	state := &cache.State{}
	addFailure(state, &cache.Result{Reason: string(apiOverloaded)}, 40*time.Second, time.Time{}, noon)
	if got := state.NextAttempt.Sub(noon); got < 40*time.Second || got > time.Minute {
		t.Errorf("the next attempt is after %v", got)
	}
}

// If an API server sheds load in between, the back-off of a denied node must not restart.
func TestOverloadDoesNotShortenTheBackOffAfterDenials(t *testing.T) {
	state := &cache.State{}
	fail := func(reason Reason, wasted bool) time.Duration {
		addFailure(state, &cache.Result{Reason: string(reason), Wasted: wasted}, 0, time.Time{}, noon)
		return state.NextAttempt.Sub(noon)
	}
	for range 8 {
		fail(RequestDenied, false)
		if got := fail(apiOverloaded, false); got > 3*time.Second {
			t.Errorf("one overload: %s", got)
		}
	}
	if got := fail(RequestDenied, false); got < laterMost {
		t.Errorf("the ninth denial: %s", got)
	}
	if got := fail(apiOverloaded, true); got < laterMost {
		t.Errorf("overloaded, after requests that came to nothing: %s", got)
	}
	addCertificate(state, &cache.Result{}, noon.Add(time.Hour), noon)
	if got := fail(RequestDenied, false); got > laterFirst*3/2 {
		t.Errorf("the first denial after a certificate: %s", got)
	}
}

// Failures of another kind start a new count: a network that was long away does not make the first
// denial cost 10 minutes.
func TestFailuresAreCountedByKind(t *testing.T) {
	state := &cache.State{}
	fail := func(reason Reason) time.Duration {
		addFailure(state, &cache.Result{Reason: string(reason)}, 0, time.Time{}, noon)
		return max(state.NextAttempt.Sub(noon), 0)
	}
	for range 7 {
		fail(APIUnreachable)
	}
	if got := fail(RequestDenied); got < 30*time.Second || got > 45*time.Second {
		t.Errorf("the first denial after failures of the network: %s", got)
	}
	if got := fail(WaitingForSigner); got != 0 {
		t.Errorf("pending: %s", got)
	}
	if got := fail(requestFailed); got < time.Minute {
		t.Errorf("the second request that came to nothing: %s", got)
	}
	if got := fail(APIUnreachable); got < time.Second || got > 1500*time.Millisecond {
		t.Errorf("the network again: %s", got)
	}
	for range 7 {
		fail(APIUnreachable)
	}
	fail(WaitingForSigner) // the network is back, the request is filed
	if got := fail(RequestDenied); got > 45*time.Second {
		t.Errorf("the first denial, of a request that was pending for a while: %s", got)
	}
}

// The shortest certificates that work are renewed as soon as they are due, however often.
func TestShortCertificatesAreNotPausedFor(t *testing.T) {
	for _, backdated := range []time.Duration{0, 5 * time.Minute} {
		state := &cache.State{}
		now := noon
		for i := range uint64(100) {
			leaf := leafOf(i, now.Add(-backdated), 10*time.Minute+backdated)
			addCertificate(state, &cache.Result{}, leaf.NotAfter, now)
			due := RenewAt(leaf)
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
	now := noon
	issue := func(lifetime time.Duration) time.Duration {
		addCertificate(state, &cache.Result{}, now.Add(lifetime), now)
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
func unreachable(n int, reason Reason, notAfter time.Time) *cache.State {
	state := &cache.State{}
	for range n {
		addFailure(state, &cache.Result{Reason: string(reason)}, 0, notAfter, noon)
		spreadAfterOutage(state, notAfter, noon)
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
		reason      Reason
		failures    int
		left        time.Duration
		least, most time.Duration
	}{
		{APIUnreachable, 1, day, time.Second, 1500 * time.Millisecond},
		{APIUnreachable, 2, day, 40 * minute, 60 * minute},
		{APIUnreachable, 100, day, 40 * minute, 60 * minute},
		{apiOverloaded, 2, day, 40 * minute, 60 * minute},
		{APIUnreachable, 2, 160 * minute, 20 * minute, 30 * minute},
		{APIUnreachable, 100, 3 * minute, 22500 * time.Millisecond, 33750 * time.Millisecond},
		{APIUnreachable, 100, 40 * time.Second, 15 * time.Second, 22500 * time.Millisecond}, // the back-off is longer
		{TPMError, 100, day, 15 * time.Second, 22500 * time.Millisecond},
		{RequestDenied, 100, day, 10 * minute, 15 * minute},
		{WaitingForSigner, 100, day, -1 << 63, 0},
	} {
		for range 100 {
			state := unreachable(c.failures, c.reason, noon.Add(c.left))
			if got := state.NextAttempt.Sub(noon); got < c.least || got > c.most {
				t.Errorf("%s, %d times, %v left: after %v, want %v to %v", c.reason, c.failures, c.left, got, c.least, c.most)
			}
			if wait := untilNextAttempt(state, true, noon); wait != max(state.NextAttempt.Sub(noon), 0) && state.Last.Finished.Before(noon) {
				t.Errorf("%s: a run waits for %v", c.reason, wait)
			}
		}
	}
}

// However long the outage is, the delay leaves a node several attempts.
func TestSpreadLeavesAttempts(t *testing.T) {
	for _, lifetime := range []time.Duration{10 * time.Minute, time.Hour, 24 * time.Hour, 168 * time.Hour} {
		state, now, attempts := &cache.State{}, noon, 0
		notAfter := noon.Add(lifetime / 10) // the latest renewal point
		for ; now.Before(notAfter.Add(-laterFirst)); attempts++ {
			addFailure(state, &cache.Result{Reason: string(APIUnreachable)}, 0, notAfter, now)
			spreadAfterOutage(state, notAfter, now)
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
		addFailure(state, &cache.Result{Reason: string(RequestDenied)}, 0, noon.Add(4*time.Minute), noon)
	}
	if got := state.NextAttempt.Sub(noon); got != 2*time.Minute {
		t.Errorf("4 minutes before the end: %s", got)
	}
	addFailure(state, &cache.Result{Reason: string(RequestDenied)}, 0, noon.Add(10*time.Second), noon)
	if got := state.NextAttempt.Sub(noon); got != 30*time.Second {
		t.Errorf("10 s before the end: %s", got)
	}
}
