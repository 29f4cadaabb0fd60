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
	// PolicyCount is the number of admission policies for revoked certificates in a release.
	PolicyCount = 10
	// SliceCapacity is the maximum number of revoked certificates in a slice, and of fingerprints
	// in one expression. An expression has at most 100,000 code points (apiserver/pkg/cel), and a
	// fingerprint takes 78.
	SliceCapacity = 1000
	// maxCurrent is the maximum number of current certificates in a slice. A larger slice does not
	// fit into etcd, which takes 1.5 MiB.
	maxCurrent = 3 * SliceCapacity
	// maxNames is the maximum length of a list of names in an expression, in code points.
	maxNames = 99_000
	// UserPrefix begins the user name of a node.
	UserPrefix = "system:node:"
	// X509Prefix begins the credential ID of a certificate, which ends with the fingerprint.
	X509Prefix = "X509SHA256="
)

// PolicyName returns the name of the policy for the list of that number, and of the policy's
// binding.
func PolicyName(number int32) string { return fmt.Sprintf("node-attestation-revoked-%02d", number) }

// ExtraCredentialIDs is the key in a requester's extra that has the fingerprint of its client
// certificate, since Kubernetes 1.32.
const ExtraCredentialIDs = "authentication.kubernetes.io/credential-id"

var (
	fingerprintPattern = regexp.MustCompile(`^[0-9a-f]{64}$`)
	signerPattern      = regexp.MustCompile(`^[-a-z0-9.]+/[-A-Za-z0-9._:]+$`)
)

// RenderPolicy returns the policy of a list. It refuses the writes of each node with a revoked
// certificate on the list, except with the list's current certificates. An API server names a
// certificate by the SHA-256 of its bytes, which include the CA's signature, and a signature has
// several encodings. So a list of revoked fingerprints would not stop a thief.
//
// A node that is not suspended may still create CertificateSigningRequests for these signers, so
// that the machine can get a new certificate by its evidence.
//
// Names and fingerprints are literals. A policy with a parameter object refuses every write of the
// cluster while that object is missing, or fails open.
//
// Without revoked certificates, the policy matches no resource, and the API server does not
// evaluate it.
func RenderPolicy(list v1alpha1.RevocationSliceSpec, signers []string) (admissionv1.ValidatingAdmissionPolicySpec, error) {
	r, err := RequestersOf(list)
	if err != nil {
		return admissionv1.ValidatingAdmissionPolicySpec{}, err
	}
	for _, signer := range signers {
		if !signerPattern.MatchString(signer) {
			return admissionv1.ValidatingAdmissionPolicySpec{}, fmt.Errorf("%.80q is not the name of a signer", signer)
		}
	}
	condition := ""
	if len(r.Nodes) > 0 {
		condition = "has(request.userInfo.username) && request.userInfo.username in " + listOf(r.Nodes)
	}
	constraints, conditions := match("revoked", condition)
	variables := []admissionv1.Variable{
		// Users that are impersonated have no credential.
		{Name: "credentials", Expression: fmt.Sprintf("has(request.userInfo.extra) && '%[1]s' in request.userInfo.extra\n  ? request.userInfo.extra['%[1]s'] : []", ExtraCredentialIDs)},
		{Name: "suspendedNode", Expression: "request.userInfo.username in " + listOf(r.SuspendedNodes)},
		{Name: "suspended", Expression: "variables.suspendedNode || " + hasCredentialIn(r.Suspended)},
		// This exception is safe: the controller decides by evidence, and issues certificates
		// only for the machine's own node name.
		{Name: "attesting", Expression: "request.operation == 'CREATE' && (!has(request.subResource) || request.subResource == '')\n" +
			"  && request.resource.group == 'certificates.k8s.io' && request.resource.resource == 'certificatesigningrequests'\n" +
			"  && object.spec.signerName in " + listOf(signers)},
	}
	// One expression has room for SliceCapacity fingerprints.
	isCurrent := "false"
	for i, part := range slices.Collect(slices.Chunk(slices.Sorted(slices.Values(r.Current)), SliceCapacity)) {
		name := fmt.Sprintf("current%d", i+1)
		variables = append(variables, admissionv1.Variable{Name: name, Expression: hasCredentialIn(part)})
		isCurrent += " || variables." + name
	}
	isCurrent = strings.TrimPrefix(isCurrent, "false || ")
	reason := metav1.StatusReasonForbidden
	return admissionv1.ValidatingAdmissionPolicySpec{
		FailurePolicy:    new(admissionv1.Fail),
		MatchConstraints: constraints, MatchConditions: conditions,
		Variables: variables,
		Validations: []admissionv1.Validation{
			{Expression: "!variables.suspended || " + isCurrent, Message: attestation.MessageSuspended, Reason: &reason},
			{Expression: "variables.suspended || variables.attesting || " + isCurrent, Message: attestation.MessageRevoked, Reason: &reason},
		},
	}, nil
}

