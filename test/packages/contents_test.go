// SPDX-License-Identifier: Apache-2.0

package packages

import (
	"bytes"
	"debug/elf"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const (
	binaryFile  = "usr/bin/kubelet-authenticator"
	releaseFile = "usr/lib/extension-release.d/extension-release.kubelet-authenticator"
)

// common are the files of every artifact, with their modes.
var common = map[string]fs.FileMode{
	binaryFile: 0o755,
	"usr/lib/systemd/system/kubelet.service.d/20-kubelet-authenticator.conf": 0o644,
	"usr/lib/tmpfiles.d/kubelet-authenticator.conf":                          0o644,
	"usr/share/man/man8/kubelet-authenticator.8.gz":                          0o644,
	"usr/share/man/man5/kubelet-authenticator-config.5.gz":                   0o644,
	"usr/share/bash-completion/completions/kubelet-authenticator":            0o644,
	"usr/share/fish/vendor_completions.d/kubelet-authenticator.fish":         0o644,
	"usr/share/doc/kubelet-authenticator/copyright":                          0o644,
	"usr/share/doc/kubelet-authenticator/changelog.gz":                       0o644,
	"usr/share/doc/kubelet-authenticator/examples/config.yaml":               0o644,
}

// own are those of a format.
var own = map[string][]string{
	"deb": {
		"usr/share/zsh/vendor-completions/_kubelet-authenticator", "usr/share/doc/kubelet-authenticator/changelog.Debian.gz",
		"usr/share/lintian/overrides/kubelet-authenticator",
	},
	"rpm":    {"usr/share/zsh/site-functions/_kubelet-authenticator"},
	"tar":    {"usr/share/zsh/site-functions/_kubelet-authenticator"},
	"sysext": {"usr/share/zsh/site-functions/_kubelet-authenticator", releaseFile},
}

// Each artifact has the same files, and no others: nothing in /etc, so that installing it switches
// nothing on.
func TestContents(t *testing.T) {
	t.Parallel()
	each(t, []string{"deb", "rpm", "tar", "sysext"}, func(t *testing.T, a artifact) {
		dir := a.unpack(t)
		want := maps.Clone(common)
		for _, path := range own[a.format] {
			want[path] = 0o644
		}
		if got := files(t, dir); !maps.Equal(got, want) {
			t.Errorf("there is %v, not %v", got, want)
		}
		program, err := elf.Open(filepath.Join(dir, binaryFile))
		if err != nil {
			t.Fatal(err)
		}
		machine := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}[a.arch]
		if libraries, err := program.ImportedLibraries(); program.Machine != machine || err != nil || len(libraries) > 0 {
			t.Errorf("the binary is for %s and needs %q, %v", program.Machine, libraries, err)
		}
		if a.format == "sysext" {
			architecture := map[string]string{"amd64": "x86-64", "arm64": "arm64"}[a.arch]
			if got := read(t, filepath.Join(dir, releaseFile)); got != "ID=_any\nARCHITECTURE="+architecture+"\nEXTENSION_RELOAD_MANAGER=1\n" {
				t.Errorf("extension-release: %s", got)
			}
		}
	})
}

