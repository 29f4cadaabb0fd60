// SPDX-License-Identifier: Apache-2.0

// Package text makes text from a peer safe to show.
package text

import (
	"fmt"
	"strconv"
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

// Quote returns s as it is if it is one line of printable ASCII. Otherwise, or if it could be taken
// for a quoted text or for two columns, it returns s in double quotes with the escapes of Go. So it
// is never shown as another object's name. It cuts s to limit bytes and adds " ...".
func Quote(s string, limit int) string {
	if len(s) > limit {
		s = strings.ToValidUTF8(s[:limit], "") + " ..."
	}
	strange := func(r rune) bool { return r < ' ' || r > '~' }
	if strings.ContainsFunc(s, strange) || strings.HasPrefix(s, `"`) || strings.Contains(s, "  ") || strings.TrimSpace(s) != s {
		return strconv.QuoteToASCII(s)
	}
	return s
}

// maxListed limits a name in a list, in bytes.
const maxListed = 253

// MaxNames is how many names Names lists.
const MaxNames = 20

// Names returns how many names there are, and the first MaxNames of them, each as by Quote.
func Names(names []string) string {
	listed := make([]string, min(len(names), MaxNames))
	for i := range listed {
		listed[i] = Quote(names[i], maxListed)
	}
	s := fmt.Sprintf("%d: %s", len(names), strings.Join(listed, ", "))
	if more := len(names) - MaxNames; more > 0 {
		s += fmt.Sprintf(" and %d more", more)
	}
	return s
}
