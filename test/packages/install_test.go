// SPDX-License-Identifier: Apache-2.0

package packages

import (
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// The package's own overrides say why they are there.
func TestLintian(t *testing.T) {
	t.Parallel()
	if found := commandIn(t, dist, "sh", "-c", "lintian --allow-root --fail-on=error,warning *.deb 2>&1"); strings.TrimSpace(found) != "" {
		t.Error(found)
	}
}

// The digests that rpm checks before it installs. They are not signed: SHA256SUMS is.
func TestRPMDigests(t *testing.T) {
	t.Parallel()
	each(t, []string{"rpm"}, func(t *testing.T, a artifact) {
		if result := command(t, "rpm", "-K", "-v", a.path()); strings.Contains(result, "BAD") || strings.Count(result, "digest: OK") < 2 {
			t.Error(result)
		}
		damaged := filepath.Join(t.TempDir(), "damaged.rpm")
		content := []byte(read(t, a.path()))
		content[len(content)/2]++
		if err := os.WriteFile(damaged, content, 0o600); err != nil {
			t.Fatal(err)
		}
		if result := command(t, "sh", "-c", `! rpm -K -v "$1" 2>&1`, "sh", damaged); !strings.Contains(result, "BAD") {
			t.Errorf("a damaged one: %s", result)
		}
	})
}

// Installed and taken away again, nothing is left.
func TestInstallAndPurge(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("dpkg installs as root only")
	}
	for format, do := range map[string]struct{ install, remove []string }{
		"deb": {
			// In a folder without a shell the scripts are run outside of it.
			[]string{"dpkg", "--root=ROOT", "--force-script-chrootless", "--log=/dev/null", "--install", "FILE"},
			[]string{"dpkg", "--root=ROOT", "--force-script-chrootless", "--log=/dev/null", "--purge", "kubelet-authenticator"},
		},
		"rpm": {
			[]string{"rpm", "--root=ROOT", "--dbpath=/var/lib/rpm", "--nodeps", "--noscripts", "--install", "FILE"},
			[]string{"rpm", "--root=ROOT", "--dbpath=/var/lib/rpm", "--nodeps", "--noscripts", "--erase", "kubelet-authenticator"},
		},
	} {
		each(t, []string{format}, func(t *testing.T, a artifact) {
			if a.arch != runtime.GOARCH {
				return // it would not be installed here
			}
			root := t.TempDir()
			for _, dir := range []string{"var/lib/dpkg/updates", "var/lib/dpkg/info", "var/lib/rpm"} {
				if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			if err := os.WriteFile(filepath.Join(root, "var/lib/dpkg/status"), nil, 0o600); err != nil {
				t.Fatal(err)
			}
			run := func(args []string) {
				t.Helper()
				line := strings.NewReplacer("ROOT", root, "FILE", a.path()).Replace(strings.Join(args, "\n"))
				command(t, args[0], strings.Split(line, "\n")[1:]...)
			}
			run(do.install)
			installed := files(t, root)
			for name, mode := range common {
				if installed[name] != mode {
					t.Errorf("%s: %s", name, installed[name])
				}
			}
			run(do.remove)
			left := files(t, root)
			maps.DeleteFunc(left, func(name string, _ os.FileMode) bool {
				return strings.HasPrefix(name, "var/lib/") || strings.HasPrefix(name, "usr/lib/sysimage/rpm")
			})
			if len(left) > 0 {
				t.Errorf("left: %v", left)
			}
		})
	}
}
