// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// dry runs the plugin with --dry-run as a person does.
func (n *node) dry(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), n.plugin, append(append(n.flags(), "--dry-run"), args...)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		code = exit.ExitCode()
	} else if err != nil {
		t.Fatal(err)
	}
	return out.String(), errs.String(), code
}

func TestDryRun(t *testing.T) {
	n := newNode(t)
	mark, err := n.AuditMark()
	if err != nil {
		t.Fatal(err)
	}
	out, stderr, code := n.dry(t)
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	for _, want := range []string{"a run would succeed: the API server accepts the request", "CN=system:node:" + n.name, "test://" + n.name, builtinSigner, `{"version":"insecure/v1"}`, "digital signature, client auth", "bootstrap kubeconfig"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in:\n%s", want, out)
		}
	}
	if strings.Contains(out, "PRIVATE KEY") || strings.Contains(out, strings.TrimSpace(tokenOf(t, n.bootstrap))) {
		t.Error("it shows a secret")
	}
	for _, format := range []string{"json", "yaml"} {
		out, stderr, code := n.dry(t, "--output="+format)
		var object certificatesv1.CertificateSigningRequest
		if err := yaml.UnmarshalStrict([]byte(out), &object); code != 0 || err != nil || object.Kind != "CertificateSigningRequest" {
			t.Fatalf("%s: exit code %d, %v: %s", format, code, err, stderr)
		}
		// The output is a complete object: kubectl can create it, too.
		admin := filepath.Join(t.TempDir(), "admin")
		file := filepath.Join(t.TempDir(), "csr")
		harness.WriteFile(t, file, []byte(out))
		if err := n.WriteKubeconfig(admin, n.AdminUser()); err != nil {
			t.Fatal(err)
		}
		if got, err := n.RunKubectl(t.Context(), admin, "create", "--dry-run=server", "-f", file); err != nil {
			t.Errorf("kubectl create: %v: %s", err, got)
		}
	}
	events, err := n.AuditSince(mark)
	if err != nil {
		t.Fatal(err)
	}
	checked := 0
	for _, e := range ofPlugin(events, "create") {
		if !strings.Contains(e.RequestURI, "dryRun=All") {
			t.Errorf("it created an object: %+v", e)
		}
		checked++
	}
	if checked != 3 {
		t.Errorf("the API server was asked %d times", checked)
	}
	if got := len(n.requests(t)); got != 0 || exists(n.dir.Path()) || exists(n.runtime) {
		t.Errorf("%d requests; the certificate directory exists: %v; the runtime directory: %v", got, exists(n.dir.Path()), exists(n.runtime))
	}
}

func TestDryRunSaysWhatIsThere(t *testing.T) {
	n := renewingNode(t)
	n.installDue(t)
	before := n.snapshot(t)
	out, stderr, code := n.dry(t)
	if code != 0 || !strings.HasPrefix(out, "a run would succeed: it prints the certificate on disk, valid to ") || !strings.Contains(out, "the node's own certificate") || !strings.Contains(out, "its lifetime is nearly over") {
		t.Errorf("exit code %d: %s\n%s", code, stderr, out)
	}
	if after := n.snapshot(t); after != before {
		t.Errorf("it changed the directory:\n%s\nto\n%s", before, after)
	}
}

func TestDryRunThatTheServerRefusesOrCannotSee(t *testing.T) {
	n := newNode(t)
	harness.WriteFile(t, n.bootstrap, n.BootstrapKubeconfig("abcdef.0123456789abcdef"))
	if out, stderr, code := n.dry(t); code != 18 || !strings.HasPrefix(out, "a run would fail: ") || !strings.Contains(out, "refused: ") || !strings.Contains(stderr, "hint: ") {
		t.Errorf("unknown token: exit code %d: %s\n%s", code, stderr, out)
	}
	if err := n.behindProxy(t).SetMode(testbed.BlackHole); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if out, stderr, code := n.dry(t); code != 19 || !strings.HasPrefix(out, "a run would fail: ") || !strings.Contains(out, "skipped: ") || time.Since(began) > 20*time.Second {
		t.Errorf("black hole: exit code %d after %s: %s\n%s", code, time.Since(began), stderr, out)
	}
	if err := os.Remove(n.bootstrap); err != nil {
		t.Fatal(err)
	}
	if out, stderr, code := n.dry(t); code != 17 || !strings.Contains(out, "skipped: no bootstrap kubeconfig") {
		t.Errorf("no cluster: exit code %d: %s\n%s", code, stderr, out)
	}
}
