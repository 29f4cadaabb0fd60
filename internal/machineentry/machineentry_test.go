// SPDX-License-Identifier: Apache-2.0

package machineentry

import (
	"reflect"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

func TestString(t *testing.T) {
	t.Parallel()
	m := Machine{
		Name: "Rack 1", NodeName: "worker-7.example.com", ProviderID: "metal://rack1/07", Addresses: []string{"worker-7.example.com", "192.0.2.7", "2001:db8::7"},
		EKs: []string{strings.Repeat("a", 64), strings.Repeat("1", 64)}, BootstrapTokenID: "012345",
	}
	const want = `- name: "Rack 1"
  nodeName: worker-7.example.com
  providerID: metal://rack1/07
  addresses: [worker-7.example.com, "192.0.2.7", "2001:db8::7"]
  bootstrapTokenID: "012345"
  eks:
  - fingerprint: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
  - fingerprint: "1111111111111111111111111111111111111111111111111111111111111111"
`
	if got := m.String(); got != want {
		t.Errorf("got\n%s", got)
	}
	if got := (Machine{Name: "m", NodeName: "m", EKs: []string{"e"}}).String(); got != "- nodeName: m\n  eks:\n  - fingerprint: e\n" {
		t.Errorf("got\n%s", got)
	}
}

// What is written is read as it was, also if YAML could take it for something else.
func TestEntriesAreRead(t *testing.T) {
	t.Parallel()
	var entries strings.Builder
	var want []any
	for _, text := range []string{
		"a", "y", "no", "on", "null", "~", "true", "1", "0x1f", "1e3", "e1", "1:30", "2026-11-03", "a: b", "a:b", "a:", "# a", "a #b", "a, b", "[a]", "{a}", "-", "- a", "&a", "*a", "!a", "'", "\"",
		"\\", "%", "@", "`", "|", ">", "Ü", "<&>", "=", ".nan", "a//b", "a b", " a ", "?", "a?b=c",
		"a\nb", "\r", "\t", "\x00", "\x1b[2J", "\x7f", "\u0085", "\u00a0", "\u2028", "\u202e", "\ufeff", "\U000e0041", "\a\b\f\v",
	} {
		entries.WriteString(Machine{NodeName: text, ProviderID: text, Addresses: []string{text, "b"}, EKs: []string{text}}.String())
		want = append(want, map[string]any{
			"nodeName": text, "providerID": text, "addresses": []any{text, "b"}, "eks": []any{map[string]any{"fingerprint": text}},
		})
	}
	var got []any
	if err := yaml.UnmarshalStrict([]byte(entries.String()), &got); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, %v\n%s", got, err, entries.String())
	}
}
