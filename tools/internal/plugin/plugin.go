// SPDX-License-Identifier: Apache-2.0

// Package plugin has the plugin's binary for tests of the tools, and what the go command says of
// it.
package plugin

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Build builds the plugin from the module in source, as a release is built.
func Build(t *testing.T, source string) string {
	t.Helper()
	return BuildPackage(t, source, "./cmd/kubelet-authenticator")
}

// BuildPackage builds a main package of the module in source.
func BuildPackage(t *testing.T, source, main string) string {
	t.Helper()
	binary := filepath.Join(t.TempDir(), "binary")
	build := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-gcflags=all=-dwarf=false", "-o", binary, main) //nolint:gosec // G204: a test says what is built
	build.Dir = source
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if output, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", build, err, output)
	}
	return binary
}

// Module is a module that a binary is linked from: what was required or, where that was replaced,
// by what.
type Module struct{ Path, Version, Sum string }

// Modules returns what `go version -m` prints: the version of Go, and the modules that are linked
// in, without the main module.
func Modules(t *testing.T, binary string) (goVersion string, modules []Module) {
	t.Helper()
	output, err := exec.Command("go", "version", "-m", binary).Output() //nolint:gosec // G204: a test built it
	if err != nil {
		t.Fatalf("go version -m %s: %v", binary, err)
	}
	first, lines, _ := strings.Cut(string(output), "\n")
	goVersion = strings.TrimPrefix(first, binary+": ")
	for line := range strings.Lines(lines) {
		fields := strings.Split(strings.TrimSpace(line), "\t")
		if fields[0] != "dep" && fields[0] != "=>" {
			continue
		}
		module := Module{Path: fields[1], Version: fields[2]}
		if len(fields) > 3 {
			module.Sum = fields[3]
		}
		if fields[0] == "=>" {
			modules = modules[:len(modules)-1]
		}
		modules = append(modules, module)
	}
	if len(modules) == 0 {
		t.Fatalf("go version -m %s names no module:\n%s", binary, output)
	}
	return goVersion, modules
}
