// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Product, tests and components are compiled with the same flags, and from the same version of each
// module that they share. Otherwise the compiler does what they have in common twice, for minutes.
func TestPackagesAreCompiledOnce(t *testing.T) {
	read := func(path string) string {
		content, err := os.ReadFile(filepath.Join("..", "..", path))
		if err != nil {
			t.Fatal(err)
		}
		return string(content)
	}
	if makefile := read("Makefile"); !strings.Contains(makefile, "\nexport GOFLAGS := "+strings.Join(Flags(), " ")+"\n") || !strings.Contains(makefile, "\nexport CGO_ENABLED := 0\n") {
		t.Errorf("the Makefile has other flags than %q", Flags())
	}
	required := func(goMod string) map[string]string {
		versions := map[string]string{}
		for _, line := range regexp.MustCompile(`(?m)^\t(\S+) (v\S+)`).FindAllStringSubmatch(read(goMod), -1) {
			versions[line[1]] = line[2]
		}
		return versions
	}
	components, shared := required("test/components/go.mod"), 0
	for _, goMod := range []string{"go.mod", "test/go.mod"} {
		for module, version := range required(goMod) {
			other, both := components[module]
			if !both || other == "v0.0.0" { // its replacement is of Kubernetes' version
				continue
			}
			if shared++; other != version {
				t.Errorf("%s: %s has %s, test/components/go.mod has %s", module, goMod, version, other)
			}
		}
	}
	if shared < 50 {
		t.Errorf("%d modules are shared", shared)
	}
}
