// SPDX-License-Identifier: Apache-2.0

// Package text makes what a peer wrote fit to be shown to a person.
package text

import (
	"strings"
	"unicode"
)

// Line returns s as one line of printable characters, at most limit bytes long, and " ..." where it was cut: no escape
// sequence reaches a terminal, no long text a log.
func Line(s string, limit int) string {
	s = strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, strings.ToValidUTF8(s, "?"))
	s = strings.Join(strings.Fields(s), " ")
	if len(s) > limit {
		s = strings.ToValidUTF8(s[:limit], "") + " ..."
	}
	return s
}
