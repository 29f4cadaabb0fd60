// SPDX-License-Identifier: Apache-2.0

package text

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestLine(t *testing.T) {
	for in, want := range map[string]string{
		"":                       "",
		"plain":                  "plain",
		"two\nlines\r\n\tin one": "two lines in one",
		"\x1b]0;owned\a\x1b[2Jx": `\u001b]0;owned\u0007\u001b[2Jx`,
		"bad \xff utf-8":         `bad \xff utf-8`,
		"right\u202eto left":     `right\u202eto left`,
		strings.Repeat("é", 20):  strings.Repeat("é", 16) + " ...",
	} {
		if got := Line(in, 33); got != want {
			t.Errorf("Line(%q) = %q, want %q", in, got, want)
		}
	}
}

// Two names that differ never look the same, and an ordinary name is printed as it is.
func TestQuote(t *testing.T) {
	for _, same := range []string{"", "node-csr-1", "system:node:worker-7", "metal://4c4c-1", "a@b.example", "ns/name", `x\ny`} {
		if got := Quote(same, 64); got != same {
			t.Errorf("Quote(%q) = %q", same, got)
		}
	}
	for in, want := range map[string]string{
		"victim\u200b": `"victim\u200b"`,
		"victim ":      `"victim "`,
		"vic  tim":     `"vic  tim"`,
		"x\ny":         `"x\ny"`,
		`"x"`:          `"\"x\""`,
		"victіm":       `"vict\u0456m"`,
	} {
		if got := Quote(in, 64); got != want {
			t.Errorf("Quote(%q) = %s, want %s", in, got, want)
		}
	}
	if got := Quote(strings.Repeat("a", 70), 64); got != strings.Repeat("a", 64)+" ..." {
		t.Error(got)
	}
}

// Escape leaves a JSON document's meaning alone.
func TestEscapeJSON(t *testing.T) {
	for _, value := range []string{"plain ü 日", "\u202e\u2028\ufeff", "\u3164\u115f\ufe0f\u0301", "\U000e0041\U0001f469\u200d", "א", "\ufffc\U0001d159", "\x00\x1b\x7f\u009b\n"} {
		document, err := json.Marshal(value)
		if err != nil {
			t.Fatal(err)
		}
		escaped := Escape(string(document))
		if at := strings.IndexFunc(escaped, func(r rune) bool { return !Visible(r) }); at >= 0 {
			t.Errorf("%q is in %s", escaped[at:], escaped)
		}
		var back string
		if err := json.Unmarshal([]byte(escaped), &back); err != nil || back != value {
			t.Errorf("%q became %q: %v", value, back, err)
		}
	}
}

func TestEntryWriter(t *testing.T) {
	var out strings.Builder
	entry := "I1126 \"decided\" request=\"x\nI1126 forged\u202e\"\n"
	if n, err := EntryWriter(&out).Write([]byte(entry)); n != len(entry) || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	if want := `I1126 "decided" request="x\nI1126 forged\u202e"` + "\n"; out.String() != want {
		t.Errorf("%q, want %q", out.String(), want)
	}
}
