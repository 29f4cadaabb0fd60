// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

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

// Each change that makes a policy refuse less is a problem. Changes that an overlay may make are
// not.
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
	// The policies must name all configured controllers.
	want := release(t, PoliciesAlone)
	if problems := want.compare(want.policies, want.bindings, []string{shippedController, "another"}); len(problems) != len(want.policies) {
		t.Errorf("one of two controllers is not named: %v", problems)
	}
}

// The policies of revocation are compared while revocation is enabled. They must equal what the
// controller last rendered, if it has rendered them.
func TestRevocationPoliciesAreCompared(t *testing.T) {
	const name, guard = "node-attestation-revoked-03", "node-attestation-revocation-slices"
	type change func(*policySet)
	find := func(s *policySet, name string) (*admissionv1.ValidatingAdmissionPolicySpec, *admissionv1.ValidatingAdmissionPolicyBindingSpec) {
		return &s.policies[slices.IndexFunc(s.policies, func(p admissionv1.ValidatingAdmissionPolicy) bool { return p.Name == name })].Spec,
			&s.bindings[slices.IndexFunc(s.bindings, func(b admissionv1.ValidatingAdmissionPolicyBinding) bool { return b.Name == name })].Spec
	}
	filled := func(s *policySet) {
		policy, _ := find(s, name)
		policy.MatchConditions[0].Expression = "true"
	}
	without := func(name string) change {
		return func(s *policySet) {
			s.policies = slices.DeleteFunc(s.policies, func(p admissionv1.ValidatingAdmissionPolicy) bool { return p.Name == name })
		}
	}
	for title, c := range map[string]struct {
		off, renders bool
		change       change
		policy       string
		problem      string
	}{
		"as shipped, nothing rendered yet": {change: func(*policySet) {}},
		"filled, nothing rendered yet":     {change: filled},
		"filled as rendered":               {renders: true, change: filled},
		"rendered, and empty":              {renders: true, change: func(*policySet) {}, policy: name, problem: PolicyAltered},
		"rendered, and altered": {renders: true, change: func(s *policySet) {
			filled(s)
			policy, _ := find(s, name)
			policy.Validations = policy.Validations[:1]
		}, policy: name, problem: PolicyAltered},
		"deleted":             {change: without(name), policy: name, problem: PolicyMissing},
		"deleted, rendered":   {renders: true, change: without(name), policy: name, problem: PolicyMissing},
		"deleted, and off":    {off: true, change: without(name)},
		"no guard":            {change: without(guard), policy: guard, problem: PolicyMissing},
		"another may write":   {change: func(s *policySet) { p, _ := find(s, guard); p.Variables[0].Expression = "['admin']" }, policy: guard, problem: PolicyAltered},
		"movers of a move":    {change: func(s *policySet) { p, _ := find(s, guard); p.Variables[1].Expression = "['admin']" }},
		"a binding audits":    {change: func(s *policySet) { _, b := find(s, name); b.ValidationActions = b.ValidationActions[1:] }, policy: name, problem: PolicyNotDenying},
		"a binding elsewhere": {change: func(s *policySet) { _, b := find(s, name); b.PolicyName = guard }, policy: name, problem: PolicyAltered},
	} {
		set, err := revocationReleases[PoliciesAlone]()
		if err != nil {
			t.Fatal(err)
		}
		found := set.clone()
		c.change(found)
		check := &PolicyCheck{Scope: PoliciesAlone, User: shippedController}
		if !c.off {
			check.Rendered = func(asked string) *admissionv1.ValidatingAdmissionPolicySpec {
				if !c.renders || asked != name {
					return nil
				}
				rendered := set.clone()
				filled(rendered)
				policy, _ := find(rendered, name)
				return policy
			}
		}
		problems, err := check.compareRevocation(t.Context(), found.policies, found.bindings)
		switch {
		case err != nil:
			t.Errorf("%s: %v", title, err)
		case c.problem == "":
			if len(problems) > 0 {
				t.Errorf("%s: %v", title, problems)
			}
		case len(problems) != 1 || problems[0].Policy != c.policy || problems[0].Problem != c.problem:
			t.Errorf("%s: %v", title, problems)
		}
		if ours := check.isOurs(&set.policies[2]); ours == c.off {
			t.Errorf("%s: its content is kept: %v", title, ours)
		}
	}
	// Each flavour has the policies for its objects.
	for scope, want := range map[PolicyScope][2]int{PoliciesAlone: {12, 12}, PoliciesWorkload: {11, 11}, PoliciesManagement: {1, 1}} {
		if set, err := revocationReleases[scope](); err != nil || len(set.policies) != want[0] || len(set.bindings) != want[1] {
			t.Errorf("scope %d: %v", scope, err)
		}
	}
}

// The controller repairs an altered policy at once, so only what lasts is reported. A missing one
// is reported at once.
func TestAlterationsThatLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &PolicyWatch{}
		altered := PolicyProblem{"a", PolicyAltered, "validations"}
		missing := PolicyProblem{"b", PolicyMissing, "the policy is not there"}
		expect := func(given []PolicyProblem, pending bool, want ...PolicyProblem) {
			t.Helper()
			if got := w.lasting(given); !slices.Equal(got, want) || w.pending != pending {
				t.Errorf("%v, pending %v", got, w.pending)
			}
		}
		expect([]PolicyProblem{altered, missing}, true, missing)
		time.Sleep(alteredGrace - time.Second)
		expect([]PolicyProblem{altered}, true)
		time.Sleep(time.Second)
		expect([]PolicyProblem{altered}, false, altered)
		expect(nil, false)
		expect([]PolicyProblem{altered}, true) // altered again
	})
}

// In audit mode the controller approves nothing. So the policy that lets only controllers approve
// is a problem, if it is in force and names no other controller.
func TestPoliciesLockOutInAuditMode(t *testing.T) {
	for title, c := range map[string]struct {
		audit   bool
		others  []string
		change  func(*policySet)
		problem bool
	}{
		"audit":                    {audit: true, problem: true},
		"enforcement":              {},
		"another controller":       {audit: true, others: []string{"system:serviceaccount:acme:controller"}},
		"no policy":                {audit: true, change: func(s *policySet) { s.policies = nil }},
		"no binding":               {audit: true, change: func(s *policySet) { s.bindings = nil }},
		"the binding warns":        {audit: true, change: func(s *policySet) { setActions(s, admissionv1.Warn) }},
		"the policy names another": {audit: true, change: func(s *policySet) { s.policies[0].Spec.Variables[0].Expression = "['admin']" }},
	} {
		t.Run(title, func(t *testing.T) {
			set := release(t, PoliciesAlone).clone()
			if c.change != nil {
				c.change(set)
			}
			check := &PolicyCheck{Scope: PoliciesAlone, User: shippedController, Others: c.others, Audit: c.audit}
			problems, err := check.compare(t.Context(), set.policies, set.bindings)
			if err != nil || LocksOut(problems) != c.problem {
				t.Errorf("%v, %v", problems, err)
			}
		})
	}
}

func setActions(s *policySet, actions ...admissionv1.ValidationAction) {
	for i := range s.bindings {
		s.bindings[i].Spec.ValidationActions = actions
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

// Additional entries are allowed in these lists: they are harmless, or the operator's decision.
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
