// SPDX-License-Identifier: Apache-2.0

package attestation

import "testing"

// Whatever is accepted is written the same way.
func FuzzParseStatement(f *testing.F) {
	f.Add("MachineNotFound: run this")
	f.Fuzz(func(t *testing.T, value string) {
		if w, err := ParseStatement(value); err == nil && w.String() != value {
			t.Errorf("%q is written as %q", value, w)
		}
	})
}
