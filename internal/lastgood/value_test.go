// SPDX-License-Identifier: Apache-2.0

package lastgood

import (
	"errors"
	"io/fs"
	"testing"
)

func TestValue(t *testing.T) {
	t.Parallel()
	for _, reparse := range []bool{false, true} {
		v := Value[int]{Reparse: reparse}
		if got, ok := v.Get(); got != 0 || ok || v.Problem() != nil {
			t.Errorf("zero: got %d, %t, %v", got, ok, v.Problem())
		}
		parsed, invalid := 0, errors.New("invalid")
		offer := func(version string, value int, result error) {
			t.Helper()
			err := v.Offer(version, func() (int, error) {
				parsed++
				return value, result
			})
			if !errors.Is(err, result) || !errors.Is(v.Problem(), result) {
				t.Errorf("offering %s returns %v, and the problem is %v", version, err, v.Problem())
			}
		}
		v.Fail(fs.ErrPermission)
		if _, ok := v.Get(); ok || !errors.Is(v.Problem(), fs.ErrPermission) {
			t.Errorf("got %v", v.Problem())
		}
		offer("a", 0, invalid)
		if !v.LastRead().IsZero() {
			t.Error("nothing valid was read yet")
		}
		offer("b", 1, nil)
		first := v.LastRead()
		offer("b", 0, nil)
		again := v.LastRead()
		offer("c", 0, invalid)
		offer("c", 0, invalid)
		v.Fail(fs.ErrNotExist)
		offer("c", 0, invalid)
		if first.IsZero() || !again.After(first) || v.LastRead() != again {
			t.Errorf("read at %s, %s, %s", first, again, v.LastRead())
		}
		offer("b", 0, nil)
		want := 3
		if reparse {
			want += 2
		}
		if got, ok := v.Get(); got != 1 || !ok || parsed != want {
			t.Errorf("got %d, %t, parsed %d times, not %d", got, ok, parsed, want)
		}
	}
}

// Get and Problem do not wait while new content is parsed.
func TestValueIsThereWhileContentIsParsed(t *testing.T) {
	t.Parallel()
	var v Value[int]
	if err := v.Offer("a", func() (int, error) { return 1, nil }); err != nil {
		t.Fatal(err)
	}
	if err := v.Offer("b", func() (int, error) {
		if got, ok := v.Get(); got != 1 || !ok || v.Problem() != nil {
			t.Errorf("got %d, %t, %v", got, ok, v.Problem())
		}
		return 2, nil
	}); err != nil {
		t.Fatal(err)
	}
	if got, _ := v.Get(); got != 2 {
		t.Errorf("got %d", got)
	}
}
