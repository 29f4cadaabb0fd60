// SPDX-License-Identifier: Apache-2.0

package fairqueue

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
)

func TestBudget(t *testing.T) {
	b := newBudget(100, 40)
	for i, c := range []struct {
		name, requester string
		bytes           int // -1: release
		want            bool
		used            int
	}{
		{"a-1", "a", 30, true, 30},
		{"a-2", "a", 11, false, 30},
		{"a-2", "a", 10, true, 40},
		{"b-1", "b", 40, true, 80},
		{"c-1", "c", 21, false, 80},
		{"c-1", "c", 20, true, 100},
		{"c-2", "c", 1, false, 100},
		{"c-2", "c", 0, true, 100},
		{"b-1", "b", 40, true, 100}, // the same again
		{"b-1", "b", 35, true, 95},  // a smaller one
		{"b-1", "b", 41, false, 60}, // the old one is gone
		{"a-1", "b", 5, true, 35},   // another's of the same name
		{"a-1", "b", -1, true, 30},
		{"a-1", "b", -1, true, 30},
		{"d", "d", math.MaxInt, false, 30},
		{"d", "d", -5, false, 30},
	} {
		if c.bytes == -1 {
			b.Release(c.name)
		} else if got := b.Reserve(c.name, c.requester, c.bytes); got != c.want {
			t.Errorf("%d: %v", i, got)
		}
		if b.used != c.used {
			t.Errorf("%d: %d bytes are used, not %d", i, b.used, c.used)
		}
	}
	for _, name := range []string{"a-1", "a-2", "b-1", "c-1", "c-2", "d"} {
		b.Release(name)
	}
	if b.used != 0 || len(b.usedBy)+len(b.reserved) != 0 {
		t.Errorf("remembered: %d bytes, %v, %v", b.used, b.usedBy, b.reserved)
	}
}

// Whatever happens in whatever order, the sums are those of the reservations, and within bounds.
func TestBudgetHolds(t *testing.T) {
	b, random := NewBudget(), rand.New(rand.NewPCG(3, 3))
	for range 20_000 {
		name := fmt.Sprint(random.IntN(2000))
		if random.IntN(4) == 0 {
			b.Release(name)
			continue
		}
		b.Reserve(name, fmt.Sprint(random.IntN(10)), random.IntN(128<<10))
	}
	used, usedBy := 0, map[string]int{}
	for _, r := range b.reserved {
		used += r.bytes
		usedBy[r.requester] += r.bytes
	}
	if used != b.used || used > maxBytes || len(usedBy) != len(b.usedBy) {
		t.Errorf("%d bytes, said to be %d", used, b.used)
	}
	for requester, bytes := range usedBy {
		if bytes != b.usedBy[requester] || bytes > maxBytesPerRequester {
			t.Errorf("%s: %d bytes, said to be %d", requester, bytes, b.usedBy[requester])
		}
	}
}
