// SPDX-License-Identifier: Apache-2.0

package outputformat

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
)

// No character of a peer's text gets to a terminal as it is, and none is lost.
func TestHostileTextIsEscaped(t *testing.T) {
	t.Parallel()
	value := map[string]any{"y": "y", "list": []any{"a: b", "1", map[string]any{"in": "it"}}}
	for _, hostile := range []string{
		"\x00", "\x1b[2J", "\x7f", "\u0085", "\u009b31m", "\u00a0", "\u00ad", "\u200b", "\u200f", "\u202e", "\u2028", "\u2029", "\u2066", "\ufeff", "\U000e0041", "\u3164", "\ufe0f", "e\u0301", "א",
		"two\nlines", "\n- a: b\n", "tab\there", "a\r\nb", "---\n", "'\u202e'", `"\u202e"`, "\\\u202e", " \u202e: # ",
	} {
		value[hostile] = "x" + hostile + "y"
		value["list"] = append(value["list"].([]any), hostile, strings.Repeat("long "+hostile, 100))
	}
	for _, format := range []string{JSON, YAML} {
		out, err := Encode(format, value)
		if err != nil {
			t.Fatal(err)
		}
		if at := strings.IndexFunc(string(out), func(r rune) bool { return r != '\n' && !text.Visible(r) }); at >= 0 {
			t.Errorf("%s has %q", format, out[at:at+10])
		}
		var got map[string]any
		decode := json.Unmarshal
		if format == YAML {
			decode = func(data []byte, into any) error { return yaml.UnmarshalStrict(data, into) }
		}
		if err := decode(out, &got); err != nil {
			t.Errorf("%s: %v", format, err)
			continue
		}
		for key, want := range value {
			if !reflect.DeepEqual(got[key], want) {
				t.Errorf("%s: %q is %.200q, not %.200q", format, key, got[key], want)
			}
		}
	}
}
