// SPDX-License-Identifier: Apache-2.0

package revocation

import (
	"fmt"
	"regexp"
	"slices"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TokenPolicyName is the name of the optional policy that refuses service account tokens of
// suspended nodes, and of its binding.
const TokenPolicyName = "node-attestation-suspended-tokens"

// messageSuspendedToken is what a write with such a token is answered. It is not one of those that
// tell a node about its own certificate.
const messageSuspendedToken = "the node that this token was issued for is suspended by an operator" //nolint:gosec // G101: prose about tokens

// tokenNodeNames is where the API server puts the node of a token. Users cannot set it: a token has
// it in its signed content.
const tokenNodeNames = "authentication.kubernetes.io/node-name"

// tokenNamesLimit is how many code points the list of node names may have. An expression may have
// 100,000.
const tokenNamesLimit = 99_000

var nodeNamePattern = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$`)

// RenderTokenPolicy returns the policy that refuses the writes of tokens that were issued for pods
// on these nodes, or for these nodes. The names are literals, as in RenderPolicy.
//
// Omitted are the names for which there is no room. At least 380 names fit, and some 4,500 of 19
// characters.
func RenderTokenPolicy(nodes []string) (spec admissionv1.ValidatingAdmissionPolicySpec, omitted []string, err error) {
	nodes = slices.Compact(slices.Sorted(slices.Values(nodes)))
	length, fit := 0, 0
	for i, name := range nodes {
		if !nodeNamePattern.MatchString(name) {
			return spec, nil, fmt.Errorf("%.80q is no name of a node", name)
		}
		if length += len(name) + len("'',"); length <= tokenNamesLimit {
			fit = i + 1
		}
	}
	nodes, omitted = nodes[:fit], nodes[fit:]
	constraints, conditions := match("suspended", tokenNodeNames, nodes)
	reason := metav1.StatusReasonForbidden
	return admissionv1.ValidatingAdmissionPolicySpec{
		FailurePolicy:    new(admissionv1.Fail),
		MatchConstraints: constraints, MatchConditions: conditions,
		Validations: []admissionv1.Validation{{Expression: "false", Message: messageSuspendedToken, Reason: &reason}},
	}, omitted, nil
}
