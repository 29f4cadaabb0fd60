// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"fmt"
	"slices"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/policyset"
)

// The problems that a policy can have.
const (
	// PolicyMissing says that the policy or its binding does not exist.
	PolicyMissing = "Missing"
	// PolicyAltered says that the policy or its binding differs from the release.
	PolicyAltered = "Altered"
	// PolicyNotDenying says that the binding only warns or audits.
	PolicyNotDenying = "NotDenying"
	// PolicyNotEffective says that the API server accepted a write that the policy refuses,
	// although the objects are right.
	PolicyNotEffective = "NotEffective"
	// PolicyLocksOut says that the policy lets only the controller approve, and that the controller
	// is in audit mode. So nobody can approve, and no node gets a certificate.
	PolicyLocksOut = "LocksOut"
)

// PolicyProblem says why a policy is not in force.
type PolicyProblem struct {
	Policy string
	// Problem is one of the constants above. Detail says what differs.
	Problem, Detail string
}

func (p PolicyProblem) String() string {
	return fmt.Sprintf("%s: %s: %s", p.Policy, p.Problem, p.Detail)
}

// describe returns problems in one line.
func describe(problems []PolicyProblem) string {
	all := make([]string, len(problems))
	for i, p := range problems {
		all[i] = p.String()
	}
	return strings.Join(all, "; ")
}

// compare compares the release's policies with those of a cluster, and returns the problems. The
// caller must not change the arguments meanwhile.
func compare(release *policyset.Set, policies []admissionv1.ValidatingAdmissionPolicy, bindings []admissionv1.ValidatingAdmissionPolicyBinding, controllers []string) (problems []PolicyProblem) {
	for i := range release.Policies {
		want := &release.Policies[i]
		at := slices.IndexFunc(policies, func(p admissionv1.ValidatingAdmissionPolicy) bool { return p.Name == want.Name })
		if at < 0 {
			problems = append(problems, PolicyProblem{want.Name, PolicyMissing, "the policy is not there"})
		} else if detail := specDifference(&want.Spec, &policies[at].Spec, controllers); detail != "" {
			problems = append(problems, PolicyProblem{want.Name, PolicyAltered, detail})
		}
	}
	for i := range release.Bindings {
		want := &release.Bindings[i]
		at := slices.IndexFunc(bindings, func(b admissionv1.ValidatingAdmissionPolicyBinding) bool { return b.Name == want.Name })
		if at < 0 {
			problems = append(problems, PolicyProblem{want.Spec.PolicyName, PolicyMissing, "its binding " + want.Name + " is not there"})
		} else if problem, detail := bindingProblem(&want.Spec, &bindings[at].Spec); problem != "" {
			problems = append(problems, PolicyProblem{want.Spec.PolicyName, problem, "its binding " + want.Name + ": " + detail})
		}
	}
	return problems
}

// specDifference returns how a policy differs from the release's, "" if it does not. Overlays may
// change some lists of names in variables. The controllers must be exactly those given. An
// extensible list must have at least the release's entries.
func specDifference(want, got *admissionv1.ValidatingAdmissionPolicySpec, controllers []string) string {
	want, got = defaulted(want), defaulted(got)
	if len(want.Variables) == len(got.Variables) {
		for i := range want.Variables {
			w, g := &want.Variables[i], &got.Variables[i]
			shipped, list := policyset.Literals(w.Expression)
			if w.Name != g.Name || !list {
				continue
			}
			if detail := listDifference(w.Name, shipped, g.Expression, controllers); detail != "" {
				return detail
			}
			g.Expression = w.Expression
		}
	}
	for _, field := range []struct {
		name      string
		want, got any
	}{
		{"failurePolicy", want.FailurePolicy, got.FailurePolicy},
		{"matchConstraints", want.MatchConstraints, got.MatchConstraints},
		{"matchConditions", want.MatchConditions, got.MatchConditions},
		{"paramKind", want.ParamKind, got.ParamKind},
		{"variables", want.Variables, got.Variables},
		{"validations", want.Validations, got.Validations},
		{"the rest of its spec", want, got},
	} {
		if !equality.Semantic.DeepEqual(field.want, field.got) {
			return field.name + ": not the release's"
		}
	}
	return ""
}

// listDifference returns what is wrong with an expression where the release has a list of literals.
func listDifference(name string, shipped []string, expression string, controllers []string) string {
	found, ok := policyset.Literals(expression)
	if !ok {
		return "variable " + name + ": is not a list of literals"
	}
	wanted := shipped
	if policyset.IsControllers(name) {
		wanted = controllers
	}
	if !policyset.IsExtensible(name) {
		for _, n := range found {
			if !slices.Contains(wanted, n) {
				return fmt.Sprintf("variable %s: has %.128q, which is not configured", name, n)
			}
		}
	}
	for _, n := range wanted {
		if !slices.Contains(found, n) {
			return fmt.Sprintf("variable %s: lacks %.128q", name, n)
		}
	}
	return ""
}

// defaulted returns a copy as the API server stores it, with what is left out set to its default.
func defaulted(spec *admissionv1.ValidatingAdmissionPolicySpec) *admissionv1.ValidatingAdmissionPolicySpec {
	spec = spec.DeepCopy()
	if spec.FailurePolicy == nil {
		spec.FailurePolicy = new(admissionv1.Fail)
	}
	spec.MatchConstraints = defaultedMatch(spec.MatchConstraints)
	return spec
}

func defaultedMatch(match *admissionv1.MatchResources) *admissionv1.MatchResources {
	if match == nil {
		match = &admissionv1.MatchResources{}
	}
	if match.MatchPolicy == nil {
		match.MatchPolicy = new(admissionv1.Equivalent)
	}
	if match.NamespaceSelector == nil {
		match.NamespaceSelector = &metav1.LabelSelector{}
	}
	if match.ObjectSelector == nil {
		match.ObjectSelector = &metav1.LabelSelector{}
	}
	for _, rules := range [][]admissionv1.NamedRuleWithOperations{match.ResourceRules, match.ExcludeResourceRules} {
		for i := range rules {
			if rules[i].Scope == nil {
				rules[i].Scope = new(admissionv1.AllScopes)
			}
		}
	}
	return match
}

// bindingProblem returns why a policy refuses less with this binding than with the release's. More
// actions than Deny do no harm.
func bindingProblem(want, got *admissionv1.ValidatingAdmissionPolicyBindingSpec) (problem, detail string) {
	everything := defaultedMatch(nil)
	switch {
	case got.PolicyName != want.PolicyName:
		return PolicyAltered, "is of another policy"
	case got.ParamRef != nil:
		return PolicyAltered, "has a paramRef"
	case !equality.Semantic.DeepEqual(defaultedMatch(got.MatchResources.DeepCopy()), everything):
		return PolicyAltered, "matchResources: does not hold for everything"
	case !slices.Contains(got.ValidationActions, admissionv1.Deny):
		return PolicyNotDenying, "validationActions: lack Deny"
	}
	return "", ""
}
