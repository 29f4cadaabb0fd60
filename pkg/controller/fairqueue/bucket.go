// SPDX-License-Identifier: Apache-2.0

package fairqueue

import (
	"time"

	"k8s.io/utils/lru"
)

// clock counts the time that has passed, and never goes back. Buckets need that: if the time went
// back, a bucket would refill twice, or not until the old time came again.
type clock struct {
	latest  time.Time
	elapsed time.Duration
}

// maxBack bounds how late a caller may report a time that it read. An older time means that the
// clock was set back.
const maxBack = time.Minute

// at returns the time from the first call until now. Callers on several goroutines may report their
// times out of order.
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

// maxStep bounds the effect of a clock that is set ahead, so that the sum does not overflow.
const maxStep = 365 * 24 * time.Hour

// bucket is a token bucket. Its value is the time at which it is full, so the zero value is full
// from the beginning. This needs neither floats nor the time of the last use.
type bucket time.Duration

// readyAt returns when the bucket has a token, which may be in the past.
func (b bucket) readyAt(r Rate) time.Duration {
	return time.Duration(b) - time.Duration(r.Burst-1)*r.Every
}

// take takes tokens, even if the bucket does not have them yet.
func (b *bucket) take(count int, r Rate, now time.Duration) {
	*b = max(*b, bucket(now)) + bucket(time.Duration(count)*r.Every)
}

// maxBuckets bounds the number of requesters or machines that keep a bucket while nothing of theirs
// is queued. A forgotten one starts with a full burst.
const maxBuckets = 20_000

// buckets has the most recently used buckets, by key. The owner locks.
type buckets struct{ recent *lru.Cache }

func newBuckets() buckets { return buckets{lru.New(maxBuckets)} }

// of returns the bucket of a key, a full one if the key has none.
func (b buckets) of(key string) *bucket {
	if known, ok := b.recent.Get(key); ok {
		return known.(*bucket)
	}
	fresh := new(bucket)
	b.keep(key, fresh)
	return fresh
}

// keep makes a bucket the most recently used one.
func (b buckets) keep(key string, used *bucket) { b.recent.Add(key, used) }
