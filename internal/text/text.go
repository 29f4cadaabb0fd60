// SPDX-License-Identifier: Apache-2.0

// Package text makes text from a peer safe to show: in a log, in an Event, on a terminal.
package text

import (
	"cmp"
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// hidden are characters that unicode.IsPrint accepts, but that a reader does not see in their
// place. Marks and skin tones change the character before them. Some characters are blank. Letters
// written from right to left make a terminal reorder the text beside them (UAX #9).
var hidden = []*unicode.RangeTable{
	unicode.M, unicode.Other_Default_Ignorable_Code_Point, {
		R16: []unicode.Range16{
			{Lo: 0x0590, Hi: 0x08FF, Stride: 1},                                      // right to left
			{Lo: 0x2800, Hi: 0x2800, Stride: 1},                                      // blank Braille
			{Lo: 0xFB1D, Hi: 0xFDFF, Stride: 1}, {Lo: 0xFE70, Hi: 0xFEFF, Stride: 1}, // right to left
			{Lo: 0xFFFC, Hi: 0xFFFC, Stride: 1}, // object replacement
		},
		R32: []unicode.Range32{
			{Lo: 0x10800, Hi: 0x10FFF, Stride: 1}, // right to left
			{Lo: 0x1D159, Hi: 0x1D159, Stride: 1}, // null notehead
			{Lo: 0x1E800, Hi: 0x1EFFF, Stride: 1}, // right to left
			{Lo: 0x1F3FB, Hi: 0x1F3FF, Stride: 1}, // skin tones
		},
	},
}

// Visible reports whether a reader sees r as one character in its place.
func Visible(r rune) bool { return unicode.IsPrint(r) && !unicode.In(r, hidden...) }

// Escape replaces each character that is not Visible by its escape in JSON: \n, \r, \t or \uXXXX. A
// byte that is not UTF-8 becomes \xXX. A compact JSON document keeps its meaning, because it has
// such characters in strings only.
func Escape(s string) string {
	if strings.IndexFunc(s, func(r rune) bool { return !Visible(r) || r == utf8.RuneError }) < 0 {
		return s
	}
	var out strings.Builder
	for at := 0; at < len(s); {
		r, size := utf8.DecodeRuneInString(s[at:])
		switch {
		case r == utf8.RuneError && size == 1:
			fmt.Fprintf(&out, `\x%02x`, s[at])
		case Visible(r):
			out.WriteRune(r)
		case r == '\n', r == '\r', r == '\t':
			out.WriteString(strings.Trim(strconv.QuoteRune(r), "'"))
		default:
			for _, unit := range utf16.AppendRune(nil, r) {
				fmt.Fprintf(&out, `\u%04x`, unit)
			}
		}
		at += size
	}
	return out.String()
}

// Line returns a text as one line that is Cut to limit bytes. White space becomes a blank. Other
// characters that are not Visible are escaped.
func Line(s string, limit int) string {
	return Cut(Escape(strings.Join(strings.Fields(s), " ")), limit)
}

// Quote returns a text that is Cut to limit bytes, such as an object's name. The text is in double
// quotes, with the escapes of Go, unless it is one line of printable ASCII. It is also in quotes if
// it looks like a quoted text, or like two columns. So no name looks like another name.
func Quote(s string, limit int) string {
	s = Cut(s, limit)
	unprintable := func(r rune) bool { return r < ' ' || r > '~' }
	if strings.ContainsFunc(s, unprintable) || strings.HasPrefix(s, `"`) || strings.Contains(s, "  ") || strings.TrimSpace(s) != s {
		return strconv.QuoteToASCII(s)
	}
	return s
}

// Cut returns s, or its first limit bytes and " ..." if s is longer. It escapes nothing.
func Cut(s string, limit int) string {
	if len(s) > limit {
		s = strings.ToValidUTF8(s[:limit], "") + " ..."
	}
	return s
}

// EntryWriter returns a writer for a log that writes each entry with one call of Write. Each entry
// becomes one line, with escapes for characters that are not Visible. So no text in an entry can
// look like another entry.
func EntryWriter(w io.Writer) io.Writer { return entryWriter{w} }

type entryWriter struct{ io.Writer }

// Write writes one entry.
func (w entryWriter) Write(entry []byte) (int, error) {
	if _, err := io.WriteString(w.Writer, Escape(strings.TrimSuffix(string(entry), "\n"))+"\n"); err != nil {
		return 0, err
	}
	return len(entry), nil
}

// Arguments returns the first MaxNames of those names that a shell takes as they are, for a command
// that an operator may copy, and NAME if there are none.
func Arguments(names []string) string {
	var safe []string
	for _, name := range names {
		letter := func(r rune) bool { return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' }
		strange := func(r rune) bool { return !letter(r) && !strings.ContainsRune(":._-", r) }
		if name != "" && len(name) <= maxListed && letter(rune(name[0])) && !strings.ContainsFunc(name, strange) {
			safe = append(safe, name)
		}
	}
	return cmp.Or(strings.Join(safe[:min(len(safe), MaxNames)], " "), "NAME")
}

// maxListed limits a name in a list, in bytes.
const maxListed = 253

// MaxNames is the number of names that Names lists.
const MaxNames = 20

// Count returns n and the noun, with an s unless n is 1: "1 machine", "2 machines".
func Count(n int, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return fmt.Sprintf("%d %s", n, noun)
}

// Names returns the number of names, and the first MaxNames of them, each by Quote.
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

// WithReason puts a reason before a message that does not begin with it.
func WithReason(reason, message string) string {
	switch {
	case reason == "", message == reason, strings.HasPrefix(message, reason+": "):
		return message
	case message == "":
		return reason
	}
	return reason + ": " + message
}
