// SPDX-License-Identifier: Apache-2.0

package main

import (
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const module = "github.com/kubelet-authenticator/kubelet-authenticator/"

// What attests nothing, simulates, or is for tests is in no binary that is shipped.
func TestNoTestPackageIsShipped(t *testing.T) {
	entries, err := os.ReadDir("..")
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		out, err := exec.Command("go", "list", "-deps", "../"+entry.Name()).Output()
		if err != nil {
			t.Fatal(err)
		}
		deps := strings.Fields(string(out))
		if len(deps) < 100 {
			t.Fatalf("%s: only %d dependencies: the list is wrong", entry.Name(), len(deps))
		}
		for _, dep := range deps {
			ours, isOurs := strings.CutPrefix(dep, module)
			switch {
			case dep == "testing", strings.HasPrefix(dep, "net/http/httptest"), strings.Contains(dep, "/simulator"),
				isOurs && (strings.HasPrefix(ours, "test/") || ours == "internal/swtpm"),
				isOurs && (strings.HasSuffix(ours, "/null") || strings.Contains(ours, "/null/")):
				t.Errorf("%s depends on %s", entry.Name(), dep)
			}
		}
	}
}

func TestBinaryIsStatic(t *testing.T) {
	path := filepath.Join(t.TempDir(), "controller")
	cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", path, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
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
