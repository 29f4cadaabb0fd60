// SPDX-License-Identifier: Apache-2.0

package checkup

import (
	"slices"
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/terminal"
)

func sample() Results {
	var all Results
	all.Add("a", Result{Status: OK, Message: "fine"})
	all.Add("long-name", Result{Status: Failure, Message: "broken", Remedy: "mend it"})
	return all
}

// Colours do not change the text.
func TestText(t *testing.T) {
	t.Parallel()
	const want = "ok       a          fine\nfailure  long-name  broken\n                    remedy: mend it\n"
	if got := sample().Text(false); got != want {
		t.Errorf("\n%q\nwant\n%q", got, want)
	}
	colored := sample().Text(true)
	if !strings.Contains(colored, terminal.Red) || strings.NewReplacer(terminal.Red, "", terminal.Green, "", terminal.Plain, "").Replace(colored) != want {
		t.Errorf("%q", colored)
	}
}

// A failure outweighs what is not known, and that a warning. What is skipped is no problem.
func TestStatusIsTheWorst(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		found []Status
		want  Status
	}{
		{nil, OK},
		{[]Status{Skipped}, OK},
		{[]Status{OK, Warning, Skipped}, Warning},
		{[]Status{Unknown, Warning, OK}, Unknown},
		{[]Status{Unknown, Failure, Warning}, Failure},
	} {
		var all Results
		for _, s := range c.found {
			all.Add("a", Result{Status: s})
		}
		if got := all.Status(); got != c.want {
			t.Errorf("%v: %s", c.found, got)
		}
		if err := all.Err(); (err != nil) != slices.Contains(c.found, Failure) {
			t.Errorf("%v: %v", c.found, err)
		}
	}
	if err := sample().Err(); err == nil || err.Error() != "1 check failed: long-name" {
		t.Error(err)
	}
}

// A peer may have written a part of a result.
func TestAddBoundsText(t *testing.T) {
	t.Parallel()
	var all Results
	all.Add("a", Result{Status: Failure, Message: strings.Repeat("a\n", maxText), Remedy: strings.Repeat("b\x1b", maxText)})
	if r := all[0]; len(r.Message) > maxText+len(" ...") || len(r.Remedy) > maxText+len(" ...") || strings.ContainsAny(r.Message+r.Remedy, "\n\x1b") {
		t.Errorf("%d and %d bytes: %.50q, %.50q", len(r.Message), len(r.Remedy), r.Message, r.Remedy)
	}
}
