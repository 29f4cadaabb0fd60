// SPDX-License-Identifier: Apache-2.0

package fairqueue

import (
	"time"

	"k8s.io/utils/lru"
)

// clock counts the time that has passed, and never goes back. Buckets need that: with a time that
// goes back they would refill twice, or not until the old time comes again.
type clock struct {
	latest  time.Time
	elapsed time.Duration
}

// maxBack is how late a caller may report a time that it read. An older time comes from a clock
// that was put back.
const maxBack = time.Minute

// at returns how much time has passed at now, since the first call. Callers on several goroutines
// may report their times out of order.
func (c *clock) at(now time.Time) time.Duration {
	switch passed := now.Sub(c.latest); {
	case c.latest.IsZero() || passed < -maxBack:
		c.latest = now
	case passed > 0:
		c.latest = now
		c.elapsed += min(passed, maxStep)
	}
	return c.elapsed
}

// maxStep is how much a clock that is put ahead counts at most, so that the sum does not overflow.
const maxStep = 365 * 24 * time.Hour

// bucket is a token bucket. It is full once the clock is at this time, and the zero value is full
// from the beginning. So it needs neither floats nor the time of its last use.
type bucket time.Duration

// readyAt returns when the bucket has a token, which may be in the past.
func (b bucket) readyAt(r Rate) time.Duration {
	return time.Duration(b) - time.Duration(r.Burst-1)*r.Every
}

// take takes tokens, also those that are not there yet.
func (b *bucket) take(count int, r Rate, now time.Duration) {
	*b = max(*b, bucket(now)) + bucket(time.Duration(count)*r.Every)
}

// maxBuckets bounds how many requesters or machines have a bucket while nothing of theirs is
// queued. One that is forgotten starts with a full burst.
const maxBuckets = 20_000

// buckets are the most recently used ones, by key. The owner locks.
type buckets struct{ recent *lru.Cache }

func newBuckets() buckets { return buckets{lru.New(maxBuckets)} }

// of returns the bucket of a key, a full one if there is none.
func (b buckets) of(key string) *bucket {
	if known, ok := b.recent.Get(key); ok {
		return known.(*bucket)
	}
	fresh := new(bucket)
	b.keep(key, fresh)
	return fresh
}

// keep has a bucket be the most recently used one.
func (b buckets) keep(key string, used *bucket) { b.recent.Add(key, used) }
