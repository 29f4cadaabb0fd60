// SPDX-License-Identifier: Apache-2.0

package main

import (
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/kubelet-authenticator/kubelet-authenticator/"

// example is the controller that an infrastructure provider builds, as docs/ shows it.
const example = "../../docs/examples/node-attestation-controller-acme"

// What attests nothing, simulates, or is for tests is in no binary that is shipped.
func TestNoTestPackageIsShipped(t *testing.T) {
	entries, err := os.ReadDir("..")
	if err != nil {
		t.Fatal(err)
	}
	programs := []string{example, "../../docs/examples/kubelet-authenticator-acme"}
	for _, entry := range entries {
		programs = append(programs, "../"+entry.Name())
	}
	for _, program := range programs {
		out, err := exec.Command("go", "list", "-deps", program).Output()
		if err != nil {
			t.Fatal(err)
		}
		deps := strings.Fields(string(out))
		if len(deps) < 100 {
			t.Fatalf("%s: only %d dependencies: the list is wrong", program, len(deps))
		}
		for _, dep := range deps {
			ours, isOurs := strings.CutPrefix(dep, module)
			switch {
			case dep == "net/http/httptest" && slices.Contains(deps, "sigs.k8s.io/cluster-api/util/conditions"):
				// which brings matchers of gomega
			case dep == "testing", strings.HasPrefix(dep, "net/http/httptest"), strings.Contains(dep, "/simulator"),
				isOurs && (strings.HasPrefix(ours, "test/") || strings.HasPrefix(ours, "internal/testing/")),
				isOurs && (strings.HasSuffix(ours, "/null") || strings.Contains(ours, "/null/")),
				isOurs && ours == "docs/examples/acme/platform":
				t.Errorf("%s depends on %s", program, dep)
			}
		}
	}
}

func TestBinaryIsStatic(t *testing.T) {
	path := build(t, ".")
	binary, err := elf.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = binary.Close() }()
	if libraries, err := binary.ImportedLibraries(); err != nil || len(libraries) > 0 {
		t.Errorf("it needs shared libraries: %v, %v", libraries, err)
	}
	for _, args := range [][]string{{"version"}, {"--help"}} {
		if out, err := exec.Command(path, args...).CombinedOutput(); err != nil || !strings.HasPrefix(string(out), "node-attestation-controller") {
			t.Errorf("%v: %v, %s", args, err, out)
		}
	}
}

// The example is built, and does not start on less than it needs. test/controller runs it against
// an API server.
func TestExampleController(t *testing.T) {
	path := build(t, example)
	key := filepath.Join(t.TempDir(), "key.pem")
	// RFC 8410, section 10.1.
	content := "-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=\n-----END PUBLIC KEY-----\n"
	if err := os.WriteFile(key, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	for says, args := range map[string][]string{
		"--platform-key: open /nonexistent: ": {"--platform-key=/nonexistent", "--cluster-uid=a"},
		"--cluster-uid: must be set":          {"--platform-key=" + key},
		"/nonexistent/kubeconfig":             {"--platform-key=" + key, "--cluster-uid=a", "--kubeconfig=/nonexistent/kubeconfig"},
	} {
		out, err := exec.Command(path, args...).CombinedOutput()
		if err == nil || !strings.Contains(string(out), says) {
			t.Errorf("%v: does not say %q: %v, %s", args, says, err, out)
		}
	}
}

func build(t *testing.T, pkg string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "controller")
	cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-gcflags=all=-dwarf=false", "-ldflags=-s -w", "-o", path, pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", pkg, err, out)
	}
	return path
}
