// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
)

func TestZeroValuesRefuse(t *testing.T) {
	var r Refusals
	if r.Err() != nil {
		t.Error("no failed rule, but an error")
	}
	if r.Error() != "Refused" || r.Reason() != ReasonRefused {
		t.Errorf("an empty list as an error: %q, %q", r.Error(), r.Reason())
	}
	if got := (Refusal{}).String(); got != "Refused" {
		t.Errorf("an empty refusal: %q", got)
	}
	r = append(r, Refusal{})
	if r.Err() == nil || r.Reason() != ReasonRefused || r.Reasons()[0] != ReasonRefused {
		t.Error("an empty refusal does not refuse")
	}
}

func TestAllFailedRulesInOneMessage(t *testing.T) {
	var r Refusals
	r.Add("First", "one %d", 1)
	r.Add("Second", "")
	r.Add("First", "again")
	err := fmt.Errorf("request: %w", r.Err())
	if want := "request: First: one 1; Second; First: again"; err.Error() != want {
		t.Errorf("got %q, want %q", err, want)
	}
	var back Refusals
	if !errors.As(err, &back) || back.Reason() != "First" || !slices.Equal(back.Reasons(), []Reason{"First", "Second"}) {
		t.Errorf("got %v", back.Reasons())
	}
}

func TestPeersTextIsShortAndPrintable(t *testing.T) {
	var r Refusals
	r.Add("R", "%s", strings.Repeat("é\n\x1b[31m", 1000))
	if got := r[0].Message; len(got) > maxMessage || strings.ContainsAny(got, "\n\x1bé") {
		t.Errorf("got %d bytes: %q", len(got), got)
	}
}
