// SPDX-License-Identifier: Apache-2.0

// Package facts remembers what a platform once said of an instance. An adapter compares a new
// answer with it, and refuses one that has less.
package facts

import (
	"sync"
	"time"
)

// expiry is when an unused fact is dropped. EKs are read each hour, so facts in use do not expire.
const expiry = 24 * time.Hour

// Facts are kept by the immutable ID of an instance. The zero value is ready to use.
type Facts[T any] struct {
	mu    sync.Mutex
	byID  map[string]fact[T]
	swept time.Time
}

type fact[T any] struct {
	value T
	used  time.Time
}

// Get returns what was set, or the zero value.
func (f *Facts[T]) Get(id string) T {
	f.mu.Lock()
	defer f.mu.Unlock()
	known, ok := f.byID[id]
	if ok {
		known.used = time.Now()
		f.byID[id] = known
	}
	return known.value
}

// Set replaces what is known of an instance.
func (f *Facts[T]) Set(id string, value T) {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := time.Now()
	if f.byID == nil {
		f.byID = map[string]fact[T]{}
	}
	f.byID[id] = fact[T]{value, now}
	if now.Sub(f.swept) < expiry {
		return
	}
	f.swept = now
	for id, known := range f.byID {
		if now.Sub(known.used) >= expiry {
			delete(f.byID, id)
		}
	}
}
