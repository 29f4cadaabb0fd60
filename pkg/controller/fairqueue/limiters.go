// SPDX-License-Identifier: Apache-2.0

package fairqueue

import (
	"sync"
	"time"
)

// Limiters apply one Rate to each of many keys, such as machines. They remember the 20,000 keys
// that were used last. A forgotten key starts with a full burst.
type Limiters struct {
	rate Rate

	mu      sync.Mutex
	clock   clock
	buckets buckets
}

// NewLimiters returns the limiters of a rate.
func NewLimiters(rate Rate) *Limiters { return &Limiters{rate: rate, buckets: newBuckets()} }

// Ready reports whether Take would take a token of this key now.
func (l *Limiters) Ready(key string, now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buckets.of(key).readyAt(l.rate) <= l.clock.at(now)
}

// Take takes a token of this key, and reports whether there was one.
func (l *Limiters) Take(key string, now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	at, b := l.clock.at(now), l.buckets.of(key)
	if b.readyAt(l.rate) > at {
		return false
	}
	b.take(1, l.rate, at)
	return true
}
