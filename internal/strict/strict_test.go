// SPDX-License-Identifier: Apache-2.0

package strict

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

type document struct {
	metav1.TypeMeta `json:",inline"`

	Name  string `json:"name,omitempty"`
	Other string `json:"other,omitempty"`
}

func TestDecode(t *testing.T) {
	for name, c := range map[string]struct{ data, says string }{
		"good":                {"name: a\n", ""},
		"good, in JSON":       {`{"name": "a"}`, ""},
		"unknown":             {"name: a\nnam: b\n", "line 2: nam: unknown field; did you mean name?"},
		"differently-cased":   {"name: a\nName: b\n", "line 2: Name: unknown field; did you mean name?"},
		"doubled":             {"name: a\nname: a\n", "line 2: name: comes a second time"},
		"a second document":   {"name: a\n---\nother: b\n", "more than one document"},
		"a second, after ...": {"name: a\n...\nother: b\n", "more than one document"},
		"another kind":        {"name: [a]\n", "line 1: name: must be a string, not a list"},
		"not YAML":            {"name: [\n", "did not find"},
	} {
		t.Run(name, func(t *testing.T) {
			into := document{Other: "kept"}
			err := Decoder{}.Decode([]byte(c.data), &into)
			switch {
			case c.says == "" && (err != nil || into.Name != "a" || into.Other != "kept"):
				t.Errorf("%+v, %v", into, err)
			case c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "\n")):
				t.Errorf("does not say %q on one line: %v", c.says, err)
			}
		})
	}
}

func TestCheckKind(t *testing.T) {
	is := metav1.TypeMeta{APIVersion: "example.com/v1", Kind: "A"}
	if err := CheckKind(is, "example.com/v1", "A"); err != nil {
		t.Error(err)
	}
	for _, other := range [][2]string{{"example.com/v2", "A"}, {"example.com/v1", "B"}, {"", ""}} {
		if err := CheckKind(is, other[0], other[1]); err == nil {
			t.Errorf("%v was accepted", other)
		}
	}
}
