// SPDX-License-Identifier: Apache-2.0

package policyset

import (
	"testing"
)

// Each flavour has the policies that its kustomization selects, each with its binding.
func TestReleasePolicies(t *testing.T) {
	for scope, wanted := range map[Scope]struct{ has, lacks string }{
		Alone:      {"node-attestation-approval", "node-attestation-secrets"},
		Workload:   {"node-attestation-approval", "node-attestation-secrets"},
		Management: {"node-attestation-secrets", "node-attestation-approval"},
	} {
		set, err := Release(scope)
		if err != nil || !set.Has(wanted.has) || set.Has(wanted.lacks) || len(set.Policies) != len(set.Bindings) {
			t.Errorf("scope %s: %v", scope, err)
		}
	}
	if _, err := Release(0); err == nil {
		t.Error("no scope has policies")
	}
	for _, broken := range []string{"kind: Secret\n", "kind: ValidatingAdmissionPolicy\nspecs: {}\n", "{", ""} {
		if _, err := parse("", []byte(broken)); err == nil {
			t.Errorf("%q is taken", broken)
		}
	}
}

func TestScopes(t *testing.T) {
	for _, name := range Scopes() {
		if scope, err := ParseScope(name); err != nil || scope.String() != name {
			t.Errorf("%s: %v, %v", name, scope, err)
		}
	}
	if _, err := ParseScope("Alone"); err == nil {
		t.Error("an unknown scope is taken")
	}
}
