// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"sync"
	"time"
)

// Shared has many decisions at once share one reading of something. Its zero value has read nothing yet.
type Shared struct {
	reading sync.Mutex // held by whoever reads

	mu    sync.Mutex
	last  time.Time // when the decision began for which it was read last
	begun int       // how often it was begun to read
}

const (
	// longest is more than a decision takes.
	longest = time.Minute
	// late is how much older than its age what was read may be while it is read anew.
	late = 2 * time.Second
)

// Refresh calls read, unless what was read last does for a decision that began at the time now: it is not as old as the age, and somewhat younger
// than the decision, if that has been waiting. A clock that was put back must not keep it from being read. While another caller reads, what was read
// does for two seconds more. Otherwise, and at an age of 0, which has each call read, it waits: for two readings at most, since one that began
// meanwhile does.
func (s *Shared) Refresh(now time.Time, age time.Duration, read func()) {
	if s.does(now, age) {
		return
	}
	came := s.readings()
	if !s.reading.TryLock() {
		if age > 0 && s.does(now, age+late) {
			return
		}
		s.reading.Lock()
	}
	defer s.reading.Unlock()
	if s.does(now, age) || age > 0 && s.readings() > came {
		return
	}
	s.mu.Lock()
	s.begun++
	s.mu.Unlock()
	read()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last = now
}

func (s *Shared) readings() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.begun
}

func (s *Shared) does(now time.Time, age time.Duration) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	since := now.Sub(s.last)
	return age > 0 && !s.last.IsZero() && since > -longest && since < age
}
