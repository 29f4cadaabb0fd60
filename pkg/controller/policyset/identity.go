// SPDX-License-Identifier: Apache-2.0

package policyset

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// IdentityName is the name of the identity policy: the static policy by which an API server says
// which static policies it has. It refuses, to everybody, a condition of the type ConditionStatic
// on a Namespace's status. So one write in a dry run is enough to ask. Nobody ever writes that
// condition.
const IdentityName = "node-attestation-static" + Suffix

// ConditionStatic is the type of that condition.
const ConditionStatic corev1.NamespaceConditionType = "NodeAttestationStaticPolicies"

// Identity is what the identity policy's message says about the static policies of an API server.
type Identity struct {
	// Digest is the SHA-256 of the policies' file without the identity policy. API servers with
	// the same digest have the same file.
	Digest string `json:"digest"`
	// Release is what ReleaseDigest returns for the release that made the file.
	Release string `json:"release"`
	// Controllers are the users that the policies name as controllers.
	Controllers []string `json:"controllers"`
	// Scope is the name of the Scope.
	Scope string `json:"scope"`
}

const identityPrefix = "static policies of node-attestation-controller: "

// message returns the message of the identity policy's refusal, in one line.
func (id Identity) message() (string, error) {
	content, err := json.Marshal(id)
	return identityPrefix + string(content), err
}

// identityRefusal is an API server's refusal by the identity policy. The start matters: the
// message of another policy or of a webhook may contain any text. The API server reserves the
// names with Suffix for policies from its disk.
var identityRefusal = regexp.MustCompile(`^namespaces "[^"]*" is forbidden: ValidatingAdmissionPolicy '` + regexp.QuoteMeta(IdentityName) +
	`' with binding '` + regexp.QuoteMeta(IdentityName) + `' denied request: ` + regexp.QuoteMeta(identityPrefix) + `(\{.*\})$`)

// ParseRefusal returns the identity in an API server's answer to a write of ConditionStatic. It
// returns false if another check answered, or none. Then the API server has no static form, or the
// write did not reach its policies.
func ParseRefusal(err error) (Identity, bool) {
	status := apierrors.APIStatus(nil)
	if !apierrors.IsForbidden(err) || !errors.As(err, &status) {
		return Identity{}, false
	}
	match := identityRefusal.FindStringSubmatch(status.Status().Message)
	if match == nil {
		return Identity{}, false
	}
	var id Identity
	if json.Unmarshal([]byte(match[1]), &id) != nil || id.Digest == "" {
		return Identity{}, false
	}
	return id, true
}

// policy returns the identity policy and its binding.
func (id Identity) policy() (policy admissionv1.ValidatingAdmissionPolicy, binding admissionv1.ValidatingAdmissionPolicyBinding, err error) {
	message, err := id.message()
	if err != nil {
		return policy, binding, err
	}
	policy.Name, binding.Name = IdentityName, IdentityName
	reason := metav1.StatusReasonForbidden
	policy.Spec = admissionv1.ValidatingAdmissionPolicySpec{
		FailurePolicy: new(admissionv1.Fail),
		MatchConstraints: &admissionv1.MatchResources{
			MatchPolicy: new(admissionv1.Equivalent),
			ResourceRules: []admissionv1.NamedRuleWithOperations{{RuleWithOperations: admissionv1.RuleWithOperations{
				Operations: []admissionv1.OperationType{admissionv1.Update},
				Rule:       admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"*"}, Resources: []string{"namespaces/status"}},
			}}},
		},
		Validations: []admissionv1.Validation{{
			Expression: fmt.Sprintf("!has(object.status) || !has(object.status.conditions)\n  || !object.status.conditions.exists(c, c.type == '%s')", ConditionStatic),
			Message:    message,
			Reason:     &reason,
		}},
	}
	binding.Spec = admissionv1.ValidatingAdmissionPolicyBindingSpec{PolicyName: IdentityName, ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny}}
	return policy, binding, nil
}
