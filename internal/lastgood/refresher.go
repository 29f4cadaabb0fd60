// SPDX-License-Identifier: Apache-2.0

package lastgood

import (
	"sync"
	"time"
)

// Refresher lets many decisions share one read of a source. Its zero value has read nothing yet.
type Refresher struct {
	reading sync.Mutex // held by the caller that reads

	mu       sync.Mutex
	readFor  time.Time // the start of the decision for which the source was last read
	attempts int       // how many reads have begun
}

const (
	// maxDecision is longer than a decision takes.
	maxDecision = time.Minute
	// grace is how much older than maxAge a value may be while another caller reads the source.
	grace = 2 * time.Second
)

// Refresh calls read if the last read is older than maxAge at the time now, which is when the
// caller's decision began. A decision that began up to a minute before the last read uses that
// read: a longer difference is a clock that was put back.
//
// While another caller reads, the last read is good for two seconds more. After that, and with a
// maxAge of 0, callers wait. They wait for two reads at most: a read that began after they came is
// new enough. With a maxAge of 0 each caller reads.
func (r *Refresher) Refresh(now time.Time, maxAge time.Duration, read func()) {
	if r.fresh(now, maxAge) {
		return
	}
	before := r.begun()
	if !r.reading.TryLock() {
		if maxAge > 0 && r.fresh(now, maxAge+grace) {
			return
		}
		r.reading.Lock()
	}
	defer r.reading.Unlock()
	if r.fresh(now, maxAge) || maxAge > 0 && r.begun() > before {
		return
	}
	r.mu.Lock()
	r.attempts++
	r.mu.Unlock()
	read()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.readFor = now
}

func (r *Refresher) begun() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.attempts
}

func (r *Refresher) fresh(now time.Time, maxAge time.Duration) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	age := now.Sub(r.readFor)
	return maxAge > 0 && !r.readFor.IsZero() && age > -maxDecision && age < maxAge
}
