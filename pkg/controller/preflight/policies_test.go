// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"slices"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const shippedController = "system:serviceaccount:node-attestation-system:node-attestation-controller"

func release(t *testing.T, scope PolicyScope) *policySet {
	t.Helper()
	set, err := releases[scope]()
	if err != nil {
		t.Fatal(err)
	}
	return set
}

func (s *policySet) clone() *policySet {
	c := &policySet{}
	for i := range s.policies {
		c.policies = append(c.policies, *s.policies[i].DeepCopy())
	}
	for i := range s.bindings {
		c.bindings = append(c.bindings, *s.bindings[i].DeepCopy())
	}
	return c
}

// Each flavour has the policies that its kustomization selects, each with its binding, which
// denies.
func TestReleasePolicies(t *testing.T) {
	for scope, wanted := range map[PolicyScope]struct{ has, lacks string }{
		PoliciesAlone:      {"node-attestation-approval", "node-attestation-secrets"},
		PoliciesWorkload:   {"node-attestation-approval", "node-attestation-secrets"},
		PoliciesManagement: {"node-attestation-secrets", "node-attestation-approval"},
	} {
		set := release(t, scope)
		named := func(name string) bool {
			return slices.ContainsFunc(set.policies, func(p admissionv1.ValidatingAdmissionPolicy) bool { return p.Name == name })
		}
		if !named(wanted.has) || named(wanted.lacks) || len(set.policies) != len(set.bindings) {
			t.Errorf("scope %d: %d policies, %d bindings", scope, len(set.policies), len(set.bindings))
		}
		if problems := set.compare(set.policies, set.bindings, []string{shippedController}); len(problems) > 0 {
			t.Errorf("scope %d is not itself: %v", scope, problems)
		}
	}
	for _, broken := range []string{"kind: Secret\n", "kind: ValidatingAdmissionPolicy\nspecs: {}\n", "{", ""} {
		if _, err := parsePolicies("", []byte(broken)); err == nil {
			t.Errorf("%q is taken", broken)
		}
	}
}

