// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/terminal"
)

// width is the longest line that the demo prints.
const width = 120

// colored says that standard output may have colours (no-color.org).
var colored = terminal.Colors(os.Stdout, os.Getenv)

// The colours of titles, and of who got in and who did not.
const bold, green, red = "1", "32", "31"

// paint returns a text in a colour, or as it is.
func paint(color, text string) string {
	if !colored {
		return text
	}
	return "\x1b[" + color + "m" + text + "\x1b[0m"
}

// fold returns the lines of a text that are too long in several lines. Those that follow begin at a
// column.
func fold(text string, column int) string {
	indent := strings.Repeat(" ", column)
	var out []string
	for line := range strings.SplitSeq(text, "\n") {
		for first := true; ; first = false {
			if !first {
				line = indent + line
			}
			if len(line) <= width {
				out = append(out, line)
				break
			}
			at := strings.LastIndexByte(line[:width+1], ' ')
			if at <= column {
				at = width // a long word
			}
			out = append(out, strings.TrimRight(line[:at], " "))
			line = strings.TrimLeft(line[at:], " ")
		}
	}
	return strings.Join(out, "\n")
}

// title heads a stage.
func title(format string, args ...any) {
	fmt.Printf("\n%s\n", paint(bold, fold("=== "+fmt.Sprintf(format, args...), 4)))
}

// say prints a text.
func say(format string, args ...any) { fmt.Println(fold(fmt.Sprintf(format, args...), 4)) }

// shown prints a command line's output.
func shown(output string) {
	if output = strings.TrimRight(output, "\n"); output != "" {
		fmt.Println(fold(output, 4))
	}
}

// table prints rows in columns. Only the last cell of a row may be long.
func table(rows [][]string) {
	widths := make([]int, len(rows[0]))
	for _, row := range rows {
		for i, cell := range row[:len(row)-1] {
			widths[i] = max(widths[i], len(cell)+3)
		}
	}
	for _, row := range rows {
		line, column := "", 0
		for i, cell := range row[:len(row)-1] {
			line += fmt.Sprintf("%-*s", widths[i], cell)
			column += widths[i]
		}
		fmt.Println(fold(line+row[len(row)-1], column))
	}
}
