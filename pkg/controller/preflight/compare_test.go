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

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/policyset"
)

const shippedController = "system:serviceaccount:node-attestation-system:node-attestation-controller"

func release(t *testing.T, scope policyset.Scope) *policyset.Set {
	t.Helper()
	set, err := policyset.Release(scope)
	if err != nil {
		t.Fatal(err)
	}
	return set
}

// A release is equal to itself.
func TestReleaseIsItself(t *testing.T) {
	for _, scope := range []policyset.Scope{policyset.Alone, policyset.Workload, policyset.Management} {
		set := release(t, scope)
		if problems := compare(set, set.Policies, set.Bindings, []string{shippedController}); len(problems) > 0 {
			t.Errorf("scope %s is not itself: %v", scope, problems)
		}
	}
}

// Each change that makes a policy refuse less is a problem. Changes that an overlay may make are
// not.
func TestPoliciesAreCompared(t *testing.T) {
	const name = "node-attestation-approval"
	policy := func(change func(*admissionv1.ValidatingAdmissionPolicySpec)) func(*policyset.Set) {
		return func(s *policyset.Set) {
			change(&s.Policies[slices.IndexFunc(s.Policies, func(p admissionv1.ValidatingAdmissionPolicy) bool { return p.Name == name })].Spec)
		}
	}
	binding := func(change func(*admissionv1.ValidatingAdmissionPolicyBindingSpec)) func(*policyset.Set) {
		return func(s *policyset.Set) {
			change(&s.Bindings[slices.IndexFunc(s.Bindings, func(b admissionv1.ValidatingAdmissionPolicyBinding) bool { return b.Name == name })].Spec)
		}
	}
	list := func(variable int, change func(string) string) func(*policyset.Set) {
		return policy(func(p *admissionv1.ValidatingAdmissionPolicySpec) {
			p.Variables[variable].Expression = change(p.Variables[variable].Expression)
		})
	}
	type spec = *admissionv1.ValidatingAdmissionPolicySpec
	type bindingSpec = *admissionv1.ValidatingAdmissionPolicyBindingSpec
	only := metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}
	for title, c := range map[string]struct {
		change  func(*policyset.Set)
		problem string
		says    string
	}{
		"as it is":                {func(*policyset.Set) {}, "", ""},
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
		"no policy":             {func(s *policyset.Set) { s.Policies = s.Policies[1:] }, PolicyMissing, "policy is not there"},
		"no binding":            {func(s *policyset.Set) { s.Bindings = s.Bindings[1:] }, PolicyMissing, "its binding"},
		"audits only":           {binding(func(b bindingSpec) { b.ValidationActions = []admissionv1.ValidationAction{admissionv1.Audit} }), PolicyNotDenying, "Deny"},
		"warns only":            {binding(func(b bindingSpec) { b.ValidationActions = []admissionv1.ValidationAction{admissionv1.Warn} }), PolicyNotDenying, "Deny"},
		"another policy's":      {binding(func(b bindingSpec) { b.PolicyName = "node-attestation-size" }), PolicyAltered, "another policy"},
		"a paramRef":            {binding(func(b bindingSpec) { b.ParamRef = &admissionv1.ParamRef{Name: "a"} }), PolicyAltered, "paramRef"},
		"a narrowed binding":    {binding(func(b bindingSpec) { b.MatchResources = &admissionv1.MatchResources{ObjectSelector: &only} }), PolicyAltered, "matchResources"},
		"a binding's namespace": {binding(func(b bindingSpec) { b.MatchResources = &admissionv1.MatchResources{NamespaceSelector: &only} }), PolicyAltered, "matchResources"},
	} {
		want := release(t, policyset.Alone)
		got := want.Clone()
		c.change(got)
		problems := compare(want, got.Policies, got.Bindings, []string{shippedController})
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
	want := release(t, policyset.Alone)
	if problems := compare(want, want.Policies, want.Bindings, []string{shippedController, "another"}); len(problems) != len(want.Policies) {
		t.Errorf("one of two controllers is not named: %v", problems)
	}
}

