// SPDX-License-Identifier: Apache-2.0

package policyset

import (
	"slices"
	"testing"
)

func TestLiterals(t *testing.T) {
	for expression, want := range map[string][]string{
		"[]": {}, " [ ] ": {}, "['a']": {"a"}, "['a', \"b\",\n'c',]": {"a", "b", "c"}, "['']": {""},
	} {
		if got, ok := Literals(expression); !ok || !slices.Equal(got, want) {
			t.Errorf("%q: %v", expression, got)
		}
	}
	for _, expression := range []string{"", "a", "['a'", "['a' 'b']", "[,]", "['a'] + ['b']", "['a\\'']", "['a'+'b']", "[a]", "['''a''']", "[r'a']", "['a'] // x", "{'a'}", "[1]"} {
		if got, ok := Literals(expression); ok {
			t.Errorf("%q is %v", expression, got)
		}
	}
}
