// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"sync"
	"time"
)

// Shared has many decisions at once share one reading of something. Its zero value has read nothing yet.
type Shared struct {
	mu   sync.Mutex
	last time.Time
}

// longest is more than a decision takes.
const longest = 10 * time.Second

// Refresh calls read, unless what was read last does for a decision that began at the time now: it is not as old as the age, and somewhat younger
// than the decision, if that has been waiting. A clock that was put back must not keep it from being read. While another caller reads, it returns at
// once if there is something to use meanwhile, as usable reports; not so at an age of 0, which has each call read.
func (s *Shared) Refresh(now time.Time, age time.Duration, usable func() bool, read func()) {
	if !s.mu.TryLock() {
		if age > 0 && usable() {
			return
		}
		s.mu.Lock()
	}
	defer s.mu.Unlock()
	if since := now.Sub(s.last); age > 0 && !s.last.IsZero() && since > -longest && since < age {
		return
	}
	s.last = now
	read()
}
