// SPDX-License-Identifier: Apache-2.0

package text

import (
	"strings"
	"testing"
)

func TestLine(t *testing.T) {
	for in, want := range map[string]string{
		"":                       "",
		"plain":                  "plain",
		"two\nlines\r\n\tin one": "two lines in one",
		"\x1b]0;owned\a\x1b[2Jx": "]0;owned [2Jx",
		"bad \xff utf-8":         "bad ? utf-8",
		"right\u202eto left":     "right to left",
		strings.Repeat("é", 20):  strings.Repeat("é", 16) + " ...",
	} {
		if got := Line(in, 33); got != want {
			t.Errorf("Line(%q) = %q, want %q", in, got, want)
		}
	}
}