// Each change that has a policy refuse less is a problem, and what an overlay may do is none.
func TestPoliciesAreCompared(t *testing.T) {
	const name = "node-attestation-approval"
	policy := func(change func(*admissionv1.ValidatingAdmissionPolicySpec)) func(*policySet) {
		return func(s *policySet) {
			change(&s.policies[slices.IndexFunc(s.policies, func(p admissionv1.ValidatingAdmissionPolicy) bool { return p.Name == name })].Spec)
		}
	}
	binding := func(change func(*admissionv1.ValidatingAdmissionPolicyBindingSpec)) func(*policySet) {
		return func(s *policySet) {
			change(&s.bindings[slices.IndexFunc(s.bindings, func(b admissionv1.ValidatingAdmissionPolicyBinding) bool { return b.Name == name })].Spec)
		}
	}
	list := func(variable int, change func(string) string) func(*policySet) {
		return policy(func(p *admissionv1.ValidatingAdmissionPolicySpec) {
			p.Variables[variable].Expression = change(p.Variables[variable].Expression)
		})
	}
	type spec = *admissionv1.ValidatingAdmissionPolicySpec
	type bindingSpec = *admissionv1.ValidatingAdmissionPolicyBindingSpec
	only := metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}
	for title, c := range map[string]struct {
		change  func(*policySet)
		problem string
		says    string
	}{
		"as it is":                {func(*policySet) {}, "", ""},
		"defaults spelled out":    {policy(func(p spec) { *p = *defaulted(p) }), "", ""},
		"failurePolicy left out":  {policy(func(p spec) { p.FailurePolicy = nil }), "", ""},
		"an empty matchResources": {binding(func(b bindingSpec) { b.MatchResources = &admissionv1.MatchResources{} }), "", ""},
		"one action more":         {binding(func(b bindingSpec) { b.ValidationActions = append(b.ValidationActions, admissionv1.Warn) }), "", ""},
		"Deny alone":              {binding(func(b bindingSpec) { b.ValidationActions = []admissionv1.ValidationAction{admissionv1.Deny} }), "", ""},
		"a signer more":           {list(1, func(e string) string { return strings.Replace(e, "[", "['example.com/another', ", 1) }), "", ""},
		"other quotes":            {list(1, func(e string) string { return strings.ReplaceAll(e, "'", `"`) }), "", ""},

		"a signer less": {list(1, func(e string) string {
			return strings.Replace(e, "'kubernetes.io/kube-apiserver-client-kubelet'", "'x'", 1)
		}), PolicyAltered, "lacks"},
		"no signers":            {list(1, func(string) string { return "[]" }), PolicyAltered, "lacks"},
		"signers are computed":  {list(1, func(e string) string { return e + ".filter(s, s != 'kubernetes.io/kube-apiserver-client-kubelet')" }), PolicyAltered, "not a list of literals"},
		"signers in a comment":  {list(1, func(e string) string { return "[] //" + strings.ReplaceAll(e, "\n", " ") }), PolicyAltered, "not a list of literals"},
		"a controller more":     {list(0, func(string) string { return "['" + shippedController + "', 'admin']" }), PolicyAltered, `"admin"`},
		"another controller":    {list(0, func(string) string { return "['admin']" }), PolicyAltered, `"admin"`},
		"no controllers":        {list(0, func(string) string { return "[]" }), PolicyAltered, "lacks"},
		"variables swapped":     {policy(func(p spec) { p.Variables[0], p.Variables[1] = p.Variables[1], p.Variables[0] }), PolicyAltered, "variables"},
		"a variable more":       {policy(func(p spec) { p.Variables = append(p.Variables, admissionv1.Variable{Name: "a", Expression: "1"}) }), PolicyAltered, "variables"},
		"an expression":         {policy(func(p spec) { p.Validations[1].Expression = "true || " + p.Validations[1].Expression }), PolicyAltered, "validations"},
		"a variable's meaning":  {list(2, func(string) string { return "[]" }), PolicyAltered, "variables"},
		"a validation less":     {policy(func(p spec) { p.Validations = p.Validations[:1] }), PolicyAltered, "validations"},
		"failurePolicy Ignore":  {policy(func(p spec) { p.FailurePolicy = new(admissionv1.Ignore) }), PolicyAltered, "failurePolicy"},
		"a resource less":       {policy(func(p spec) { r := &p.MatchConstraints.ResourceRules[0]; r.Resources = r.Resources[:1] }), PolicyAltered, "matchConstraints"},
		"one version":           {policy(func(p spec) { p.MatchConstraints.ResourceRules[0].APIVersions = []string{"v1beta1"} }), PolicyAltered, "matchConstraints"},
		"a name only":           {policy(func(p spec) { p.MatchConstraints.ResourceRules[0].ResourceNames = []string{"a"} }), PolicyAltered, "matchConstraints"},
		"an exception":          {policy(func(p spec) { p.MatchConstraints.ExcludeResourceRules = p.MatchConstraints.ResourceRules }), PolicyAltered, "matchConstraints"},
		"an object selector":    {policy(func(p spec) { p.MatchConstraints.ObjectSelector = &only }), PolicyAltered, "matchConstraints"},
		"a scope":               {policy(func(p spec) { p.MatchConstraints.ResourceRules[0].Scope = new(admissionv1.NamespacedScope) }), PolicyAltered, "matchConstraints"},
		"a matchPolicy":         {policy(func(p spec) { p.MatchConstraints.MatchPolicy = new(admissionv1.Exact) }), PolicyAltered, "matchConstraints"},
		"a match condition":     {policy(func(p spec) { p.MatchConditions = []admissionv1.MatchCondition{{Name: "a", Expression: "false"}} }), PolicyAltered, "matchConditions"},
		"a paramKind":           {policy(func(p spec) { p.ParamKind = &admissionv1.ParamKind{APIVersion: "v1", Kind: "ConfigMap"} }), PolicyAltered, "paramKind"},
		"audit annotations":     {policy(func(p spec) { p.AuditAnnotations = []admissionv1.AuditAnnotation{{Key: "a", ValueExpression: "'b'"}} }), PolicyAltered, "spec"},
		"no policy":             {func(s *policySet) { s.policies = s.policies[1:] }, PolicyMissing, "policy is not there"},
		"no binding":            {func(s *policySet) { s.bindings = s.bindings[1:] }, PolicyMissing, "its binding"},
		"audits only":           {binding(func(b bindingSpec) { b.ValidationActions = []admissionv1.ValidationAction{admissionv1.Audit} }), PolicyNotDenying, "Deny"},
		"warns only":            {binding(func(b bindingSpec) { b.ValidationActions = []admissionv1.ValidationAction{admissionv1.Warn} }), PolicyNotDenying, "Deny"},
		"another policy's":      {binding(func(b bindingSpec) { b.PolicyName = "node-attestation-size" }), PolicyAltered, "another policy"},
		"a paramRef":            {binding(func(b bindingSpec) { b.ParamRef = &admissionv1.ParamRef{Name: "a"} }), PolicyAltered, "paramRef"},
		"a narrowed binding":    {binding(func(b bindingSpec) { b.MatchResources = &admissionv1.MatchResources{ObjectSelector: &only} }), PolicyAltered, "matchResources"},
		"a binding's namespace": {binding(func(b bindingSpec) { b.MatchResources = &admissionv1.MatchResources{NamespaceSelector: &only} }), PolicyAltered, "matchResources"},
	} {
		want := release(t, PoliciesAlone)
		got := want.clone()
		c.change(got)
		problems := want.compare(got.policies, got.bindings, []string{shippedController})
		switch {
		case c.problem == "":
			if len(problems) > 0 {
				t.Errorf("%s: %v", title, problems)
			}
		case len(problems) != 1 || problems[0].Policy != name || problems[0].Problem != c.problem || !strings.Contains(problems[0].Detail, c.says):
			t.Errorf("%s: %v", title, problems)
		}
	}
	// All of the configured controllers have to be named.
	want := release(t, PoliciesAlone)
	if problems := want.compare(want.policies, want.bindings, []string{shippedController, "another"}); len(problems) != len(want.policies) {
		t.Errorf("one of two controllers is not named: %v", problems)
	}
}

