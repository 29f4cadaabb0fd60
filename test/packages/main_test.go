// SPDX-License-Identifier: Apache-2.0

// Package packages tests what a release is made of: the artifacts of "make packages", by the tools
// that install them.
package packages

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	module  = "../.."
	version = "v1.2.3-rc.1"
)

// dist has the artifacts.
var dist string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	var err error
	if dist, err = os.MkdirTemp("", "dist-"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = os.RemoveAll(dist) }()
	if err := testbed.MakePackages(context.Background(), module, dist, "VERSION="+version); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// artifact is a file to install from.
type artifact struct {
	file, format string
	// arch is Go's name of the architecture.
	arch string
}

var artifacts = []artifact{
	{"kubelet-authenticator_1.2.3.rc.1-1_amd64.deb", "deb", "amd64"},
	{"kubelet-authenticator_1.2.3.rc.1-1_arm64.deb", "deb", "arm64"},
	{"kubelet-authenticator-1.2.3.rc.1-1.x86_64.rpm", "rpm", "amd64"},
	{"kubelet-authenticator-1.2.3.rc.1-1.aarch64.rpm", "rpm", "arm64"},
	{"kubelet-authenticator-1.2.3-rc.1-linux-amd64.tar.gz", "tar", "amd64"},
	{"kubelet-authenticator-1.2.3-rc.1-linux-arm64.tar.gz", "tar", "arm64"},
	{"kubelet-authenticator-1.2.3-rc.1-x86-64.raw", "sysext", "amd64"},
	{"kubelet-authenticator-1.2.3-rc.1-arm64.raw", "sysext", "arm64"},
}

func (a artifact) path() string { return filepath.Join(dist, a.file) }

// each runs a test with each artifact of the formats.
func each(t *testing.T, formats []string, test func(*testing.T, artifact)) {
	t.Helper()
	for _, format := range formats {
		for _, a := range artifacts {
			if a.format == format {
				t.Run(a.file, func(t *testing.T) {
					t.Parallel()
					test(t, a)
				})
			}
		}
	}
}

// command runs one, and returns its standard output.
func command(t *testing.T, name string, args ...string) string {
	t.Helper()
	return commandIn(t, "", name, args...)
}

func commandIn(t *testing.T, dir, name string, args ...string) string {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, &stdout, &stderr
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s %q: %v\n%s%s", name, args, err, &stdout, &stderr)
	}
	return stdout.String()
}

// unpack returns a folder with what the artifact installs.
func (a artifact) unpack(t *testing.T) string {
	t.Helper()
	return unpack(t, a.format, a.path())
}

func unpack(t *testing.T, format, path string) string {
	t.Helper()
	dir := t.TempDir()
	switch format {
	case "deb":
		command(t, "dpkg-deb", "--extract", path, dir)
	case "rpm":
		command(t, "bash", "-o", "pipefail", "-c", `rpm2archive - <"$1" | tar --extract --gzip --preserve-permissions --directory="$2"`, "bash", path, dir)
	case "tar":
		command(t, "tar", "--extract", "--preserve-permissions", "--directory="+dir, "--file="+path)
	case "sysext":
		command(t, "unsquashfs", "-force", "-no-progress", "-dest", dir, path)
	default:
		t.Fatalf("%s: unknown format %s", path, format)
	}
	return dir
}
