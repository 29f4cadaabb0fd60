// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/tpmprovider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
)

// serving is a controller's provider that serves these versions. Those that do not exist yet it
// would serve to nobody here.
type serving struct {
	tpmprovider.Provider
	versions attestation.Versions
}

func (s serving) Versions() attestation.Versions { return s.versions }

// Verify refuses what this provider does not serve. The real provider verifies the rest.
func (s serving) Verify(ctx context.Context, q evidence.Question) verifier.Evidence {
	content, err := attestation.Parse(q.Request.Spec.Request)
	if err == nil {
		if version, _ := attestation.Head(content.Data); !slices.Contains(s.versions, version) {
			var refusals verifier.Refusals
			refusals.Add(attestation.ReasonVersion, "%s is not served", version)
			return verifier.Evidence{Provider: s.Name(), Err: refusals}
		}
	}
	return s.Provider.Verify(ctx, q)
}

// Node and controller of several releases: either they agree on what both have, or the node says
// within 30 s what each accepts.
func TestVersionMatrix(t *testing.T) {
	later := filepath.Join(t.TempDir(), "kubelet-authenticator")
	if err := compile.Program(t.Context(), "..", later, "./newerplugin"); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		node, controller attestation.Versions
		// version is what they agree on, empty if they do not; hellos is how many that takes.
		version attestation.Version
		hellos  int
	}{
		{attestation.Versions{"tpm/v1"}, attestation.Versions{"tpm/v1"}, "tpm/v1", 1},
		{attestation.Versions{"tpm/v1"}, attestation.Versions{"tpm/v2", "tpm/v1"}, "tpm/v1", 1},
		{attestation.Versions{"tpm/v1"}, attestation.Versions{"tpm/v3", "tpm/v2"}, "", 1},
		{attestation.Versions{"tpm/v2", "tpm/v1"}, attestation.Versions{"tpm/v1"}, "tpm/v1", 2},
		{attestation.Versions{"tpm/v3", "tpm/v2", "tpm/v1"}, attestation.Versions{"tpm/v1"}, "tpm/v1", 2},
		{attestation.Versions{"tpm/v3", "tpm/v1"}, attestation.Versions{"tpm/v2", "tpm/v1"}, "tpm/v1", 2},
		{attestation.Versions{"tpm/v2", "tpm/v1"}, attestation.Versions{"tpm/v3"}, "", 1},
		{attestation.Versions{"tpm/v3", "tpm/v2"}, attestation.Versions{"tpm/v1"}, "", 1},
		{attestation.Versions{"tpm/v3"}, attestation.Versions{"tpm/v2", "tpm/v1"}, "", 1},
	} {
		t.Run(c.node.String()+" to "+c.controller.String(), func(t *testing.T) {
			f := newFleet(t, func(f *fleet, _ *verifier.Policy) {
				f.provider = func(p tpmprovider.Provider) evidence.Provider { return serving{p, c.controller} }
			})
			m := f.newMachine(t, "version")
			f.inventoried(t, m)
			if len(c.node) > 1 || c.node[0] != attestation.VersionTPM {
				t.Setenv("TPM_VERSIONS", c.node.String())
				m.program = later
			}
			began := time.Now()
			r := m.run(t)
			if took := time.Since(began); took > 30*time.Second {
				t.Errorf("after %s", took)
			}
			hellos, proofs := f.requests(t, m.name)
			if len(hellos) != c.hellos {
				t.Errorf("%d hellos", len(hellos))
			}
			for _, h := range hellos {
				if reason := reasonOf(&h); reason == attestation.ReasonVersion && h.Annotations[attestation.AnnotationVersions] != c.controller.String() {
					t.Errorf("annotations %v", h.Annotations)
				}
			}
			if c.version != "" {
				if r.Code != 0 || len(proofs) != 1 {
					t.Fatalf("exit code %d, %d proofs: %s", r.Code, len(proofs), r.Stderr)
				}
				content, err := attestation.Parse(proofs[0].Spec.Request)
				if err != nil {
					t.Fatal(err)
				}
				if version, _ := attestation.Head(content.Data); version != c.version {
					t.Errorf("they agreed on %s", version)
				}
				return
			}
			if r.Code != 21 || len(proofs) != 0 || !strings.Contains(r.Stderr, c.controller.String()) || !strings.Contains(strings.ReplaceAll(r.Stderr, " ", ","), c.node.String()) {
				t.Errorf("exit code %d, %d proofs: %s", r.Code, len(proofs), r.Stderr)
			}
		})
	}
}
