// SPDX-License-Identifier: Apache-2.0

package attestctl

import (
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/preflight"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// A reason is explained without a cluster.
func TestExplain(t *testing.T) {
	for _, reason := range []string{string(verifier.ReasonMachineNotFound), attestation.ReasonExpired, attestation.ReasonSuspended, preflight.ReasonPoliciesLockNodesOut, telemetry.ReasonNoEvidence, "providerIDmismatch"} {
		r := run(t, nil, "explain", reason)
		if r.code != 0 || !strings.Contains(strings.ToLower(r.stdout), strings.ToLower(reason)+"\n  meaning: ") || !strings.Contains(r.stdout, "\n  what to do: ") {
			t.Errorf("%+v", r)
		}
	}
	if r := run(t, nil, "explain"); r.code != 0 || strings.Count(r.stdout, "\n") < 100 {
		t.Errorf("%+v", r)
	}
	if r := run(t, nil, "explain", "ProviderID"); r.code != codeNotFound || !strings.Contains(r.stderr, "did you mean ProviderID") || r.stdout != "" {
		t.Errorf("%+v", r)
	}
	if r := run(t, nil, "explain", "IdentityBound", "-o", "json"); r.code != 0 || !strings.Contains(r.stdout, `"remedy": "`) || strings.Contains(r.stdout, "](") {
		t.Errorf("%+v", r)
	}
}
