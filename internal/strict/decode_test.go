// SPDX-License-Identifier: Apache-2.0

package strict

import (
	"errors"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kjson "sigs.k8s.io/json"
	sigsyaml "sigs.k8s.io/yaml"
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
		"a number for a duration":      {"waitTimeout: 30\n", "line 1: waitTimeout: must be a string, not the number 30"},
		"no duration":                  {"\nwaitTimeout: soon\n", `line 2: waitTimeout: invalid duration "soon"`},
		"a string for a boolean":       {"\nenabled: maybe\n", "line 2: enabled: must be true or false, not a string"},
		"a fraction":                   {"number: 1.5\n", "line 1: number: must be a whole number in range, not the number 1.5"},
		"an object for a list":         {"rules: {}\n", "line 1: rules: must be a list, not an object"},
		"in a list":                    {"rules:\n- selector: a\n- selectro: b\n", "line 3: rules[1].selectro: unknown field; did you mean selector?"},
		"in a list of lists":           {"rules:\n- values:\n  - a\n  - [b]\n", "line 4: rules[0].values[1]: must be a string, not a list"},
		"in a map":                     {"named:\n  a:\n    selector: a\n  b:\n    value: []\n", "line 5: named.b.value: unknown field; did you mean values?"},
		"several, in the file's order": {"nonsense: 1\nenabled: 1\n", "line 1: nonsense: unknown field; line 2: enabled: must be true or false, not the number 1"},
		"JSON":                         {"{\n  \"enabled\": true,\n  \"numbre\": 1\n}", "line 3: numbre: unknown field; did you mean number?"},
		"not YAML":                     {"enabled: true\n  number: 1\n", "line 2: mapping values are not allowed in this context"},
		"no object":                    {"maybe\n", "line 1: must be an object, not a string"},
		"a field without a name":       {"\"\": 1\n", "line 1: unknown field"},
		"a field of two lines":         {"\"a\\nb\\e[31m\": 1\n", "line 1: a b\\u001b[31m: unknown field"},
		"something behind JSON":        {"{\"enabled\": true}\nnumber: 5\n", "holds more than one document"},
		"JSON twice":                   {"{\"enabled\": true}\n{}\n", "holds more than one document"},
		"a word of YAML 1.1":           {"rules:\n- selector: yes\n", "line 2: rules[0].selector: must be a string, not true or false"},
		"a field without a null":       {"waitTimeout:\n", `line 1: waitTimeout: invalid duration ""`},
		"a list as a name":             {"? [a]\n: b\n", "line 1: the name of a field must be a string, not a list"},
		"merged twice":                 {"rules:\n- &a {selector: a}\n- <<: *a\n  selector: b\n", "line 4: rules[1].selector: comes a second time, after line 2"},
		"merged into itself":           {"rules:\n- &a {<<: *a}\n", "line 2: rules[0]: << takes objects that do not contain themselves"},
		"a list tagged as a time":      {"rules:\n- selector: !!timestamp [a]\n", "line 2: rules[0].selector: must be a string, not a list"},
		"an object tagged as a time":   {"rules:\n- selector: !!timestamp {a: b}\n", "line 2: rules[0].selector: must be a string, not an object"},
		"a field twice":                {"enabled: true\nenabled: true\n", "line 2: enabled: comes a second time, after line 1"},
	} {
		t.Run(name, func(t *testing.T) {
			err := Decoder{}.Decode([]byte(c.data), &settings{})
			if err == nil || err.Error() != c.want {
				t.Errorf("got  %v\nwant %s", err, c.want)
			}
		})
	}
}

// An operator mends the first problems first. A file of mistakes must not make an error of
// megabytes.
func TestProblemsAreBounded(t *testing.T) {
	err := Decoder{}.Decode([]byte(strings.Repeat("- 1\n", 10_000)), &settings{})
	if err == nil || len(err.Error()) > 200 {
		t.Errorf("%.300v", err)
	}
	err = Decoder{}.Decode([]byte("rules:\n"+strings.Repeat("- 1\n", 10_000)), &settings{})
	if err == nil || strings.Count(err.Error(), "line ") != maxProblems {
		t.Errorf("%.300v", err)
	}
}

// A removed field is not a mistyped one. The error says what to do instead.
func TestRemovedFields(t *testing.T) {
	decoder := Decoder{Removed: map[string]string{"rule": "list it in rules"}}
	for data, want := range map[string]string{
		"enabled: true\nrule: {selector: a}\n": "line 2: rule: was removed; list it in rules",
		"rulez: []\n":                          "line 1: rulez: unknown field; did you mean rules?",
	} {
		if err := decoder.Decode([]byte(data), &settings{}); err == nil || err.Error() != want {
			t.Errorf("got  %v\nwant %s", err, want)
		}
	}
}

