// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

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

// PolicyCheck compares the admission policies of one cluster with the release's.
type PolicyCheck struct {
	// Scope says which policies the cluster has to have.
	Scope policyset.Scope
	// Client must not read from a cache.
	Client client.Client
	// User is the user that the policies name as the controller. Default: the user of Client, by a
	// SelfSubjectReview, which every authenticated user may create by default.
	User string
	// Others are the other controllers that the policies name.
	Others []string
	// Audit says that the controller is in audit mode: a policy that lets only it approve is then a
	// problem. Optional.
	Audit bool
	// Rendered returns the spec that the controller last rendered for a policy of revoked
	// certificates. If it returns nil, the policy must exist, and its content is not compared.
	//
	// Rendered is nil while revocation is off. Then its policies are ignored. A PolicyWatch reports
	// their problems. Check does not, since enforcement of attestation does not depend on them.
	Rendered func(name string) *admissionv1.ValidatingAdmissionPolicySpec

	mu   sync.Mutex
	self string
}

// Check reads policies and bindings, and returns their problems. It ignores those of revocation.
func (c *PolicyCheck) Check(ctx context.Context) ([]PolicyProblem, error) {
	var policies admissionv1.ValidatingAdmissionPolicyList
	var bindings admissionv1.ValidatingAdmissionPolicyBindingList
	for _, list := range []client.ObjectList{&policies, &bindings} {
		if err := c.Client.List(ctx, list); err != nil {
			return nil, fmt.Errorf("admission policies: %w", err)
		}
	}
	return c.compare(ctx, policies.Items, bindings.Items)
}

func (c *PolicyCheck) compare(ctx context.Context, policies []admissionv1.ValidatingAdmissionPolicy, bindings []admissionv1.ValidatingAdmissionPolicyBinding) ([]PolicyProblem, error) {
	release, err := policyset.Release(c.Scope)
	if err != nil {
		return nil, err
	}
	user, err := c.user(ctx)
	if err != nil {
		return nil, err
	}
	problems := compare(release, policies, bindings, append([]string{user}, c.Others...))
	isProblem := func(p PolicyProblem) bool { return p.Policy == provenPolicy }
	if c.Audit && len(c.Others) == 0 && release.Has(provenPolicy) && !slices.ContainsFunc(problems, isProblem) {
		problems = append(problems, PolicyProblem{provenPolicy, PolicyLocksOut, "only the controller may approve, and in audit mode it approves nothing"})
	}
	return problems, nil
}

// LocksOut reports whether one of the problems keeps every node from getting a certificate.
func LocksOut(problems []PolicyProblem) bool {
	return slices.ContainsFunc(problems, func(p PolicyProblem) bool { return p.Problem == PolicyLocksOut })
}

// LockOutRemedy says what to do about PolicyLocksOut.
const LockOutRemedy = "to enforce, end audit mode; to stay in it, delete this cluster's admission policies of the release, such as by kubectl delete --filename=packaging/kubernetes/policies.yaml (docs/adopting.md)"

// compareRevocation returns the problems of the policies of revocation.
func (c *PolicyCheck) compareRevocation(ctx context.Context, policies []admissionv1.ValidatingAdmissionPolicy, bindings []admissionv1.ValidatingAdmissionPolicyBinding) ([]PolicyProblem, error) {
	release, err := c.revocation()
	if release == nil || err != nil {
		return nil, err
	}
	user, err := c.user(ctx)
	if err != nil {
		return nil, err
	}
	want := &policyset.Set{Bindings: release.Bindings}
	for _, p := range release.Policies {
		if policyset.IsFilled(&p) {
			spec := c.Rendered(p.Name)
			if at := slices.IndexFunc(policies, func(found admissionv1.ValidatingAdmissionPolicy) bool { return found.Name == p.Name }); spec == nil && at >= 0 {
				spec = &policies[at].Spec
			}
			if spec != nil {
				p.Spec = *spec
			}
		}
		want.Policies = append(want.Policies, p)
	}
	return compare(want, policies, bindings, append([]string{user}, c.Others...)), nil
}

// user returns the user that the policies must name.
func (c *PolicyCheck) user(ctx context.Context) (string, error) {
	if c.User != "" {
		return c.User, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.self == "" {
		review := &authenticationv1.SelfSubjectReview{}
		if err := c.Client.Create(ctx, review); err != nil {
			return "", fmt.Errorf("user name of the controller: %w", err)
		}
		c.self = review.Status.UserInfo.Username
	}
	return c.self, nil
}

// revocation returns the policies that the cluster must have for revocation, nil while that is off.
func (c *PolicyCheck) revocation() (*policyset.Set, error) {
	if c.Rendered == nil {
		return nil, nil
	}
	return policyset.Revocation(c.Scope)
}

// isOurs reports whether a policy or a binding of that name is compared.
func (c *PolicyCheck) isOurs(object client.Object) bool {
	release, err := policyset.Release(c.Scope)
	if err != nil {
		return false
	}
	revocation, err := c.revocation()
	return release.Has(object.GetName()) || err == nil && revocation.Has(object.GetName())
}
