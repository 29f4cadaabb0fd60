// SPDX-License-Identifier: Apache-2.0

package revocation

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

const (
	// Policies is the number of admission policies for revoked certificates in a release.
	Policies = 10
	// SliceCapacity is the maximum number of certificates on one list and in its policy. An
	// expression has at most 100,000 code points (apiserver/pkg/cel), and a fingerprint takes 79.
	SliceCapacity = 1000
)

// PolicyName returns the name of the policy for the list of that number, and of the policy's
// binding.
func PolicyName(number int32) string { return fmt.Sprintf("node-attestation-revoked-%02d", number) }

// credentialIDs is the key in a requester's extra that has the fingerprint of its client
// certificate, since Kubernetes 1.32.
const credentialIDs = "authentication.kubernetes.io/credential-id"

var (
	fingerprintPattern = regexp.MustCompile(`^[0-9a-f]{64}$`)
	signerPattern      = regexp.MustCompile(`^[-a-z0-9.]+/[-A-Za-z0-9._:]+$`)
)

// RenderPolicy returns the policy that refuses writes with these certificates. A certificate that
// is not suspended may still create CertificateSigningRequests for these signers, so that the
// machine can get a new certificate by its evidence.
//
// The fingerprints are literals. A policy with a parameter object refuses every write of the
// cluster while that object is missing, or fails open.
//
// Without certificates, the policy matches no resource, and the API server does not evaluate it.
func RenderPolicy(certificates []v1alpha1.RevokedCertificate, signers []string) (admissionv1.ValidatingAdmissionPolicySpec, error) {
	var all, suspended []string
	for _, c := range certificates {
		if !fingerprintPattern.MatchString(c.SHA256) {
			return admissionv1.ValidatingAdmissionPolicySpec{}, fmt.Errorf("%.80q is no fingerprint", c.SHA256)
		}
		all = append(all, "X509SHA256="+c.SHA256)
		if c.Suspended {
			suspended = append(suspended, "X509SHA256="+c.SHA256)
		}
	}
	for _, signer := range signers {
		if !signerPattern.MatchString(signer) {
			return admissionv1.ValidatingAdmissionPolicySpec{}, fmt.Errorf("%.80q is no signer", signer)
		}
	}
	constraints, conditions := match("revoked", credentialIDs, all)
	reason := metav1.StatusReasonForbidden
	return admissionv1.ValidatingAdmissionPolicySpec{
		FailurePolicy:    new(admissionv1.Fail),
		MatchConstraints: constraints, MatchConditions: conditions,
		Variables: []admissionv1.Variable{
			{Name: "suspended", Expression: extraIn(credentialIDs, suspended)},
			// This exception is safe: the controller decides by evidence, and issues certificates
			// only for the machine's own node name.
			{Name: "attesting", Expression: "request.operation == 'CREATE' && (!has(request.subResource) || request.subResource == '')\n" +
				"  && request.resource.group == 'certificates.k8s.io' && request.resource.resource == 'certificatesigningrequests'\n" +
				"  && object.spec.signerName in " + listOf(signers)},
		},
		Validations: []admissionv1.Validation{
			{Expression: "!variables.suspended", Message: attestation.MessageSuspended, Reason: &reason},
			{Expression: "variables.suspended || variables.attesting", Message: attestation.MessageRevoked, Reason: &reason},
		},
	}, nil
}

// match returns the constraints of a policy that matches each write by a requester with one of the
// values under a key of its extra. Without values it matches no resource. Defaults are set, so that
// the result equals what the API server stores.
func match(name, key string, values []string) (*admissionv1.MatchResources, []admissionv1.MatchCondition) {
	rule := admissionv1.Rule{APIGroups: []string{"*"}, APIVersions: []string{"*"}, Resources: []string{"*/*"}, Scope: new(admissionv1.AllScopes)}
	operations := []admissionv1.OperationType{admissionv1.Create, admissionv1.Update, admissionv1.Delete, admissionv1.Connect}
	// An expression that fails refuses the write, so the key is checked first. Users of bootstrap
	// tokens have no extra.
	condition := fmt.Sprintf("has(request.userInfo.extra) && '%s' in request.userInfo.extra\n  && %s", key, extraIn(key, values))
	if len(values) == 0 {
		rule.APIGroups, rule.Resources = []string{v1alpha1.GroupVersion.Group}, []string{"nothing-is-" + name}
		operations, condition = operations[:1], "false"
	}
	return &admissionv1.MatchResources{
		MatchPolicy: new(admissionv1.Equivalent), NamespaceSelector: &metav1.LabelSelector{}, ObjectSelector: &metav1.LabelSelector{},
		ResourceRules: []admissionv1.NamedRuleWithOperations{{
			RuleWithOperations: admissionv1.RuleWithOperations{Operations: operations, Rule: rule},
		}},
	}, []admissionv1.MatchCondition{{Name: name, Expression: condition}}
}

// extraIn returns an expression that is true if the requester has one of the values under a key of
// its extra.
func extraIn(key string, values []string) string {
	return fmt.Sprintf("request.userInfo.extra['%s'].exists(value, value in %s)", key, listOf(values))
}

// listOf returns a list of literals in CEL. The elements must have no quotes.
func listOf(elements []string) string {
	elements = slices.Sorted(slices.Values(elements))
	if len(elements) == 0 {
		return "[]"
	}
	return "['" + strings.Join(elements, "','") + "']"
}