func TestLiterals(t *testing.T) {
	for expression, want := range map[string][]string{
		"[]": {}, " [ ] ": {}, "['a']": {"a"}, "['a', \"b\",\n'c',]": {"a", "b", "c"}, "['']": {""},
	} {
		if got, ok := literals(expression); !ok || !slices.Equal(got, want) {
			t.Errorf("%q: %v", expression, got)
		}
	}
	for _, expression := range []string{"", "a", "['a'", "['a' 'b']", "[,]", "['a'] + ['b']", "['a\\'']", "['a'+'b']", "[a]", "['''a''']", "[r'a']", "['a'] // x", "{'a'}", "[1]"} {
		if got, ok := literals(expression); ok {
			t.Errorf("%q is %v", expression, got)
		}
	}
}

// More entries are for lists of which that is known to do no harm, or to be the operator's to say.
func TestListsThatMayHaveMore(t *testing.T) {
	for name, more := range map[string]bool{"signers": true, "bootstrappers": true, "movers": true, "exempt": false, "controllers": false} {
		if detail := listDifference(name, []string{"a"}, "['a']", []string{"a"}); detail != "" {
			t.Errorf("%s: %s", name, detail)
		}
		if detail := listDifference(name, []string{"a"}, "['a', 'b']", []string{"a"}); (detail == "") != more {
			t.Errorf("%s with one more: %q", name, detail)
		}
		if detail := listDifference(name, []string{"a"}, "[]", []string{"a"}); detail == "" {
			t.Errorf("%s may be empty", name)
		}
	}
}
