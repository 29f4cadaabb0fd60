// SPDX-License-Identifier: Apache-2.0

package text

import "testing"

func TestNearest(t *testing.T) {
	fields := []string{"waitTimeout", "renewalWait", "certDir", "tpmDevice"}
	for word, want := range map[string]string{
		"waitTimout":   "waitTimeout", // one is missing
		"waittimeout":  "waitTimeout",
		"watiTimeout":  "waitTimeout", // two are replaced
		"certDirs":     "certDir",
		"tmpDevices":   "",            // three off
		"renewalWaits": "renewalWait", // not the first
		"":             "",
		"x":            "",
		"certdir":      "certDir",
	} {
		if got := Nearest(word, fields); got != want {
			t.Errorf("Nearest(%q) = %q, want %q", word, got, want)
		}
	}
	// The nearest wins, whatever the order.
	if got := Nearest("node", []string{"code", "nodes", "node"}); got != "node" {
		t.Errorf("got %q", got)
	}
	// A short word is near to nothing that it shares no letter with.
	if got := Nearest("ab", []string{"cd", "xy"}); got != "" {
		t.Errorf("got %q", got)
	}
}

func TestDidYouMean(t *testing.T) {
	if got := DidYouMean("cert-dri", "--", []string{"cert-dir"}); got != "; did you mean --cert-dir?" {
		t.Errorf("got %q", got)
	}
	if got := DidYouMean("nonsense", "--", []string{"cert-dir"}); got != "" {
		t.Errorf("got %q", got)
	}
}

func TestDistance(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"", "abc", 3}, {"abc", "", 3}, {"kitten", "sitting", 3}, {"abc", "abc", 0}, {"ab", "ba", 2}, {"abc", "abxc", 1}} {
		if got := distance(c.a, c.b); got != c.want {
			t.Errorf("distance(%q, %q) = %d, want %d", c.a, c.b, got, c.want)
		}
	}
}