// Requesters are the user names and credential IDs in a list. Its policy refuses the writes of
// Nodes, except with one of Current. The authorizer refuses their reads, too.
type Requesters struct {
	// Nodes are the nodes with a revoked certificate. SuspendedNodes are those of them whose
	// machine is suspended: each certificate of theirs that is not current counts as suspended.
	Nodes, SuspendedNodes []string
	// Revoked are the revoked certificates. Suspended are those of them that are suspended and of
	// other nodes than SuspendedNodes.
	Revoked, Suspended []string
	// Current are the certificates that may be used.
	Current []string
}

// RequestersOf returns the requesters in a list. It refuses text that is no name of a node or no
// fingerprint.
func RequestersOf(list v1alpha1.RevocationSliceSpec) (r Requesters, err error) {
	for _, c := range list.Certificates {
		if !nodeNamePattern.MatchString(c.NodeName) || !fingerprintPattern.MatchString(c.SHA256) {
			return r, fmt.Errorf("invalid fingerprint %.80q or node name %.80q", c.SHA256, c.NodeName)
		}
		user, credential := UserPrefix+c.NodeName, X509Prefix+c.SHA256
		r.Nodes, r.Revoked = append(r.Nodes, user), append(r.Revoked, credential)
		switch {
		case c.NodeSuspended:
			r.SuspendedNodes = append(r.SuspendedNodes, user)
		case c.Suspended:
			r.Suspended = append(r.Suspended, credential)
		}
	}
	for _, c := range list.Current {
		if !fingerprintPattern.MatchString(c.SHA256) {
			return r, fmt.Errorf("invalid fingerprint %.80q", c.SHA256)
		}
		r.Current = append(r.Current, X509Prefix+c.SHA256)
	}
	return r, nil
}

// hasCredentialIn returns an expression that is true if the requester has one of the credentials.
func hasCredentialIn(credentials []string) string {
	return "variables.credentials.exists(id, id in " + listOf(credentials) + ")"
}

// match returns the constraints of a policy that matches each write for which the condition is
// true. Without a condition it matches no resource. Defaults are set, so that the result equals
// what the API server stores.
func match(name, condition string) (*admissionv1.MatchResources, []admissionv1.MatchCondition) {
	rule := admissionv1.Rule{APIGroups: []string{"*"}, APIVersions: []string{"*"}, Resources: []string{"*/*"}, Scope: new(admissionv1.AllScopes)}
	operations := []admissionv1.OperationType{admissionv1.Create, admissionv1.Update, admissionv1.Delete, admissionv1.Connect}
	if condition == "" {
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

// listOf returns a list of literals in CEL, without duplicates. The elements must have no quotes.
func listOf(elements []string) string {
	elements = slices.Compact(slices.Sorted(slices.Values(elements)))
	if len(elements) == 0 {
		return "[]"
	}
	return "['" + strings.Join(elements, "','") + "']"
}
