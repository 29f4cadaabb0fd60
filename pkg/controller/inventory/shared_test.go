// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"sync/atomic"
	"testing"
	"time"
)

// Who comes while another reads waits for him only if there is nothing to use, or if each call is to read.
func TestSharedWhileAnotherReads(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		age    time.Duration
		usable bool
		waits  bool
		reads  int32
	}{
		"something to use":     {age: time.Minute, usable: true, reads: 1},
		"nothing to use":       {age: time.Minute, waits: true, reads: 1},
		"each call is to read": {usable: true, waits: true, reads: 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var s Shared
			var reads atomic.Int32
			reading, end := make(chan struct{}, 2), make(chan struct{})
			refresh := func() <-chan struct{} {
				done := make(chan struct{})
				go func() {
					defer close(done)
					s.Refresh(time.Now(), c.age, func() bool { return c.usable }, func() {
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
