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
		requester string
		bytes     int
		want      bool
		used      int
	}{
		{"a", 30, true, 30},
		{"a", 11, false, 30},
		{"a", 10, true, 40},
		{"b", 40, true, 80},
		{"c", 21, false, 80},
		{"c", 20, true, 100},
		{"c", 1, false, 100},
		{"c", 0, true, 100},
		{"d", math.MaxInt, false, 100},
		{"d", -5, false, 100},
	} {
		if got := b.Reserve(c.requester, c.bytes); got != c.want || b.used != c.used {
			t.Errorf("%d: %v, %d bytes are used", i, got, b.used)
		}
	}
	b.Release("a", 30)
	if !b.Reserve("a", 30) || b.Reserve("a", 1) {
		t.Error("what was released is not the requester's again")
	}
	for requester, bytes := range map[string]int{"a": 40, "b": 40, "c": 20} {
		b.Release(requester, bytes)
	}
	if b.used != 0 || len(b.usedBy) != 0 {
		t.Errorf("remembered: %d bytes, %v", b.used, b.usedBy)
	}
}

// For any calls in any order, the sums are those of the reservations, and within bounds.
func TestBudgetHolds(t *testing.T) {
	type reservation struct {
		requester string
		bytes     int
	}
	var reserved []reservation
	b, random := NewBudget(), rand.New(rand.NewPCG(3, 3))
	for range 20_000 {
		if len(reserved) > 0 && random.IntN(4) == 0 {
			i := random.IntN(len(reserved))
			b.Release(reserved[i].requester, reserved[i].bytes)
			reserved[i] = reserved[len(reserved)-1]
			reserved = reserved[:len(reserved)-1]
			continue
		}
		r := reservation{fmt.Sprint(random.IntN(10)), random.IntN(128 << 10)}
		if b.Reserve(r.requester, r.bytes) {
			reserved = append(reserved, r)
		}
	}
	used, usedBy := 0, map[string]int{}
	for _, r := range reserved {
		used += r.bytes
		usedBy[r.requester] += r.bytes
	}
	if used != b.used || used > maxBytes || len(usedBy) != len(b.usedBy) {
		t.Errorf("%d bytes, counted as %d", used, b.used)
	}
	for requester, bytes := range usedBy {
		if bytes != b.usedBy[requester] || bytes > maxBytesPerRequester {
			t.Errorf("%s: %d bytes, counted as %d", requester, bytes, b.usedBy[requester])
		}
	}
}
