// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"sync"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/packaging"
)

// PolicyScope selects the admission policies of the release that a cluster must have.
type PolicyScope int

// The kinds of clusters.
const (
	// PoliciesAlone are the policies of a cluster whose controller runs in it,
	// packaging/kubernetes.
	PoliciesAlone PolicyScope = iota + 1
	// PoliciesWorkload are the policies of a workload cluster, packaging/cluster-api/workload.
	PoliciesWorkload
	// PoliciesManagement are the policies of a management cluster,
	// packaging/cluster-api/management.
	PoliciesManagement
)

const (
	// labelScope is a label of each manifest. Its value says which kinds of Cluster API clusters
	// have the manifest.
	labelScope = "attestation.cluster.x-k8s.io/cluster-api"
	// labelFilled is a label of the policies whose content the controller writes.
	labelFilled = "attestation.cluster.x-k8s.io/filled-by"
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

// policySet are the policies and bindings of a release, in the order of the manifests.
type policySet struct {
	policies []admissionv1.ValidatingAdmissionPolicy
	bindings []admissionv1.ValidatingAdmissionPolicyBinding
}

// releases are parsed once.
var releases = map[PolicyScope]func() (*policySet, error){
	PoliciesAlone:    sync.OnceValues(func() (*policySet, error) { return parsePolicies("", packaging.Policies) }),
	PoliciesWorkload: sync.OnceValues(func() (*policySet, error) { return parsePolicies("workload", packaging.Policies) }),
	PoliciesManagement: sync.OnceValues(func() (*policySet, error) {
		return parsePolicies("management", packaging.Policies, packaging.ManagementPolicies)
	}),
}

// revocationReleases has the policies of packaging/kubernetes-revocation, by scope. They are parsed
// once.
var revocationReleases = map[PolicyScope]func() (*policySet, error){
	PoliciesAlone:      parseRevocation(""),
	PoliciesWorkload:   parseRevocation("workload"),
	PoliciesManagement: parseRevocation("management"),
}

func parseRevocation(scope string) func() (*policySet, error) {
	return sync.OnceValues(func() (*policySet, error) {
		return parsePolicies(scope, packaging.RevocationPolicies, packaging.RevocationGuards)
	})
}

// parsePolicies reads manifests, and keeps those with this value of the label, or "both". An empty
// value keeps all.
func parsePolicies(scope string, manifests ...[]byte) (*policySet, error) {
	set := &policySet{}
	for _, manifest := range manifests {
		documents := utilyaml.NewDocumentDecoder(io.NopCloser(bytes.NewReader(manifest)))
		content := make([]byte, len(manifest))
		for {
			n, err := documents.Read(content)
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return nil, fmt.Errorf("policies of the release: %w", err)
			}
			if err := set.add(scope, content[:n]); err != nil {
				return nil, fmt.Errorf("policies of the release: %w", err)
			}
		}
	}
	if len(set.policies) == 0 || len(set.bindings) == 0 {
		return nil, fmt.Errorf("policies of the release: there are none for %q", scope)
	}
	return set, nil
}

func (s *policySet) add(scope string, document []byte) error {
	var of metav1.PartialObjectMetadata
	if err := yaml.Unmarshal(document, &of); err != nil {
		return err
	}
	if label := of.Labels[labelScope]; scope != "" && label != scope && label != "both" {
		return nil
	}
	switch of.Kind {
	case "ValidatingAdmissionPolicy":
		var policy admissionv1.ValidatingAdmissionPolicy
		if err := yaml.UnmarshalStrict(document, &policy); err != nil {
			return err
		}
		s.policies = append(s.policies, policy)
	case "ValidatingAdmissionPolicyBinding":
		var binding admissionv1.ValidatingAdmissionPolicyBinding
		if err := yaml.UnmarshalStrict(document, &binding); err != nil {
			return err
		}
		s.bindings = append(s.bindings, binding)
	case "": // comments alone
	default:
		return fmt.Errorf("unexpected kind %s", of.Kind)
	}
	return nil
}

