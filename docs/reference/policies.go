// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/cloud"
)

const policiesHeader = "# SPDX-License-Identifier: Apache-2.0\n#\n# Made by `make generate` from pkg/controller/revocation.\n"

// makePolicies returns the policies that the controller fills, as they are shipped: empty.
func makePolicies() (map[string]string, error) {
	lists := []string{policiesHeader + `#
# The controller writes the certificates of RevocationSlice N into policy N. As shipped, these
# policies match nothing and refuse nothing.
`}
	signers := []string{attestation.HelloSignerName, tpm.SignerName}
	for _, name := range cloud.Names {
		signers = append(signers, "cluster.x-k8s.io/kube-apiserver-client-kubelet-"+name)
	}
	for number := range int32(revocation.PolicyCount) {
		spec, err := revocation.RenderPolicy(v1alpha1.RevocationSliceSpec{}, signers)
		if err != nil {
			return nil, err
		}
		documents, err := policyAndBinding(revocation.PolicyName(number+1), spec)
		if err != nil {
			return nil, err
		}
		lists = append(lists, documents...)
	}
	spec, _, err := revocation.RenderTokenPolicy(nil)
	if err != nil {
		return nil, err
	}
	tokens, err := policyAndBinding(revocation.TokenPolicyName, spec)
	if err != nil {
		return nil, err
	}
	tokens = append([]string{policiesHeader + `#
# Refuses writes with service account tokens that were issued for pods on suspended nodes, also from
# other machines. The controller writes the nodes' names into it. As shipped, it matches nothing and
# refuses nothing. Apply it beside packaging/kubernetes-revocation.
`}, tokens...)
	join := func(documents []string) string {
		return documents[0] + strings.Join(documents[1:], "---\n")
	}
	return map[string]string{"revoked-policies.yaml": join(lists), "suspended-tokens.yaml": join(tokens)}, nil
}

// policyAndBinding returns both as documents. Who patches the policies' variables can leave those
// out that have the label.
func policyAndBinding(name string, spec admissionv1.ValidatingAdmissionPolicySpec) ([]string, error) {
	metadata := map[string]any{"name": name, "labels": map[string]string{
		"attestation.cluster.x-k8s.io/cluster-api": "workload", "attestation.cluster.x-k8s.io/filled-by": "controller",
	}}
	var documents []string
	for _, object := range []map[string]any{
		{"kind": "ValidatingAdmissionPolicy", "spec": spec},
		{"kind": "ValidatingAdmissionPolicyBinding", "spec": admissionv1.ValidatingAdmissionPolicyBindingSpec{
			PolicyName: name, ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny, admissionv1.Audit},
		}},
	} {
		object["apiVersion"], object["metadata"] = admissionv1.SchemeGroupVersion.String(), metadata
		content, err := yaml.Marshal(object)
		if err != nil {
			return nil, err
		}
		documents = append(documents, string(content))
	}
	return documents, nil
}