// A plain document means what it shows. Its texts are as they are written.
func TestPlain(t *testing.T) {
	type entry struct {
		Line  Line
		Name  Text `json:"name"`
		Other Text `json:"other"`
	}
	var into struct {
		Entries []entry     `json:"entries"`
		Rest    []yaml.Node `json:"rest"`
	}
	plain := Decoder{Plain: true}
	if err := plain.Decode([]byte("entries:\n- name: yes\n  other: 0123\n-\n  name: 1e3\nrest: [&a {b: *a}]\n"), &into); err != nil {
		t.Fatal(err)
	}
	want := []entry{{2, Text{2, "yes"}, Text{3, "0123"}}, {5, Text{5, "1e3"}, Text{}}}
	if !reflect.DeepEqual(into.Entries, want) || len(into.Rest) != 1 {
		t.Errorf("%+v", into)
	}
	for data, want := range map[string]string{
		"entries: [{name: &a a}]\n":                                "line 1: entries[0].name: anchors and aliases are not allowed",
		"entries:\n- &a {name: a}\n- *a\n":                         "line 2: entries[0]: anchors and aliases are not allowed; line 3: entries[1]: anchors and aliases are not allowed",
		"entries: [{name: !!str a}]\n":                             "line 1: entries[0].name: tags are not allowed",
		"entries: [{<<: {name: a}}]\n":                             "line 1: entries[0].<<: unknown field",
		"entries:\n":                                               "line 1: entries: has no value",
		"entries: [{name: [a]}]\n":                                 "line 1: entries[0].name: must be a string, not a list",
		"entries: [{\n  name: " + strings.Repeat("a", 4097) + "}]": "line 2: entries[0].name: is longer than 4096 bytes",
	} {
		if err := plain.Decode([]byte(data), &into); err == nil || err.Error() != want {
			t.Errorf("got  %v\nwant %s", err, want)
		}
	}
}

// A small document must not become a large one.
func TestAliasesAreBounded(t *testing.T) {
	var into struct {
		Lists []struct {
			Items []struct{} `json:"items"`
		} `json:"lists"`
	}
	laughs := "lists:\n- &a {items: [" + strings.Repeat("{}, ", 1000) + "{}]}\n" + strings.Repeat("- *a\n", 2000)
	if err := (Decoder{}).Decode([]byte(laughs), &into); err == nil || !strings.Contains(err.Error(), "more than 1048576 values") || strings.Contains(err.Error(), ";") {
		t.Errorf("%.300v", err)
	}
	// Objects that are merged and have no fields count, too.
	empty := strings.Repeat("*e, ", 2000)
	merged := "lists:\n- &e {}\n- &g {<<: [" + empty + "*e]}\n- {<<: [" + strings.Repeat("*g, ", 2000) + "*g]}\n"
	if err := (Decoder{}).Decode([]byte(merged), &into); err == nil || !strings.Contains(err.Error(), "more than 1048576 values") {
		t.Errorf("%.300v", err)
	}
}

// FuzzDecode: a document of configuration means the same as to kubectl, or it is refused.
func FuzzDecode(f *testing.F) {
	for _, word := range strings.Fields("y Y yes Yes YES n no on off Off true TRUE null ~ 0 -1 +1 010 0o10 0b11 0x1f 1_000 1.5 1.0 1e3 1e+3 .5 .inf 1:30 2026-01-02 2026-01-02T03:04:05Z 'yes' !!str 1 !!timestamp 99999999999 soon 30s <<") {
		f.Add("waitTimeout: " + word + "\nenabled: " + word + "\nnumber: " + word)
		f.Add("enabled: " + word)
		f.Add("number: " + word)
		f.Add("rules: [{selector: " + word + ", values: [" + word + "]}]\nnamed: {" + word + ": {selector: a}}")
	}
	f.Add("rules: [&a {selector: a}, *a, {<<: *a, values: []}, {<<: [*a, {values: [b]}]}]\nnamed: null\n")
	f.Add("rules: [{selector: !!timestamp [a]}, {selector: !!timestamp {a: b}}]")
	f.Add("{\"enabled\": true}\n---\nnull\n")
	f.Add("--- \n...\n")
	bareTag := regexp.MustCompile(`!([^!\w]|$)`) // it is lost in a yaml.Node
	f.Fuzz(func(t *testing.T, data string) {
		if bareTag.MatchString(data) {
			return
		}
		got, want := settings{Number: 7}, settings{Number: 7}
		err := Decoder{}.Decode([]byte(data), &got)
		if err != nil {
			if strings.ContainsAny(err.Error(), "\n\x1b") || len(err.Error()) > 20_000 {
				t.Fatalf("%q", err)
			}
		}
		var syntax *Problem
		asJSON, other := sigsyaml.YAMLToJSONStrict([]byte(data))
		if other == nil {
			var problems []error
			problems, other = kjson.UnmarshalStrict(asJSON, &want)
			other = errors.Join(append(problems, other)...)
		}
		switch {
		case errors.As(err, &syntax), err != nil && (strings.Contains(err.Error(), "more than one document") || strings.Contains(err.Error(), "the name of a field")):
			// kubectl ignores what follows the first document, and fields whose names are objects
		case (err == nil) != (other == nil), err == nil && !reflect.DeepEqual(got, want):
			t.Fatalf("%q: %+v, %v, and kubectl has %+v, %v", data, got, err, want, other)
		}
	})
}
