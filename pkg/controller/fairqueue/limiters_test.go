// SPDX-License-Identifier: Apache-2.0

package fairqueue

import (
	"fmt"
	"testing"
	"time"
)

func TestLimiters(t *testing.T) {
	rate := Rate{Every: 10 * time.Second, Burst: 3}
	l := NewLimiters(rate)
	for i := range rate.Burst {
		if !l.Ready("a", noon) || !l.Take("a", noon) {
			t.Fatalf("there is no token %d", i)
		}
	}
	if l.Ready("a", noon) || l.Take("a", noon) || l.Take("a", noon) {
		t.Error("there are more tokens than the burst")
	}
	if !l.Ready("b", noon) {
		t.Error("another key has no token")
	}
	if later := noon.Add(rate.Every); !l.Ready("a", later) || !l.Take("a", later) || l.Ready("a", later) {
		t.Error("there is not one token after one interval: what was refused counts")
	}
}

// Of a flood that is denied a little is reported, and of others' denials all.
func TestLimitersInALoop(t *testing.T) {
	l := NewLimiters(Rate{Every: time.Second, Burst: 50})
	count := func(key string, now time.Time) (taken int) {
		for range 1000 {
			if l.Take(key, now) {
				taken++
			}
		}
		return taken
	}
	if got := count("flood", noon); got != 50 {
		t.Errorf("%d at once", got)
	}
	if got := count("flood", noon.Add(3*time.Second)); got != 3 {
		t.Errorf("%d three seconds later", got)
	}
}

// Decisions that began first may end last: what others have taken since is not given back.
func TestTimeOfLimitersDoesNotGoBack(t *testing.T) {
	l := NewLimiters(Rate{Every: time.Second, Burst: 2})
	l.Take("a", noon)
	for range 100 {
		l.Take("a", noon.Add(-maxBack))
	}
	if l.Ready("a", noon) {
		t.Error("what was taken is forgotten")
	}
	// A clock that was a year ahead keeps nobody waiting once it is right.
	l.Take("b", noon.AddDate(1, 0, 0))
	l.Take("b", noon.AddDate(1, 0, 0))
	for i := range 10 {
		if !l.Take("b", noon.Add(time.Duration(i+1)*time.Second)) && i > 0 {
			t.Errorf("after %d seconds there is no token", i)
		}
	}
}

func TestLimitersAreBounded(t *testing.T) {
	l := NewLimiters(Rate{Every: time.Hour, Burst: 1})
	l.Take("first", noon)
	for i := range maxBuckets {
		l.Take(fmt.Sprint(i), noon)
	}
	if n := l.buckets.recent.Len(); n != maxBuckets {
		t.Errorf("%d are remembered", n)
	}
	if !l.Ready("first", noon) || l.Ready(fmt.Sprint(maxBuckets-1), noon) {
		t.Error("not the one that was not used for longest is forgotten")
	}
}
