// SPDX-License-Identifier: Apache-2.0

package revocation

import (
	"fmt"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/equality"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

var signers = []string{attestation.HelloSignerName, "cluster.x-k8s.io/kube-apiserver-client-kubelet-tpm"}

// A full list fits into an expression: apiserver/pkg/cel parses 100,000 code points.
func TestFullListFits(t *testing.T) {
	t.Parallel()
	var all []v1alpha1.RevokedCertificate
	for i := range SliceCapacity {
		all = append(all, v1alpha1.RevokedCertificate{SHA256: fmt.Sprintf("%064x", i), Suspended: true})
	}
	spec, err := RenderPolicy(all, signers)
	if err != nil {
		t.Fatal(err)
	}
	for _, expression := range []string{spec.MatchConditions[0].Expression, spec.Variables[0].Expression} {
		if strings.Count(expression, "X509SHA256=") != SliceCapacity || len(expression) > 90_000 {
			t.Errorf("%d fingerprints in %d bytes", strings.Count(expression, "X509SHA256="), len(expression))
		}
	}
}

// The API server evaluates nothing for an empty list.
func TestEmptyPolicyMatchesNothing(t *testing.T) {
	t.Parallel()
	spec, err := RenderPolicy(nil, signers)
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
	a, b := v1alpha1.RevokedCertificate{SHA256: digits("a")}, v1alpha1.RevokedCertificate{SHA256: digits("b")}
	one, err := RenderPolicy([]v1alpha1.RevokedCertificate{a, b}, signers)
	other, otherErr := RenderPolicy([]v1alpha1.RevokedCertificate{b, a}, []string{signers[1], signers[0]})
	if err != nil || otherErr != nil || !equality.Semantic.DeepEqual(one, other) {
		t.Errorf("%v, %v", err, otherErr)
	}
}

// Whatever gets into a list or into the configuration does not become CEL.
func TestRenderingRefusesOtherText(t *testing.T) {
	t.Parallel()
	for _, sum := range []string{"", digits("a")[1:], digits("a") + "0", strings.ToUpper("ab" + digits("a")[2:]), strings.Repeat("'", 64), digits("a")[:63] + "\n", digits("a") + "\n"} {
		if _, err := RenderPolicy([]v1alpha1.RevokedCertificate{{SHA256: sum}}, signers); err == nil {
			t.Errorf("%q passes", sum)
		}
	}
	for _, signer := range []string{"", "a", "a/b'", "a/b\n", `a/b\`, "a/b]"} {
		if _, err := RenderPolicy(nil, []string{signer}); err == nil {
			t.Errorf("%q passes", signer)
		}
	}
}