// files are those below dir with their modes.
func files(t *testing.T, dir string) map[string]fs.FileMode {
	t.Helper()
	found := map[string]fs.FileMode{}
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		name, err := filepath.Rel(dir, path)
		found[name] = info.Mode()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func read(t *testing.T, path string) string {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}

// The same binary is in every format.
func TestOneBinary(t *testing.T) {
	t.Parallel()
	for _, arch := range []string{"amd64", "arm64"} {
		var first string
		for _, a := range artifacts {
			if a.arch != arch {
				continue
			}
			if content := read(t, filepath.Join(a.unpack(t), binaryFile)); first == "" {
				first = content
			} else if content != first {
				t.Errorf("%s has another binary for %s", a.file, arch)
			}
		}
	}
}

// All belongs to root, as the formats themselves list it.
func TestOwners(t *testing.T) {
	t.Parallel()
	for format, list := range map[string][]string{
		"deb": {"dpkg-deb", "--contents"}, "rpm": {"rpm", "-qlvp"}, "tar": {"tar", "-tvf"}, "sysext": {"unsquashfs", "-ll"},
	} {
		owner := regexp.MustCompile(`^[-d]\S+ +(\d+ +)?(root|0)[/ ]+(root|0) `)
		each(t, []string{format}, func(t *testing.T, a artifact) {
			lines := 0
			for line := range strings.Lines(command(t, list[0], append(list[1:], a.path())...)) {
				if strings.HasPrefix(line, "-") || strings.HasPrefix(line, "d") {
					lines++
					if !owner.MatchString(line) {
						t.Errorf("not root's: %s", line)
					}
				}
			}
			if lines < len(common) {
				t.Errorf("%d files", lines)
			}
		})
	}
}

// The maintainer scripts make systemd reload its units, and do nothing else. The deb has no
// configuration files, so that purging leaves none.
func TestMaintainerScripts(t *testing.T) {
	t.Parallel()
	script := read(t, module+"/packaging/daemon-reload")
	if orders := strings.Count(script, "systemctl"); orders != 1 || !strings.Contains(script, "systemctl --system daemon-reload") {
		t.Errorf("not only a daemon-reload: %s", script)
	}
	each(t, []string{"deb"}, func(t *testing.T, a artifact) {
		dir := t.TempDir()
		command(t, "dpkg-deb", "--control", a.path(), dir)
		if got := slices.Sorted(maps.Keys(files(t, dir))); !slices.Equal(got, []string{"control", "md5sums", "postinst", "postrm"}) {
			t.Errorf("control files: %q", got)
		}
		for _, name := range []string{"postinst", "postrm"} {
			if got := read(t, filepath.Join(dir, name)); got != script {
				t.Errorf("%s: %s", name, got)
			}
		}
		log := command(t, "gzip", "-cd", filepath.Join(a.unpack(t), "usr/share/doc/kubelet-authenticator/changelog.Debian.gz"))
		if !strings.HasPrefix(log, "kubelet-authenticator (1.2.3~rc.1-1) ") || !strings.Contains(read(t, filepath.Join(dir, "control")), "\nVersion: 1.2.3~rc.1-1\n") {
			t.Errorf("the changelog is of another version than the package: %s", log)
		}
	})
	each(t, []string{"rpm"}, func(t *testing.T, a artifact) {
		scripts := command(t, "rpm", "-qp", "--scripts", a.path())
		var names []string
		for _, header := range scriptHeader.FindAllStringSubmatch(scripts, -1) {
			names = append(names, header[1])
		}
		if !slices.Equal(names, []string{"postinstall", "postuninstall"}) || strings.Count(scripts, strings.TrimSpace(script)) != 2 {
			t.Errorf("scripts: %s", scripts)
		}
		if needs := command(t, "rpm", "-qp", "--requires", a.path()); !strings.Contains(needs, "/bin/sh\n") {
			t.Errorf("the scripts need a shell, the package %q", needs)
		}
	})
}

var scriptHeader = regexp.MustCompile(`(?m)^(\w+) (?:scriptlet|program)`)

// What is for tests is in no artifact: neither the attestor that takes everything for evidence, nor
// a simulated TPM, nor a key.
func TestNothingForTests(t *testing.T) {
	t.Parallel()
	// The plugin of the tests has the null attestor: were it packed, this would find it.
	plugin := filepath.Join(t.TempDir(), "plugin")
	commandIn(t, module+"/test", "go", "build", "-trimpath", "-gcflags=all=-dwarf=false", "-ldflags=-s -w", "-o", plugin, "./testplugin")
	if found := forTests(read(t, plugin)); !slices.Contains(found, "kubelet-authenticator/test/") {
		t.Fatalf("the plugin of the tests is not recognised: %q", found)
	}
	each(t, []string{"deb", "rpm", "tar", "sysext"}, func(t *testing.T, a artifact) {
		dir := a.unpack(t)
		for name := range files(t, dir) {
			if found := forTests(read(t, filepath.Join(dir, name))); len(found) > 0 {
				t.Errorf("%s: %q", name, found)
			}
		}
	})
}

// testOnly are texts of what is for tests: import paths, which a stripped binary keeps in its names
// of functions, and keys.
var testOnly = []string{
	"kubelet-authenticator/test/", "kubelet-authenticator/internal/testing/swtpm", "go-tpm/tpm2/transport/simulator", "go-tpm-tools", "ms-tpm-20-ref", "tpmsim",
	"-----BEGIN PRIVATE KEY-----\n", "-----BEGIN EC PRIVATE KEY-----\n", "-----BEGIN RSA PRIVATE KEY-----\n",
}

func forTests(content string) (found []string) {
	for _, text := range testOnly {
		if bytes.Contains([]byte(content), []byte(text)) {
			found = append(found, text)
		}
	}
	return found
}
