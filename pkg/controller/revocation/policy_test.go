// SPDX-License-Identifier: Apache-2.0

package revocation

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/equality"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

var signers = []string{attestation.HelloSignerName, "cluster.x-k8s.io/kube-apiserver-client-kubelet-tpm"}

// listOfNode returns a list with revoked certificates of one node.
func listOfNode(certificates ...v1alpha1.RevokedCertificate) v1alpha1.RevocationSliceSpec {
	for i := range certificates {
		certificates[i].NodeName = "a"
	}
	return v1alpha1.RevocationSliceSpec{Certificates: certificates}
}

// A full list fits into expressions: apiserver/pkg/cel parses 100,000 code points.
func TestFullListFits(t *testing.T) {
	t.Parallel()
	var full v1alpha1.RevocationSliceSpec
	for i := range SliceCapacity {
		full.Certificates = append(full.Certificates, v1alpha1.RevokedCertificate{NodeName: fmt.Sprintf("%080d", i), SHA256: fmt.Sprintf("%064x", i), Suspended: true, NodeSuspended: true})
	}
	for i := range maxCurrent {
		full.Current = append(full.Current, v1alpha1.CurrentCertificate{SHA256: fmt.Sprintf("%064x", i)})
	}
	spec, err := RenderPolicy(full, signers)
	if err != nil {
		t.Fatal(err)
	}
	names, current := strings.Count(spec.MatchConditions[0].Expression, "system:node:"), 0
	for _, v := range spec.Variables {
		current += strings.Count(v.Expression, "X509SHA256=")
		if len(v.Expression) > 100_000 {
			t.Errorf("%s has %d bytes", v.Name, len(v.Expression))
		}
	}
	if names != SliceCapacity || current != maxCurrent || len(spec.MatchConditions[0].Expression) > 100_000 {
		t.Errorf("%d names, %d current certificates", names, current)
	}
}

// The API server evaluates nothing for an empty list.
func TestEmptyPolicyMatchesNothing(t *testing.T) {
	t.Parallel()
	spec, err := RenderPolicy(v1alpha1.RevocationSliceSpec{}, signers)
	if err != nil {
		t.Fatal(err)
	}
	rules := spec.MatchConstraints.ResourceRules
	if len(rules) != 1 || rules[0].APIGroups[0] != v1alpha1.GroupVersion.Group || rules[0].Resources[0] != "nothing-is-revoked" || spec.MatchConditions[0].Expression != "false" {
		t.Errorf("%+v", spec)
	}
}

// The order of the list does not matter, so that a policy is written only if its content changes.
func TestRenderingIsSteady(t *testing.T) {
	t.Parallel()
	one := v1alpha1.RevocationSliceSpec{
		Certificates: []v1alpha1.RevokedCertificate{{SHA256: digits("a"), NodeName: "a"}, {SHA256: digits("b"), NodeName: "b"}},
		Current:      []v1alpha1.CurrentCertificate{{SHA256: digits("c")}, {SHA256: digits("d")}},
	}
	other := *one.DeepCopy()
	slices.Reverse(other.Certificates)
	slices.Reverse(other.Current)
	a, err := RenderPolicy(one, signers)
	b, otherErr := RenderPolicy(other, []string{signers[1], signers[0]})
	if err != nil || otherErr != nil || !equality.Semantic.DeepEqual(a, b) {
		t.Errorf("%v, %v", err, otherErr)
	}
}

// No content of a list or of the configuration is interpreted as CEL.
func TestRenderingRefusesOtherText(t *testing.T) {
	t.Parallel()
	for _, sum := range []string{"", digits("a")[1:], digits("a") + "0", strings.ToUpper("ab" + digits("a")[2:]), strings.Repeat("'", 64), digits("a")[:63] + "\n", digits("a") + "\n"} {
		_, revokedErr := RenderPolicy(listOfNode(v1alpha1.RevokedCertificate{SHA256: sum}), signers)
		_, currentErr := RenderPolicy(v1alpha1.RevocationSliceSpec{Current: []v1alpha1.CurrentCertificate{{SHA256: sum}}}, signers)
		if revokedErr == nil || currentErr == nil {
			t.Errorf("%q passes", sum)
		}
	}
	for _, name := range []string{"", "a'", "a\n", `a\`, "A", "a]", strings.Repeat("a", 254)} {
		if _, err := RenderPolicy(v1alpha1.RevocationSliceSpec{Certificates: []v1alpha1.RevokedCertificate{{NodeName: name, SHA256: digits("a")}}}, signers); err == nil {
			t.Errorf("%q passes", name)
		}
	}
	for _, signer := range []string{"", "a", "a/b'", "a/b\n", `a/b\`, "a/b]"} {
		if _, err := RenderPolicy(v1alpha1.RevocationSliceSpec{}, []string{signer}); err == nil {
			t.Errorf("%q passes", signer)
		}
	}
}
