// SPDX-License-Identifier: Apache-2.0

package attestctl

import (
	"fmt"
	"io"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/cli-runtime/pkg/printers"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
)

// maxCell limits a cell of a table, in bytes.
const maxCell = 63

// printTable prints rows as kubectl get does.
func printTable(out io.Writer, head []string, rows [][]string) error {
	w := printers.GetNewTabWriter(out)
	for _, row := range append([][]string{head}, rows...) {
		for i, cell := range row {
			if cell = text.Line(cell, maxCell); cell == "" {
				cell = "<none>"
			}
			row[i] = cell
		}
		if _, err := fmt.Fprintln(w, strings.Join(row, "\t")); err != nil {
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

// The escape sequences of colours.
const (
	red    = "\x1b[31m"
	green  = "\x1b[32m"
	yellow = "\x1b[33m"
	plain  = "\x1b[0m"
)
