// SPDX-License-Identifier: Apache-2.0

package reason

import "time"

// BackOff is the kind of back-off after a worker failed.
type BackOff int

// The kinds of back-off.
const (
	BackOffSoon  BackOff = iota // no request was given up: 1 to 15 s
	BackOffBusy                 // the API server sheds load: 2 s to 2 min
	BackOffLater                // a request failed: 30 s to 10 min
	BackOffNone                 // a request is pending: the next worker watches it
)

// The bounds of back-off, without jitter.
const (
	soonFirst, soonMost   = time.Second, 15 * time.Second
	busyFirst, busyMost   = 2 * time.Second, 2 * time.Minute
	laterFirst, laterMost = 30 * time.Second, 10 * time.Minute
)

// Delay returns the back-off after the nth failure in a row, n from 1. It is at least retryAfter,
// but a retryAfter above laterMost counts as laterMost. random is in [0, 1) and adds up to half.
// Without random, nodes that fail together would also retry together.
func (b BackOff) Delay(n int, retryAfter time.Duration, random float64) time.Duration {
	first, most := soonFirst, soonMost
	switch b {
	case BackOffNone:
		return 0
	case BackOffBusy:
		first, most = busyFirst, busyMost
	case BackOffLater:
		first, most = laterFirst, laterMost
	}
	d := first
	for ; n > 1 && d < most; n-- {
		d *= 2
	}
	d = max(min(d, most), min(retryAfter, laterMost))
	return d + time.Duration(random*float64(d)/2)
}
