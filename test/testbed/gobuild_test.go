// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// What is built again is what the sources say now, although it is kept.
func TestGoBuildFollowsItsSources(t *testing.T) {
	t.Setenv(CacheVariable, t.TempDir())
	module, output := t.TempDir(), filepath.Join(t.TempDir(), "program")
	write := func(name, content string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(module, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("go.mod", "module example.com/a\n\ngo 1.26\n")
	for _, says := range []string{"one", "two", "one"} {
		write("main.go", "package main\n\nfunc main() { println(\""+says+"\") }\n")
		if err := GoBuild(t.Context(), module, output, "./."); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.CommandContext(t.Context(), output).CombinedOutput(); err != nil || string(out) != says+"\n" {
			t.Errorf("%v: %q, want %q", err, out, says)
		}
	}
}
