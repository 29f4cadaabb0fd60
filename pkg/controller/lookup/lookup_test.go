// SPDX-License-Identifier: Apache-2.0

package lookup

import (
	"context"
	"errors"
	"strconv"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

var errDown = errors.New("down")

// service is a service whose behaviour each test sets.
type service struct {
	calls    atomic.Int64
	answer   string
	takes    time.Duration
	freshFor time.Duration
	err      error
}

func (s *service) call(ctx context.Context) (string, time.Duration, error) {
	s.calls.Add(1)
	select {
	case <-time.After(s.takes):
		return s.answer, s.freshFor, s.err
	case <-ctx.Done():
		return "", 0, ctx.Err()
	}
}

func newCache(bend func(*Config)) *Cache[string] {
	c := Config{Service: "test", Concurrency: 2, Timeout: 10 * time.Second, Size: 3}
	if bend != nil {
		bend(&c)
	}
	return New[string](c)
}

// get fails the test unless Get returns this answer or error, and within its time.
func get(t *testing.T, c *Cache[string], key string, s *service, want string, fails error) {
	t.Helper()
	began := time.Now()
	got, err := c.Get(t.Context(), key, s.call)
	if got != want || !errors.Is(err, fails) || fails == nil && err != nil {
		t.Errorf("%q, %v, want %q, %v", got, err, want, fails)
	}
	if took := time.Since(began); took > Wait {
		t.Errorf("it took %s", took)
	}
}

func TestAnswersAreCached(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s := newCache(nil), &service{answer: "one", takes: time.Millisecond, freshFor: time.Minute}
		get(t, c, "key", s, "one", nil)
		s.answer = "two"
		time.Sleep(time.Minute - time.Second)
		get(t, c, "key", s, "one", nil)
		get(t, c, "other", s, "two", nil)
		time.Sleep(2 * time.Second)
		get(t, c, "key", s, "two", nil)
		if s.calls.Load() != 3 {
			t.Errorf("%d calls", s.calls.Load())
		}
	})
}

// A reconcile worker waits for a second, and a later retry finds the answer.
func TestSlowService(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s := newCache(nil), &service{answer: "one", takes: 5 * time.Second, freshFor: time.Minute}
		for range 4 {
			get(t, c, "key", s, "", ErrPending)
		}
		time.Sleep(2 * time.Second)
		get(t, c, "key", s, "one", nil)
		if s.calls.Load() != 1 {
			t.Errorf("%d calls", s.calls.Load())
		}
	})
}

// The end of a caller's context ends the caller's wait, and not the call.
func TestCallerLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s := newCache(nil), &service{answer: "one", takes: time.Second / 2, freshFor: time.Minute}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := c.Get(ctx, "key", s.call); !errors.Is(err, ErrPending) {
			t.Errorf("%v", err)
		}
		time.Sleep(time.Second)
		get(t, c, "key", s, "one", nil)
		if s.calls.Load() != 1 {
			t.Errorf("%d calls", s.calls.Load())
		}
	})
}

// A key that is never answered delays no other key, and its slot is free after the timeout.
func TestNoAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCache(nil)
		hangs, s := &service{takes: time.Hour}, &service{answer: "one", freshFor: time.Minute}
		get(t, c, "hangs", hangs, "", ErrPending)
		get(t, c, "key", s, "one", nil)
		get(t, c, "hangs 2", hangs, "", ErrPending)
		get(t, c, "busy", s, "", ErrPending) // both slots are taken
		time.Sleep(8 * time.Second)
		get(t, c, "hangs", hangs, "", context.DeadlineExceeded)
		get(t, c, "busy", s, "one", nil)
		if hangs.calls.Load() != 2 || s.calls.Load() != 2 {
			t.Errorf("%d, %d calls", hangs.calls.Load(), s.calls.Load())
		}
		time.Sleep(time.Minute)
	})
}

func TestBackOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s := newCache(nil), &service{answer: "one", freshFor: time.Minute, err: errDown}
		var gaps []time.Duration
		last := time.Now()
		for range 600 { // the retries of a request
			before := s.calls.Load()
			get(t, c, "key", s, "", errDown)
			if s.calls.Load() > before {
				gaps = append(gaps, time.Since(last))
				last = time.Now()
			}
			time.Sleep(time.Second)
		}
		for i, want := range []time.Duration{0, 2 * time.Second, 4 * time.Second, 8 * time.Second, 16 * time.Second, 32 * time.Second, time.Minute, time.Minute} {
			if i >= len(gaps) || gaps[i] != want {
				t.Fatalf("%v", gaps)
			}
		}
		s.err = nil
		time.Sleep(time.Minute)
		get(t, c, "key", s, "one", nil)
		s.err = errDown
		time.Sleep(2 * time.Minute)
		calls := s.calls.Load()
		get(t, c, "key", s, "", errDown) // a stale answer is none
		time.Sleep(2 * time.Second)      // the back-off began anew
		get(t, c, "key", s, "", errDown)
		if s.calls.Load() != calls+2 {
			t.Errorf("%d calls", s.calls.Load()-calls)
		}
	})
}

func TestLastGoodAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s := newCache(func(c *Config) { c.KeepStale = true }), &service{answer: "one", freshFor: time.Minute}
		get(t, c, "key", s, "one", nil)
		s.err = errDown
		for range 100 {
			time.Sleep(time.Minute)
			get(t, c, "key", s, "one", nil)
		}
		time.Sleep(time.Minute)
		s.err, s.answer, s.takes = nil, "two", 5*time.Second
		get(t, c, "key", s, "one", nil) // the refresh takes longer than Wait
		time.Sleep(4 * time.Second)
		get(t, c, "key", s, "two", nil)
		s.answer, s.takes = "three", time.Second/2
		time.Sleep(time.Hour)
		get(t, c, "key", s, "three", nil) // a quick refresh is waited for
	})
}

func TestExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s := newCache(nil), &service{answer: "one", freshFor: time.Hour}
		c.Expire("key", 0)
		get(t, c, "key", s, "one", nil)
		s.answer = "two"
		time.Sleep(time.Minute)
		c.Expire("key", time.Minute)
		get(t, c, "key", s, "one", nil)
		time.Sleep(time.Nanosecond)
		c.Expire("key", time.Minute)
		get(t, c, "key", s, "two", nil)
	})
}

// The keys may come from requests, so their number is bounded. The ones in use stay.
func TestSize(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s := newCache(func(c *Config) { c.Concurrency = 3 }), &service{answer: "one", freshFor: time.Hour}
		for i := range 100 {
			get(t, c, "used", s, "one", nil)
			time.Sleep(time.Nanosecond)
			get(t, c, strconv.Itoa(i), s, "one", nil)
		}
		if len(c.entries) != 3 || s.calls.Load() != 101 {
			t.Errorf("%d keys, %d calls", len(c.entries), s.calls.Load())
		}
		hangs := &service{takes: time.Hour}
		for _, key := range []string{"a", "b", "c"} {
			get(t, c, key, hangs, "", ErrPending)
		}
		get(t, c, "d", s, "", ErrPending) // all have a call
		time.Sleep(10 * time.Second)
		get(t, c, "d", s, "one", nil)
		time.Sleep(time.Minute)
	})
}
