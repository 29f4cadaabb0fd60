// SPDX-License-Identifier: Apache-2.0

package attestctl

import (
	"fmt"
	"io"
	"reflect"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/cli-runtime/pkg/printers"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
)

// prose is text that an operator wrote, in any language. Other text is quoted unless it is ASCII.
type prose string

// shown returns a value that is safe to show, even if a peer wrote it: bounded, and in one line.
func shown(value any, limit int) any {
	switch v := value.(type) {
	case prose:
		return text.Line(string(v), limit)
	case error:
		return text.Line(v.Error(), limit)
	case fmt.Stringer:
		return text.Quote(v.String(), limit)
	}
	if v := reflect.ValueOf(value); v.Kind() == reflect.String {
		return text.Quote(v.String(), limit)
	}
	return value
}

// sprintf is fmt.Sprintf, but makes the arguments safe to show. The format must not come from a
// peer. All text that a command prints for people comes from sprintf or from printTable.
func sprintf(format string, arguments ...any) string {
	safe := make([]any, len(arguments))
	for k, argument := range arguments {
		safe[k] = shown(argument, maxMessage)
	}
	return fmt.Sprintf(format, safe...)
}

// printf prints a line on standard output.
func (i *invocation) printf(format string, arguments ...any) error {
	_, err := fmt.Fprintln(i.Stdout, sprintf(format, arguments...))
	return err
}

// maxCell limits a cell of a table, in bytes.
const maxCell = 63

// printTable prints rows as kubectl get does, without a head if that is empty.
func printTable(out io.Writer, head []any, rows [][]any) error {
	w := printers.GetNewTabWriter(out)
	if len(head) > 0 {
		rows = append([][]any{head}, rows...)
	}
	for _, row := range rows {
		cells := make([]string, len(row))
		for i, cell := range row {
			if cells[i] = fmt.Sprint(shown(cell, maxCell)); cells[i] == "" {
				cells[i] = "<none>"
			}
		}
		if _, err := fmt.Fprintln(w, strings.Join(cells, "\t")); err != nil {
			return err
		}
	}
	return w.Flush()
}

// age is how long ago a time is, or how far ahead.
func age(at, now time.Time) string {
	if at.IsZero() {
		return ""
	}
	return duration.HumanDuration(now.Sub(at).Abs())
}

// until says when something ends.
func until(end, now time.Time) string {
	switch {
	case end.IsZero():
		return ""
	case !now.Before(end):
		return "expired " + age(end, now) + " ago"
	}
	return age(end, now)
}

// short is the start of a fingerprint, for people. The program compares whole fingerprints.
func short(fingerprint string) string { return fingerprint[:min(12, len(fingerprint))] }

// trueFirst is for sorting: it puts true before false.
func trueFirst(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}

// stamp formats a time for people.
func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// plainDuration formats a duration without parts that are zero, such as 2h.
func plainDuration(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}
