// SPDX-License-Identifier: Apache-2.0

package fairqueue

import (
	"math"
	"testing"
	"time"
)

var noon = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

func TestBucket(t *testing.T) {
	rate := Rate{Every: 10 * time.Millisecond, Burst: 3}
	type take struct {
		count int
		now   time.Duration
		ready time.Duration // after it
	}
	for name, takes := range map[string][]take{
		"burst":             {{1, 0, -10}, {1, 0, 0}, {1, 0, 10}, {1, 0, 20}},
		"refills":           {{3, 0, 10}, {0, 5, 10}, {1, 10, 20}, {1, 100, 90}},
		"is never overfull": {{1, 1_000_000, 1_000_000 - 10}},
		"owes":              {{6, 0, 40}, {0, 40, 40}, {1, 40, 50}},
	} {
		t.Run(name, func(t *testing.T) {
			var b bucket
			for i, c := range takes {
				b.take(c.count, rate, c.now*time.Millisecond)
				if got, want := b.readyAt(rate), c.ready*time.Millisecond; got != want {
					t.Errorf("after %d: ready at %v, not %v", i, got, want)
				}
			}
		})
	}
	var b bucket
	if b.readyAt(rate) > 0 {
		t.Error("the zero value has no token")
	}
	largest := Rate{maxEvery, maxBurst}
	b.take(1, largest, 0)
	b.take(maxBurst-1, largest, time.Hour)
	if at := b.readyAt(largest); at <= 0 || at > time.Hour {
		t.Errorf("the largest rate is ready at %v", at)
	}
}

func TestClockNeverGoesBack(t *testing.T) {
	type step struct{ ahead, elapsed time.Duration }
	for name, steps := range map[string][]step{
		"goes on":              {{0, 0}, {5, 5}, {7, 7}},
		"reports out of order": {{0, 0}, {time.Second, time.Second}, {0, time.Second}, {2 * time.Second, 2 * time.Second}},
		"put back a little":    {{0, 0}, {-maxBack, 0}, {-1, 0}, {1, 1}},
		"put back an hour":     {{0, 0}, {5, 5}, {-time.Hour, 5}, {-time.Hour + 1, 6}, {-time.Hour + 3, 8}},
		"an hour ahead, and right again": {
			{0, 0}, {time.Hour, time.Hour}, {1, time.Hour}, {2, time.Hour + 1},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var c clock
			for i, s := range steps {
				if got := c.at(noon.Add(s.ahead)); got != s.elapsed {
					t.Errorf("step %d: %v have passed, not %v", i, got, s.elapsed)
				}
			}
		})
	}
	var c clock
	for range 100 {
		c.at(time.Unix(0, 0))
		if c.at(time.Unix(1<<40, 0)) < 0 {
			t.Fatal("it overflows")
		}
	}
	if c.elapsed > math.MaxInt64/2 {
		t.Errorf("it is near to an overflow: %v", c.elapsed)
	}
}
