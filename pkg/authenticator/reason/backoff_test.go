// SPDX-License-Identifier: Apache-2.0

package reason_test

import (
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
)

func TestBackOff(t *testing.T) {
	const minute = time.Minute
	for name, c := range map[string]struct {
		cause reason.BackOff
		want  []time.Duration // after the first, second, ... failure in a row, without jitter
	}{
		"soon":  {reason.BackOffSoon, []time.Duration{1e9, 2e9, 4e9, 8e9, 15e9, 15e9, 15e9}},
		"later": {reason.BackOffLater, []time.Duration{30e9, minute, 2 * minute, 4 * minute, 8 * minute, 10 * minute, 10 * minute}},
		"busy":  {reason.BackOffBusy, []time.Duration{2e9, 4e9, 8e9, 16e9, 32e9, 64e9, 2 * minute, 2 * minute}},
		"none":  {reason.BackOffNone, []time.Duration{0, 0, 0}},
	} {
		for i, want := range c.want {
			if got := c.cause.Delay(i+1, 0, 0); got != want {
				t.Errorf("%s, %d failures: %v, want %v", name, i+1, got, want)
			}
		}
		last := c.want[len(c.want)-1]
		for _, n := range []int{100, 1_000_000, 1 << 62} {
			if got := c.cause.Delay(n, 0, 0); got != last {
				t.Errorf("%s, %d failures: %v, want %v", name, n, got, last)
			}
		}
		for _, n := range []int{0, -1} { // a state file can say anything
			if got := c.cause.Delay(n, 0, 0); got != c.want[0] {
				t.Errorf("%s, %d failures: %v, want %v", name, n, got, c.want[0])
			}
		}
	}
}

// Nodes that fail together must not come back together. That holds for each back-off, and for each
// time that the API server asked for.
func TestBackOffHasJitter(t *testing.T) {
	for n := 1; n < 12; n++ {
		for _, cause := range []reason.BackOff{reason.BackOffSoon, reason.BackOffBusy, reason.BackOffLater, reason.BackOffNone} {
			for _, retryAfter := range []time.Duration{0, time.Second, time.Minute, time.Hour} {
				bare := cause.Delay(n, retryAfter, 0)
				for _, random := range []float64{0, 0.25, 0.5, 0.999999} {
					got, most := cause.Delay(n, retryAfter, random), bare+bare/2
					if got < bare || got > most || random > 0 && bare > 0 && got == bare {
						t.Errorf("cause %d, %d failures, Retry-After %v, %v: %v, want %v to %v", cause, n, retryAfter, random, got, bare, most)
					}
					if got > nodestate.BackOffCeiling {
						t.Errorf("%v is longer than what the run takes for a clock set back", got)
					}
				}
			}
		}
	}
}

func TestBackOffRespectsRetryAfter(t *testing.T) {
	for _, c := range []struct {
		cause            reason.BackOff
		n                int
		retryAfter, want time.Duration
	}{
		{reason.BackOffBusy, 1, time.Second, 2 * time.Second}, // the back-off is longer
		{reason.BackOffBusy, 1, time.Minute, time.Minute},
		{reason.BackOffBusy, 100, time.Minute, 2 * time.Minute},
		{reason.BackOffBusy, 1, 24 * time.Hour, reason.BackOffLater.Delay(100, 0, 0)}, // a server that is wrong must not take the node away
		{reason.BackOffSoon, 1, time.Minute, time.Minute},
		{reason.BackOffNone, 1, time.Minute, 0},
	} {
		if got := c.cause.Delay(c.n, c.retryAfter, 0); got != c.want {
			t.Errorf("cause %d, %d failures, Retry-After %v: %v, want %v", c.cause, c.n, c.retryAfter, got, c.want)
		}
	}
}
