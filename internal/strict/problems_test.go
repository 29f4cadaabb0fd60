// SPDX-License-Identifier: Apache-2.0

package strict

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

type settings struct {
	metav1.TypeMeta `json:",inline"`

	Wait   metav1.Duration  `json:"waitTimeout"`
	On     bool             `json:"enabled"`
	Number int32            `json:"number"`
	Rules  []rule           `json:"rules"`
	Named  map[string]*rule `json:"named"`
}

type rule struct {
	Selector string   `json:"selector"`
	Values   []string `json:"values"`
}

// Each field that is wrong is named with its path and with the line that it stands in.
func TestDecodeNamesLineAndField(t *testing.T) {
	for name, c := range map[string]struct{ data, want string }{
		"a mistyped field":             {"# a comment\n\nwaitTimout: 30s\n", "line 3: waitTimout: unknown field; did you mean waitTimeout?"},
		"an unknown field":             {"nonsense: 1\n", "line 1: nonsense: unknown field"},
		"an inline field":              {"apiVersoin: a\n", "line 1: apiVersoin: unknown field; did you mean apiVersion?"},
		"another case":                 {"waittimeout: 30s\n", "line 1: waittimeout: unknown field; did you mean waitTimeout?"},
		"a field with a null":          {"enabled: true\nenable: null\n", "line 2: enable: unknown field; did you mean enabled?"},
		"a field with a block":         {"enabled: true\nrule:\n- selector: a\n", "line 2: rule: unknown field; did you mean rules?"},
		"a number for a duration":      {"waitTimeout: 30\n", "line 1: waitTimeout: must be a string, not a number"},
		"no duration":                  {"\nwaitTimeout: soon\n", `line 2: waitTimeout: invalid duration "soon"`},
		"a string for a boolean":       {"\nenabled: maybe\n", "line 2: enabled: must be true or false, not a string"},
		"a fraction":                   {"number: 1.5\n", "line 1: number: must be a whole number in range, not a number 1.5"},
		"an object for a list":         {"rules: {}\n", "line 1: rules: must be a list, not an object"},
		"in a list":                    {"rules:\n- selector: a\n- selectro: b\n", "line 3: rules[1].selectro: unknown field; did you mean selector?"},
		"in a list of lists":           {"rules:\n- values:\n  - a\n  - [b]\n", "line 4: rules[0].values[1]: must be a string, not a list"},
		"in a map":                     {"named:\n  a:\n    selector: a\n  b:\n    value: []\n", "line 5: named.b.value: unknown field; did you mean values?"},
		"several, in the file's order": {"nonsense: 1\nenabled: 1\n", "line 1: nonsense: unknown field; line 2: enabled: must be true or false, not a number"},
		"JSON":                         {"{\n  \"enabled\": true,\n  \"numbre\": 1\n}", "line 3: numbre: unknown field; did you mean number?"},
		"not YAML":                     {"enabled: true\n  number: 1\n", "line 2: mapping values are not allowed in this context"},
		"no object":                    {"maybe\n", "must be an object, not a string"},
		"a field without a name":       {"\"\": 1\n", "line 1: unknown field"},
		"a field of two lines":         {"\"a\\nb\\e[31m\": 1\n", "line 1: a b\\u001b[31m: unknown field"},
		"something behind JSON":        {"{\"enabled\": true}\nnumber: 5\n", "holds more than one document"},
		"JSON twice":                   {"{\"enabled\": true}\n{}\n", "holds more than one document"},
		"a field twice":                {"enabled: true\nenabled: true\n", `line 2: key "enabled" already set in map`},
	} {
		t.Run(name, func(t *testing.T) {
			err := Decode([]byte(c.data), &settings{})
			if err == nil || err.Error() != c.want {
				t.Errorf("got  %v\nwant %s", err, c.want)
			}
		})
	}
}

// An operator mends the first problems first. A file of mistakes must not make an error of
// megabytes.
func TestProblemsAreBounded(t *testing.T) {
	err := Decode([]byte(strings.Repeat("- 1\n", 10_000)), &settings{})
	if err == nil || len(err.Error()) > 200 {
		t.Errorf("%.300v", err)
	}
	err = Decode([]byte("rules:\n"+strings.Repeat("- 1\n", 10_000)), &settings{})
	if err == nil || strings.Count(err.Error(), "line ") != maxProblems {
		t.Errorf("%.300v", err)
	}
}

// A removed field is not a mistyped one. The error says what to do instead.
func TestRemovedFields(t *testing.T) {
	removed := Removed{"rule": "list it in rules"}
	for data, want := range map[string]string{
		"enabled: true\nrule: {selector: a}\n": "line 2: rule: was removed; list it in rules",
		"rulez: []\n":                          "line 1: rulez: unknown field; did you mean rules?",
	} {
		if err := removed.Decode([]byte(data), &settings{}); err == nil || err.Error() != want {
			t.Errorf("got  %v\nwant %s", err, want)
		}
	}
}