// compare compares the release's policies with those of a cluster, and returns the problems. The
// caller must not change the arguments meanwhile.
func (s *policySet) compare(policies []admissionv1.ValidatingAdmissionPolicy, bindings []admissionv1.ValidatingAdmissionPolicyBinding, controllers []string) (problems []PolicyProblem) {
	for i := range s.policies {
		want := &s.policies[i]
		at := slices.IndexFunc(policies, func(p admissionv1.ValidatingAdmissionPolicy) bool { return p.Name == want.Name })
		if at < 0 {
			problems = append(problems, PolicyProblem{want.Name, PolicyMissing, "the policy is not there"})
		} else if detail := specDifference(&want.Spec, &policies[at].Spec, controllers); detail != "" {
			problems = append(problems, PolicyProblem{want.Name, PolicyAltered, detail})
		}
	}
	for i := range s.bindings {
		want := &s.bindings[i]
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
			shipped, list := literals(w.Expression)
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
	found, ok := literals(expression)
	if !ok {
		return "variable " + name + ": is not a list of literals"
	}
	wanted := shipped
	if name == "controllers" {
		wanted = controllers
	}
	if !slices.Contains(extensible, name) {
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

// extensible has the lists that an overlay may extend. More entries in any other list might exempt
// somebody.
var extensible = []string{"signers", "bootstrappers", "movers"}

const literal = `(?:'[^'"\\]*'|"[^'"\\]*")`

var (
	listOfLiterals = regexp.MustCompile(`^\s*\[\s*(?:` + literal + `\s*(?:,\s*` + literal + `\s*)*,?\s*)?\]\s*$`)
	oneLiteral     = regexp.MustCompile(literal)
)

// literals returns the strings of a CEL list of plain string literals, and false for any other
// expression.
func literals(expression string) (all []string, ok bool) {
	if !listOfLiterals.MatchString(expression) {
		return nil, false
	}
	for _, quoted := range oneLiteral.FindAllString(expression, -1) {
		all = append(all, quoted[1:len(quoted)-1])
	}
	return all, true
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
	Scope PolicyScope
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
	release, err := c.release()
	if err != nil {
		return nil, err
	}
	user, err := c.user(ctx)
	if err != nil {
		return nil, err
	}
	problems := release.compare(policies, bindings, append([]string{user}, c.Others...))
	isProblem := func(p PolicyProblem) bool { return p.Policy == provenPolicy }
	if c.Audit && len(c.Others) == 0 && release.has(provenPolicy) && !slices.ContainsFunc(problems, isProblem) {
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
	want := &policySet{bindings: release.bindings}
	for _, p := range release.policies {
		if p.Labels[labelFilled] != "" {
			spec := c.Rendered(p.Name)
			if at := slices.IndexFunc(policies, func(found admissionv1.ValidatingAdmissionPolicy) bool { return found.Name == p.Name }); spec == nil && at >= 0 {
				spec = &policies[at].Spec
			}
			if spec != nil {
				p.Spec = *spec
			}
		}
		want.policies = append(want.policies, p)
	}
	return want.compare(policies, bindings, append([]string{user}, c.Others...)), nil
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

// release returns the policies that the cluster must have.
func (c *PolicyCheck) release() (*policySet, error) {
	parse := releases[c.Scope]
	if parse == nil {
		return nil, errors.New("admission policies: PolicyCheck.Scope is not set")
	}
	return parse()
}

// revocation returns the policies that the cluster must have for revocation, nil while that is off.
func (c *PolicyCheck) revocation() (*policySet, error) {
	parse := revocationReleases[c.Scope]
	if c.Rendered == nil || parse == nil {
		return nil, nil
	}
	return parse()
}

// isOurs reports whether a policy or a binding of that name is compared.
func (c *PolicyCheck) isOurs(object client.Object) bool {
	release, err := c.release()
	if err != nil {
		return false
	}
	revocation, err := c.revocation()
	return release.has(object.GetName()) || err == nil && revocation.has(object.GetName())
}

// has reports whether the set has a policy or a binding of that name.
func (s *policySet) has(name string) bool {
	return s != nil && (slices.ContainsFunc(s.policies, func(p admissionv1.ValidatingAdmissionPolicy) bool { return p.Name == name }) ||
		slices.ContainsFunc(s.bindings, func(b admissionv1.ValidatingAdmissionPolicyBinding) bool { return b.Name == name }))
}
