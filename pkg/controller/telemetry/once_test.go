// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"fmt"
	"sync"
	"testing"
	"time"
)

func TestOnce(t *testing.T) {
	var once Once
	noon := time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)
	for i, step := range []struct {
		subject, text string
		after         time.Duration
		again         time.Duration
		want          bool
	}{
		{"a", "x", 0, time.Minute, true},
		{"a", "x", 0, time.Minute, false},
		{"b", "x", 0, time.Minute, true},
		{"a", "x", time.Minute - 1, time.Minute, false},
		{"a", "x", time.Minute, time.Minute, true},
		{"a", "y", time.Minute, time.Minute, true},
		{"a", "x", time.Minute, time.Minute, true}, // another text again
		{"a", "x", 100 * time.Hour, 0, false},
		{"a", "x", -time.Hour, time.Minute, true}, // the clock was set back
		{"c", "", 0, 0, true},                     // "" is a text
		{"c", "", 0, 0, false},
	} {
		if got := once.MarkReported(step.subject, step.text, noon.Add(step.after), step.again); got != step.want {
			t.Errorf("step %d, %+v: %t", i, step, got)
		}
	}
	once.Forget("a")
	once.Forget("never")
	if !once.MarkReported("a", "x", noon, 0) || once.MarkReported("b", "x", noon, 0) {
		t.Error("it forgets another subject")
	}
}

// Subjects beyond the bound are forgotten. Concurrent callers are safe.
func TestOnceIsBounded(t *testing.T) {
	once := Once{Max: 100}
	var callers sync.WaitGroup
	for caller := range 4 {
		callers.Go(func() {
			for i := range once.Max / 4 {
				once.MarkReported(fmt.Sprint(caller, "/", i), "x", time.Now(), 0)
			}
		})
	}
	callers.Wait()
	if once.MarkReported("0/0", "x", time.Now(), 0) {
		t.Error("it is forgotten too early")
	}
	for i := range once.Max {
		once.MarkReported(fmt.Sprint(i), "x", time.Now(), 0)
	}
	if once.reported.Len() != once.Max || !once.MarkReported("0/0", "x", time.Now(), 0) {
		t.Errorf("%d subjects", once.reported.Len())
	}
	var none Once
	none.Forget("x")
}
