// SPDX-License-Identifier: Apache-2.0

package revocation

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestTokenPolicy(t *testing.T) {
	spec, omitted, err := RenderTokenPolicy([]string{"b", "a.example.com", "b"})
	if err != nil || len(omitted) > 0 {
		t.Fatal(omitted, err)
	}
	condition := spec.MatchConditions[0].Expression
	if want := ".exists(value, value in ['a.example.com','b'])"; !strings.HasSuffix(condition, want) || !strings.HasPrefix(condition, "has(request.userInfo.extra) && 'authentication.kubernetes.io/node-name' in request.userInfo.extra\n") {
		t.Error(condition)
	}
	rule := spec.MatchConstraints.ResourceRules[0]
	if fmt.Sprint(rule.APIGroups, rule.Resources, rule.Operations) != "[*] [*/*] [CREATE UPDATE DELETE CONNECT]" {
		t.Errorf("%+v", rule)
	}
	// Without names it is not evaluated.
	spec, _, err = RenderTokenPolicy(nil)
	if rule := spec.MatchConstraints.ResourceRules[0]; err != nil || spec.MatchConditions[0].Expression != "false" || slices.Contains(rule.Resources, "*/*") || len(rule.Operations) != 1 {
		t.Errorf("%+v, %v", spec, err)
	}
}

// Names that do not fit are returned, and the expression stays within the API server's limit.
func TestTokenPolicyIsBounded(t *testing.T) {
	for _, length := range []int{253, 19, 8} {
		var nodes []string
		for i := range 20_000 {
			nodes = append(nodes, fmt.Sprintf("%0*d", length, i))
		}
		spec, omitted, err := RenderTokenPolicy(nodes)
		if err != nil {
			t.Fatal(err)
		}
		fit := len(nodes) - len(omitted)
		points := utf8.RuneCountInString(spec.MatchConditions[0].Expression)
		if points > 100_000 || points < 98_000 || !slices.Equal(omitted, nodes[fit:]) || !strings.Contains(spec.MatchConditions[0].Expression, "'"+nodes[fit-1]+"']") {
			t.Errorf("%d names of %d characters: %d code points", fit, length, points)
		}
		t.Logf("%d names of %d characters", fit, length)
	}
}

// A name cannot end the literal.
func TestTokenPolicyRefusesOtherNames(t *testing.T) {
	for _, name := range []string{"", "a'", "a\nb", "A", "-a", "a\\", strings.Repeat("a", 254)} {
		if _, _, err := RenderTokenPolicy([]string{"a", name}); err == nil {
			t.Errorf("%q is taken", name)
		}
	}
}
