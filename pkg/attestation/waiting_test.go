// SPDX-License-Identifier: Apache-2.0

package attestation

import (
	"strings"
	"testing"
)

// A node prints what it finds in the annotation: only the one form is read.
func TestParseWaiting(t *testing.T) {
	for value, want := range map[string]Waiting{
		"MachineNotFound: run this": {"MachineNotFound", "run this"},
		"A: b":                      {"A", "b"},
		"A: b: c":                   {"A", "b: c"},
		"A: " + strings.Repeat("b", MaxWaiting-3): {"A", strings.Repeat("b", MaxWaiting-3)},
	} {
		got, err := ParseWaiting(value)
		if err != nil || got != want || got.String() != value {
			t.Errorf("%q: %+v, %v", value, got, err)
		}
	}
	for _, value := range []string{
		"", "A", "A:", "A: ", "A:b", ": b", "a: b", "A B: c", "A-B: c", "A:  b", "A: b ", " A: b", "A: b\n", "A: b\x1b[2J", "A: b\u202ec", "A\n: b",
		strings.Repeat("A", 65) + ": b", "A: " + strings.Repeat("b", MaxWaiting-2),
	} {
		if got, err := ParseWaiting(value); err == nil {
			t.Errorf("%q is accepted: %+v", value, got)
		}
	}
}

// Whatever is accepted is written the same way.
func FuzzParseWaiting(f *testing.F) {
	f.Add("MachineNotFound: run this")
	f.Fuzz(func(t *testing.T, value string) {
		if w, err := ParseWaiting(value); err == nil && w.String() != value {
			t.Errorf("%q is written as %q", value, w)
		}
	})
}
