// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// version is one of the CRD's.
type version struct {
	name   string
	stored bool
}

// serve applies the CRD with these versions of the one schema, and waits until all are served.
func (f *fleet) serve(ctx context.Context, t *testing.T, versions ...version) {
	t.Helper()
	data, err := os.ReadFile("../../packaging/kubernetes/crd.yaml")
	harness.Must(t, err)
	var crd map[string]any
	harness.Must(t, yaml.Unmarshal(data, &crd))
	spec := crd["spec"].(map[string]any)
	only := spec["versions"].([]any)[0].(map[string]any)
	var all []any
	for _, v := range versions {
		made := map[string]any{}
		for key, value := range only {
			made[key] = value
		}
		made["name"], made["served"], made["storage"] = v.name, true, v.stored
		all = append(all, made)
	}
	spec["versions"] = all
	data, err = yaml.Marshal(crd)
	harness.Must(t, err)
	path := filepath.Join(t.TempDir(), "crd.yaml")
	harness.WriteFile(t, path, data)
	if _, err := f.RunKubectl(ctx, f.adminConfig, "apply", "-f", path); err != nil {
		t.Fatal(err)
	}
	for _, v := range versions {
		harness.Eventually(t, harness.Soon, v.name+" is served", func() bool {
			_, err := f.RunKubectl(ctx, f.adminConfig, "get", "--raw", "/apis/attestation.cluster.x-k8s.io/"+v.name+"/nodeattestations")
			return err == nil
		})
	}
}

// migrate runs the commands of docs/versions.md that store all records in a version.
func (f *fleet) migrate(ctx context.Context, t *testing.T, to string) {
	t.Helper()
	document, err := os.ReadFile("../../docs/versions.md")
	harness.Must(t, err)
	_, commands, _ := strings.Cut(string(document), "```sh\n")
	commands, _, _ = strings.Cut(commands, "```")
	shell := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", strings.ReplaceAll(commands, "v1beta1", to))
	shell.Env = append(os.Environ(), "KUBECONFIG="+f.adminConfig, "PATH="+filepath.Dir(f.Kubectl())+":"+os.Getenv("PATH"))
	if out, err := shell.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// The way from v1alpha1 to v1beta1 in docs/versions.md. The controller of v1alpha1 goes on
// while both are served, with either as the stored version. Once the commands were run, v1alpha1
// can go.
func TestStoredVersionChanges(t *testing.T) {
	f := newFleet(t, nil)
	m, idle := f.newMachine(t, "versioned"), f.newMachine(t, "not-renewed")
	f.inventoried(t, m, idle)
	node := m.attested(t)
	idle.attested(t)
	alpha, beta := version{name: "v1alpha1"}, version{name: "v1beta1"}
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		alpha.stored, beta.stored = true, false
		f.serve(ctx, t, alpha, beta)
		f.migrate(ctx, t, alpha.name)
		f.serve(ctx, t, alpha)
	})
	content := func(version string) string {
		t.Helper()
		return f.kubectl(t, "get", "nodeattestations."+version+".attestation.cluster.x-k8s.io", "--field-selector=spec.cluster="+f.cluster, "--output=jsonpath={.items[*].spec}{.items[*].status}")
	}
	renew := func() {
		t.Helper()
		_, proof := node.attests(t)
		f.issued(t, proof, m.name)
	}

	alpha.stored = true
	f.serve(t.Context(), t, alpha, beta)
	renew()
	before := content(alpha.name)
	if got := content(beta.name); got != before || strings.Count(got, `"CertificateIssued"`) != 2 {
		t.Errorf("v1beta1 has\n%s\nv1alpha1\n%s", got, before)
	}
	alpha.stored, beta.stored = false, true
	f.serve(t.Context(), t, alpha, beta)
	renew()
	f.stop()
	before = content(alpha.name)
	f.migrate(t.Context(), t, beta.name)
	f.serve(t.Context(), t, beta)
	if got := content(beta.name); got != before {
		t.Errorf("afterwards\n%s\nbefore\n%s", got, before)
	}
}
