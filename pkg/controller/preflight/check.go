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
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/policyset"
)

// PolicyCheck checks whether the release's policies are in force in one cluster: through the API,
// or as static policies, which each API server reads from its own disk.
type PolicyCheck struct {
	// Scope says which policies the cluster has to have.
	Scope policyset.Scope
	// Client must not read from a cache.
	Client client.Client
	// Static asks the API servers for static policies. Optional: without it they do not count.
	Static *StaticProber
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

// PolicyState says whether the release's policies are in force in a cluster.
type PolicyState struct {
	// Problems say why they are not. Without problems they are.
	Problems []PolicyProblem
	// Consequence says what the problems permit, and Remedy what to do.
	Consequence, Remedy string
	// Where says in one line in which form the policies are there.
	Where string
	// Unknown says what is not known about static policies, such as those of an API server that
	// does not answer.
	Unknown []string
	// Forbidden says that the user may not ask for static policies. So there may be fewer problems.
	Forbidden bool

	static staticAnswers
}

// String returns the state in one line.
func (s *PolicyState) String() string {
	says, after := s.Where, ""
	if len(s.Problems) > 0 {
		says, after = describe(s.Problems), ". "+s.Consequence+": "+s.Remedy
	}
	return strings.Join(append([]string{says}, s.Unknown...), "; ") + after
}

const (
	consequenceApproval = "Requests can be approved without attestation"
	remedyAPI           = "apply the release's policies with your overlay (docs/controller-configuration.md)"
	remedyRevocation    = "apply packaging/kubernetes-revocation again with your overlay (docs/cluster-setup.md#revocation)"
	remedyStatic        = "write this release's file with node-attestation-controller policies --static, and copy it to each API server (docs/operations.md#static-policies-changed)"
)

// Check reads policies and bindings, and asks for static policies. It ignores those of revocation.
func (c *PolicyCheck) Check(ctx context.Context) (*PolicyState, error) {
	var policies admissionv1.ValidatingAdmissionPolicyList
	var bindings admissionv1.ValidatingAdmissionPolicyBindingList
	for _, list := range []client.ObjectList{&policies, &bindings} {
		if err := c.Client.List(ctx, list); err != nil {
			return nil, fmt.Errorf("admission policies: %w", err)
		}
	}
	return c.assess(ctx, policies.Items, bindings.Items)
}

// assess returns the state of a cluster whose API has these policies and bindings.
func (c *PolicyCheck) assess(ctx context.Context, policies []admissionv1.ValidatingAdmissionPolicy, bindings []admissionv1.ValidatingAdmissionPolicyBinding) (*PolicyState, error) {
	release, err := policyset.Release(c.Scope)
	if err != nil {
		return nil, err
	}
	controllers, err := c.controllers(ctx)
	if err != nil {
		return nil, err
	}

	// 1. The policies of the API hold on each API server.
	apiProblems := compare(release, policies, bindings, controllers)
	inAPI := len(apiProblems) == 0

	// 2. Static policies hold on the API servers that have them.
	static := c.Static.ask(ctx, inAPI)
	differences, err := static.differences(c.Scope, controllers)
	if err != nil {
		return nil, err
	}

	// 3. Each API server must have one of the forms. Of both, the stricter one decides.
	s := &PolicyState{static: static, Unknown: static.unknown(), Where: "the policies and their bindings are the release's"}
	switch {
	case inAPI && !static.anyHasStatic():
		s.Unknown = nil // static policies are not needed
	case inAPI:
		s.Where += "; " + static.describe()
		s.Problems = differences
		s.Consequence, s.Remedy = "The API server evaluates both forms, and refuses what one of them refuses", remedyStatic
	case static.unreached():
		return nil, fmt.Errorf("policies in the API are missing or altered, and no API server answered whether it has static policies: %s", strings.Join(s.Unknown, "; "))
	case !static.anyHasStatic():
		s.Problems, s.Forbidden = apiProblems, static.forbidden()
		s.Consequence, s.Remedy = consequenceApproval, remedyAPI
	default:
		s.Where = "the policies are the release's; " + static.describe()
		s.Problems = append(static.lacking(), differences...)
		s.Consequence, s.Remedy = consequenceApproval, remedyStatic
	}

	// 4. In audit mode, nobody approves if the policies let only this controller.
	approvalInAPI := !slices.ContainsFunc(apiProblems, func(p PolicyProblem) bool { return p.Policy == approvalPolicy })
	if c.Audit && len(c.Others) == 0 && release.Has(approvalPolicy) && (approvalInAPI || static.anyNames(controllers)) {
		s.Problems = append(s.Problems, PolicyProblem{approvalPolicy, PolicyLocksOut, "only the controller may approve, and in audit mode it approves nothing"})
	}
	return s, nil
}

// LocksOut reports whether one of the problems keeps every node from getting a certificate.
func LocksOut(problems []PolicyProblem) bool {
	return slices.ContainsFunc(problems, func(p PolicyProblem) bool { return p.Problem == PolicyLocksOut })
}

// LockOutRemedy says what to do about PolicyLocksOut.
const LockOutRemedy = "to enforce, end audit mode; to stay in it, delete this cluster's admission policies of the release, such as by kubectl delete --filename=packaging/kubernetes/policies.yaml, and static policies on each API server (docs/adopting.md)"

// assessRevocation returns the problems of the policies of revocation. state is that of assess.
func (c *PolicyCheck) assessRevocation(ctx context.Context, state *PolicyState, policies []admissionv1.ValidatingAdmissionPolicy, bindings []admissionv1.ValidatingAdmissionPolicyBinding) ([]PolicyProblem, error) {
	release, err := c.revocation()
	if release == nil || err != nil {
		return nil, err
	}
	controllers, err := c.controllers(ctx)
	if err != nil {
		return nil, err
	}
	guarded, err := state.static.guardRevocation(c.Scope)
	if err != nil {
		return nil, err
	}
	want := &policyset.Set{}
	for _, p := range release.Policies {
		switch filled := policyset.IsFilled(&p); {
		case !filled && guarded:
			continue // each API server has it as a static policy
		case filled:
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
	for _, b := range release.Bindings {
		if want.Has(b.Spec.PolicyName) {
			want.Bindings = append(want.Bindings, b)
		}
	}
	return compare(want, policies, bindings, controllers), nil
}

// controllers returns the users that the policies must name.
func (c *PolicyCheck) controllers(ctx context.Context) ([]string, error) {
	if c.User != "" {
		return append([]string{c.User}, c.Others...), nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.self == "" {
		review := &authenticationv1.SelfSubjectReview{}
		if err := c.Client.Create(ctx, review); err != nil {
			return nil, fmt.Errorf("user name of the controller: %w", err)
		}
		c.self = review.Status.UserInfo.Username
	}
	return append([]string{c.self}, c.Others...), nil
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
