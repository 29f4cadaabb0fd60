// SPDX-License-Identifier: Apache-2.0

package packages

import (
	"debug/macho"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
)

// What operators install: kubectl-attest and the offline commands of the controller, for this
// machine's architecture, and the archives for Macs, too. krew itself installs from the manifest.
func TestOperatorPackages(t *testing.T) {
	t.Parallel()
	dist := t.TempDir()
	cmd := exec.CommandContext(t.Context(), "make", "--no-print-directory", "-C", module, "operator-packages",
		"DIST="+dist, "VERSION="+version, "ARCHES="+runtime.GOARCH)
	cmd.Env = append(os.Environ(), "MAKEFLAGS=", "MAKELEVEL=")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	arch := map[string][2]string{"amd64": {"amd64", "x86_64"}, "arm64": {"arm64", "aarch64"}}[runtime.GOARCH]
	page := map[string]string{"kubectl-attest": "man1/kubectl-attest.1.gz", "node-attestation-controller": "man8/node-attestation-controller.8.gz"}
	versionOf := map[string][]string{"kubectl-attest": {"version", "--client"}, "node-attestation-controller": {"version"}}
	var want []string
	for name, manual := range page {
		for _, a := range []artifact{
			{name + "_1.2.3.rc.1-1_" + arch[0] + ".deb", "deb", ""}, {name + "-1.2.3.rc.1-1." + arch[1] + ".rpm", "rpm", ""},
			{name + "-" + version[1:] + "-linux-" + runtime.GOARCH + ".tar.gz", "tar", ""}, {name + "-" + version[1:] + "-darwin-" + runtime.GOARCH + ".tar.gz", "tar", "darwin"},
		} {
			want = append(want, a.file, a.file+".cdx.json")
			t.Run(a.file, func(t *testing.T) {
				dir := unpack(t, a.format, filepath.Join(dist, a.file))
				expected := map[string]fs.FileMode{
					"usr/bin/" + name: 0o755, "usr/share/man/" + manual: 0o644, "usr/share/bash-completion/completions/" + name: 0o644,
					"usr/share/fish/vendor_completions.d/" + name + ".fish": 0o644, "usr/share/doc/" + name + "/copyright": 0o644, "usr/share/doc/" + name + "/changelog.gz": 0o644,
				}
				if name == "kubectl-attest" {
					expected["usr/bin/kubectl_complete-attest"] = 0o755
				}
				if zsh := "usr/share/zsh/site-functions/_" + name; a.format != "deb" {
					expected[zsh] = 0o644
				} else {
					expected["usr/share/zsh/vendor-completions/_"+name], expected["usr/share/doc/"+name+"/changelog.Debian.gz"], expected["usr/share/lintian/overrides/"+name] = 0o644, 0o644, 0o644
				}
				if got := files(t, dir); !maps.Equal(got, expected) {
					t.Errorf("there is %v, not %v", got, expected)
				}
				command(t, "sh", "-c", `gzip -cd "$1" | mandoc -Tlint -Wwarning`, "sh", filepath.Join(dir, "usr/share/man", manual))
				command(t, "bash", "-ec", `source "$1"; complete -p "$2"`, "bash", filepath.Join(dir, "usr/share/bash-completion/completions", name), name)
				binary := filepath.Join(dir, "usr/bin", name)
				if a.arch != "darwin" {
					if out := command(t, binary, versionOf[name]...); !strings.Contains(out, version) {
						t.Errorf("version: %s", out)
					}
				} else if program, err := macho.Open(binary); err != nil || program.Cpu != map[string]macho.Cpu{"amd64": macho.CpuAmd64, "arm64": macho.CpuArm64}[runtime.GOARCH] {
					t.Errorf("no program of a Mac: %v", err)
				}
			})
		}
	}
	want = append(want, "attest.yaml")
	slices.Sort(want)
	if got := slices.DeleteFunc(slices.Sorted(maps.Keys(files(t, dist))), func(name string) bool { return name == sums }); !slices.Equal(got, want) {
		t.Errorf("made: %q, not %q", got, want)
	}
	commandIn(t, dist, "sha256sum", "--check", "--strict", "--quiet", sums)
	if lines := strings.Count(read(t, filepath.Join(dist, sums)), "\n"); lines != len(want) {
		t.Errorf("%d sums of %d files", lines, len(want))
	}
	if found := commandIn(t, dist, "sh", "-c", "lintian --allow-root --fail-on=error,warning *.deb 2>&1"); strings.TrimSpace(found) != "" {
		t.Error(found)
	}

	krew := strings.TrimSpace(commandIn(t, module, "go", "tool", "-modfile=tools/krew/go.mod", "-n", "krew"))
	root := t.TempDir()
	archive := "kubectl-attest-" + version[1:] + "-linux-" + runtime.GOARCH + ".tar.gz"
	install := exec.CommandContext(t.Context(), krew, "install", "--manifest=attest.yaml", "--archive="+archive)
	install.Dir, install.Env = dist, append(os.Environ(), "KREW_ROOT="+root)
	if out, err := install.CombinedOutput(); err != nil {
		t.Fatalf("krew: %v: %s", err, out)
	}
	if out := command(t, filepath.Join(root, "bin/kubectl-attest"), "version", "--client"); !strings.Contains(out, version) {
		t.Errorf("installed by krew: %s", out)
	}
}
