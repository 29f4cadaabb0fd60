// SPDX-License-Identifier: Apache-2.0

package lastgood

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// While another caller reads, the last read is good for two seconds more. After that a caller
// waits.
func TestRefreshWhileAnotherReads(t *testing.T) {
	t.Parallel()
	const age = time.Minute
	for name, c := range map[string]struct {
		age time.Duration
		// ago is how long before this decision the decision began that read last. 0: there was
		// none.
		ago   time.Duration
		waits bool
		reads int32 // by two
	}{
		"read just before":                       {age: age, ago: age, reads: 1},
		"read somewhat before":                   {age: age, ago: age + grace - 1, reads: 1},
		"read long before":                       {age: age, ago: age + grace, waits: true, reads: 1},
		"never read":                             {age: age, waits: true, reads: 1},
		"each call is to read":                   {waits: true, reads: 2},
		"each call is to read, a bit later":      {ago: time.Second, waits: true, reads: 2},
		"each call is to read, and began before": {ago: -time.Second, waits: true, reads: 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var r Refresher
			if c.ago != 0 {
				r.Refresh(now().Add(-c.ago), age, func() {})
			}
			var reads atomic.Int32
			reading, end := make(chan struct{}, 2), make(chan struct{})
			refresh := func() <-chan struct{} {
				done := make(chan struct{})
				go func() {
					defer close(done)
					r.Refresh(now(), c.age, func() {
						reads.Add(1)
						reading <- struct{}{}
						<-end
					})
				}()
				return done
			}
			first := refresh()
			<-reading
			second := refresh()
			waited, long := false, 10*time.Second
			if c.waits {
				long = 100 * time.Millisecond
			}
			select {
			case <-second:
			case <-time.After(long):
				waited = true
			}
			if waited != c.waits {
				t.Errorf("the second one waited: %t", waited)
			}
			close(end)
			<-first
			<-second
			if got := reads.Load(); got != c.reads {
				t.Errorf("%d reads", got)
			}
		})
	}
}

// However many callers wait, one more read is enough for all: it began after they came.
func TestRefreshForManyThatWait(t *testing.T) {
	t.Parallel()
	const age = time.Second
	var r Refresher
	var reads atomic.Int32
	reading, end := make(chan struct{}, 20), make(chan struct{})
	var wait sync.WaitGroup
	refresh := func(at time.Time) {
		wait.Go(func() {
			r.Refresh(at, age, func() {
				reads.Add(1)
				reading <- struct{}{}
				<-end
			})
		})
	}
	refresh(now())
	<-reading
	for i := range 16 {
		refresh(now().Add(time.Duration(i+1) * (age + grace)))
	}
	time.Sleep(time.Second) // until all wait
	close(end)
	wait.Wait()
	if got := reads.Load(); got != 2 {
		t.Errorf("%d reads", got)
	}
}

func now() time.Time { return time.Date(2026, 11, 3, 12, 0, 0, 0, time.UTC) }
