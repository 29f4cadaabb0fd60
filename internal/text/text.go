// SPDX-License-Identifier: Apache-2.0

// Package text makes text from a peer safe to show.
package text

import (
	"fmt"
	"strings"
	"unicode"
)

// Line returns s as one line of printable characters, at most limit bytes long, with " ..." if it
// was cut. So no escape sequence reaches a terminal, and no long text a log.
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

// MaxNames is how many names Names lists.
const MaxNames = 20

// Names returns how many names there are, and the first MaxNames of them.
func Names(names []string) string {
	s := fmt.Sprintf("%d: %s", len(names), strings.Join(names[:min(len(names), MaxNames)], ", "))
	if more := len(names) - MaxNames; more > 0 {
		s += fmt.Sprintf(" and %d more", more)
	}
	return s
}
