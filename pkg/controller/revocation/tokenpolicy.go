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

// messageSuspendedToken is the API server's answer to a write with such a token. It must differ
// from the messages from which a node learns about its own certificate.
const messageSuspendedToken = "the node that this token was issued for is suspended by an operator" //nolint:gosec // G101: prose about tokens

// tokenNodeNames is the key in a requester's extra that has the node of its token. A requester
// cannot set it: the API server takes it from the signed token.
const tokenNodeNames = "authentication.kubernetes.io/node-name"

var nodeNamePattern = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$`)

// RenderTokenPolicy returns the policy that refuses writes with tokens that were issued for these
// nodes, or for pods on them. The names are literals, as in RenderPolicy.
//
// omitted has the names for which there is no room. At least 380 names fit, and some 4,500 of 19
// characters.
func RenderTokenPolicy(nodes []string) (spec admissionv1.ValidatingAdmissionPolicySpec, omitted []string, err error) {
	nodes = slices.Compact(slices.Sorted(slices.Values(nodes)))
	length, fit := 0, 0
	for i, name := range nodes {
		if !nodeNamePattern.MatchString(name) {
			return spec, nil, fmt.Errorf("%.80q is no name of a node", name)
		}
		if length += len(name) + len("'',"); length <= maxNames {
			fit = i + 1
		}
	}
	nodes, omitted = nodes[:fit], nodes[fit:]
	condition := ""
	if len(nodes) > 0 {
		// An expression that fails refuses the write, so the key is checked first. Users of
		// bootstrap tokens have no extra.
		condition = fmt.Sprintf("has(request.userInfo.extra) && '%[1]s' in request.userInfo.extra\n"+
			"  && request.userInfo.extra['%[1]s'].exists(value, value in %[2]s)", tokenNodeNames, listOf(nodes))
	}
	constraints, conditions := match("suspended", condition)
	reason := metav1.StatusReasonForbidden
	return admissionv1.ValidatingAdmissionPolicySpec{
		FailurePolicy:    new(admissionv1.Fail),
		MatchConstraints: constraints, MatchConditions: conditions,
		Validations: []admissionv1.Validation{{Expression: "false", Message: messageSuspendedToken, Reason: &reason}},
	}, omitted, nil
}
