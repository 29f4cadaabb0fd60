// SPDX-License-Identifier: Apache-2.0

package image

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
)

// With the documented overlay the deployment has the image that "make image" pushes, by digest, and
// nothing of the placeholder is left.
func TestOverlayNamesTheImage(t *testing.T) {
	t.Parallel()
	components, err := compile.ControlPlane(t.Context(), os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(read(t, module+"/docs/cluster-setup.md"), "```yaml\n# overlay\n")
	overlay, _, found := strings.Cut(rest, "```")
	if !found || !strings.Contains(overlay, "- ../kubernetes\n") {
		t.Fatalf("docs/cluster-setup.md has another overlay:\n%s", overlay)
	}
	// kustomize wants the manifests' folder by a relative path.
	dir := t.TempDir()
	here, err := filepath.Abs(module + "/packaging/kubernetes")
	if err != nil {
		t.Fatal(err)
	}
	manifests, err := filepath.Rel(dir, here)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(strings.Replace(overlay, "../kubernetes", manifests, 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	for folder, want := range map[string]string{
		dir:  `registry\.example/project/node-attestation-controller@sha256:[0-9a-f]{64}`,
		here: `registry\.invalid/node-attestation-controller:devel`, // as it is, no pod starts
	} {
		objects := commandIn(t, ".", components.Kubectl, "kustomize", folder)
		if !regexp.MustCompile(`(?m)^ +image: `+want+`$`).MatchString(objects) || strings.Count(objects, " image: ") != 1 {
			t.Errorf("%s has no image %s:\n%s", folder, want, regexp.MustCompile(`(?m)^ +image: .*$`).FindAllString(objects, -1))
		}
	}
}
