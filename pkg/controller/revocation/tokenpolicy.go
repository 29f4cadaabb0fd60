// SPDX-License-Identifier: Apache-2.0

package revocation

import (
	"fmt"
	"iter"
	"maps"
	"regexp"
	"slices"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

// TokenPolicyName is the name of the optional policy that refuses service account tokens of
// suspended nodes, and of its binding.
const TokenPolicyName = "node-attestation-suspended-tokens"

// MessageSuspendedToken is the API server's answer to a request with such a token. It must differ
// from the messages from which a node learns about its own certificate.
const MessageSuspendedToken = "the node that this token was issued for is suspended by an operator" //nolint:gosec // G101: prose about tokens

// ExtraNodeNames is the key in a requester's extra that has the node of its token. A requester
// cannot set it: the API server takes it from the signed token.
const ExtraNodeNames = "authentication.kubernetes.io/node-name"

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
			"  && request.userInfo.extra['%[1]s'].exists(value, value in %[2]s)", ExtraNodeNames, listOf(nodes))
	}
	constraints, conditions := match("suspended", condition)
	reason := metav1.StatusReasonForbidden
	return admissionv1.ValidatingAdmissionPolicySpec{
		FailurePolicy:    new(admissionv1.Fail),
		MatchConstraints: constraints, MatchConditions: conditions,
		Validations: []admissionv1.Validation{{Expression: "false", Message: MessageSuspendedToken, Reason: &reason}},
	}, omitted, nil
}

// SuspendedNodes returns the sorted names of suspended nodes, from suspensions, records and revoked
// certificates. A name is not suspended if the record of another machine has it: a machine can be
// replaced under its node name, and another cluster can have a node of the same name.
func SuspendedNodes(suspensions []v1alpha1.NodeSuspension, records []v1alpha1.NodeAttestation, revoked iter.Seq[v1alpha1.RevokedCertificate]) []string {
	suspended, names, taken := map[string]bool{}, map[string]bool{}, map[string]bool{}
	for _, s := range suspensions {
		suspended[s.Spec.EK] = true
		names[s.Spec.NodeName] = true
	}
	for i := range records {
		if suspended[ekOf(&records[i])] {
			names[records[i].Spec.NodeName] = true
		} else {
			taken[records[i].Spec.NodeName] = true
		}
	}
	for c := range revoked {
		if c.Suspended {
			names[c.NodeName] = true
		}
	}
	delete(names, "")
	for name := range taken {
		delete(names, name)
	}
	return slices.Sorted(maps.Keys(names))
}