// The policies of revocation are compared while revocation is enabled. They must equal what the
// controller last rendered, if it has rendered them.
func TestRevocationPoliciesAreCompared(t *testing.T) {
	const name, guard = "node-attestation-revoked-03", "node-attestation-revocation-slices"
	type change func(*policyset.Set)
	find := func(s *policyset.Set, name string) (*admissionv1.ValidatingAdmissionPolicySpec, *admissionv1.ValidatingAdmissionPolicyBindingSpec) {
		return &s.Policies[slices.IndexFunc(s.Policies, func(p admissionv1.ValidatingAdmissionPolicy) bool { return p.Name == name })].Spec,
			&s.Bindings[slices.IndexFunc(s.Bindings, func(b admissionv1.ValidatingAdmissionPolicyBinding) bool { return b.Name == name })].Spec
	}
	filled := func(s *policyset.Set) {
		policy, _ := find(s, name)
		policy.MatchConditions[0].Expression = "true"
	}
	without := func(name string) change {
		return func(s *policyset.Set) {
			s.Policies = slices.DeleteFunc(s.Policies, func(p admissionv1.ValidatingAdmissionPolicy) bool { return p.Name == name })
		}
	}
	for title, c := range map[string]struct {
		off, renders bool
		change       change
		policy       string
		problem      string
	}{
		"as shipped, nothing rendered yet": {change: func(*policyset.Set) {}},
		"filled, nothing rendered yet":     {change: filled},
		"filled as rendered":               {renders: true, change: filled},
		"rendered, and empty":              {renders: true, change: func(*policyset.Set) {}, policy: name, problem: PolicyAltered},
		"rendered, and altered": {renders: true, change: func(s *policyset.Set) {
			filled(s)
			policy, _ := find(s, name)
			policy.Validations = policy.Validations[:1]
		}, policy: name, problem: PolicyAltered},
		"deleted":             {change: without(name), policy: name, problem: PolicyMissing},
		"deleted, rendered":   {renders: true, change: without(name), policy: name, problem: PolicyMissing},
		"deleted, and off":    {off: true, change: without(name)},
		"no guard":            {change: without(guard), policy: guard, problem: PolicyMissing},
		"another may write":   {change: func(s *policyset.Set) { p, _ := find(s, guard); p.Variables[0].Expression = "['admin']" }, policy: guard, problem: PolicyAltered},
		"movers of a move":    {change: func(s *policyset.Set) { p, _ := find(s, guard); p.Variables[1].Expression = "['admin']" }},
		"a binding audits":    {change: func(s *policyset.Set) { _, b := find(s, name); b.ValidationActions = b.ValidationActions[1:] }, policy: name, problem: PolicyNotDenying},
		"a binding elsewhere": {change: func(s *policyset.Set) { _, b := find(s, name); b.PolicyName = guard }, policy: name, problem: PolicyAltered},
	} {
		set, err := policyset.Revocation(policyset.Alone)
		if err != nil {
			t.Fatal(err)
		}
		found := set.Clone()
		c.change(found)
		check := &PolicyCheck{Scope: policyset.Alone, User: shippedController}
		if !c.off {
			check.Rendered = func(asked string) *admissionv1.ValidatingAdmissionPolicySpec {
				if !c.renders || asked != name {
					return nil
				}
				rendered := set.Clone()
				filled(rendered)
				policy, _ := find(rendered, name)
				return policy
			}
		}
		problems, err := check.assessRevocation(t.Context(), &PolicyState{}, found.Policies, found.Bindings)
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
		if ours := check.isOurs(&set.Policies[2]); ours == c.off {
			t.Errorf("%s: its content is kept: %v", title, ours)
		}
	}
	// Each flavour has the policies for its objects.
	for scope, want := range map[policyset.Scope][2]int{policyset.Alone: {12, 12}, policyset.Workload: {11, 11}, policyset.Management: {1, 1}} {
		if set, err := policyset.Revocation(scope); err != nil || len(set.Policies) != want[0] || len(set.Bindings) != want[1] {
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
