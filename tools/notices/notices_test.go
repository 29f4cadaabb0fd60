// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/tools/internal/plugin"
)

const root = "../.."

func notices(t *testing.T, binary, source string) string {
	t.Helper()
	var out strings.Builder
	if err := run(&out, binary, source); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func read(t *testing.T, name string) string {
	t.Helper()
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Trim(string(data), "\n")
}

// TestNoticesOfThePlugin: each module that is linked in is named, Go too; texts are there once; and
// those of parts of a module are not forgotten.
func TestNoticesOfThePlugin(t *testing.T) {
	binary := plugin.Build(t, root)
	goVersion, modules := plugin.Modules(t, binary)
	got := notices(t, binary, root)

	for _, m := range append(modules, plugin.Module{Path: "Go", Version: strings.TrimPrefix(goVersion, "go")}) {
		if !strings.Contains(got, "\n"+m.Path+" "+m.Version+": ") {
			t.Errorf("%s %s is not named", m.Path, m.Version)
		}
	}
	if !strings.HasPrefix(got, "kubelet-authenticator\n") {
		t.Errorf("the program's name is not first: %.100q", got)
	}
	ours := read(t, filepath.Join(root, "LICENSE"))
	if n := strings.Count(got, ours); n != 1 {
		t.Errorf("our licence is there %d times", n)
	}
	line := strings.Repeat("=", 80)
	heading := "\n" + line + "\ngithub.com/kubelet-authenticator/kubelet-authenticator: LICENSE\n"
	if before, _, isThere := strings.Cut(got, heading); !isThere || strings.Contains(before, line) {
		t.Error("our licence is not the first text")
	}
	for _, want := range []string{
		"Go " + strings.TrimPrefix(goVersion, "go") + ": PATENTS\n",
		": third_party/forked/golang/LICENSE\n", // Go's, in k8s.io/apimachinery
		": LICENSE.libyaml\n",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is missing", want)
		}
	}
	if again := notices(t, binary, root); again != got {
		t.Error("the second time it is another text")
	}
}

// TestModuleWithoutALicence: only a licence, above the package that is linked in, is one.
func TestModuleWithoutALicence(t *testing.T) {
	source := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		file := filepath.Join(source, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	const goMod = "module example.org/program\ngo 1.26\nreplace example.org/part => ./part\nrequire example.org/part "
	write("go.mod", goMod+"v1.2.3\n")
	write("LICENSE", "ours\n")
	write("main.go", "package main\nimport \"example.org/part/inner\"\nfunc main() { inner.F() }\n")
	write("part/go.mod", "module example.org/part\ngo 1.26\n")
	write("part/inner/inner.go", "package inner\nfunc F() {}\n")
	binary := plugin.BuildPackage(t, source, ".")

	refused := func(want string) {
		t.Helper()
		var out strings.Builder
		if err := run(&out, binary, source); err == nil || !strings.Contains(err.Error(), want) || out.Len() > 0 {
			t.Errorf("%v, and printed %.200q, not %q", err, out.String(), want)
		}
	}
	const none = "example.org/part v1.2.3 => ./part (devel): no licence for what is in "
	refused(none)
	write("part/NOTICE", "theirs, with thanks\n")
	write("part/other/LICENSE", "of what is not linked in\n")
	write("part/license.go", "package part\n")
	write("part/COPYING", "\n")
	refused(none)
	write("part/COPYING", "caf\xe9")
	refused("COPYING is not UTF-8")
	if err := os.Remove(filepath.Join(source, "part/COPYING")); err != nil {
		t.Fatal(err)
	}

	write("part/inner/Licence.md", "ours\r\n")
	_, texts, _ := strings.Cut(notices(t, binary, source), strings.Repeat("=", 80))
	if texts, _, _ = strings.Cut(texts, "\n"+strings.Repeat("=", 80)+"\nGo "); strings.ReplaceAll(texts, strings.Repeat("=", 80), "==") != `
example.org/program: LICENSE
example.org/part v1.2.3 => ./part (devel): inner/Licence.md
==

ours
` {
		t.Errorf("the first text is\n%s", texts)
	}
	if all := notices(t, binary, source); !strings.Contains(all, "./part (devel): NOTICE\n") || strings.Contains(all, "not linked in") {
		t.Errorf("NOTICE is missing, or what is not linked in is there:\n%s", all)
	}

	write("go.mod", goMod+"v1.2.4\n")
	refused("it was not built from what is in " + source + ": it has example.org/part v1.2.3 => ./part (devel)")
	write("go.mod", goMod+"v1.2.3\nreplace example.org/new => ./new\nrequire example.org/new v1.0.0\n")
	write("new/go.mod", "module example.org/new\ngo 1.26\n")
	write("new/new.go", "package new\n")
	write("new.go", "package main\nimport _ \"example.org/new\"\n")
	refused("it was not built from what is in " + source + ": it does not have example.org/new v1.0.0 => ./new (devel)")
}
