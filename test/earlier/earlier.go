// SPDX-License-Identifier: Apache-2.0

// Package earlier builds plugin and controller of an earlier commit of this repository, for tests
// that upgrade and downgrade. `make test-all` runs these tests by `make test-upgrade`, if the clone
// has the commit.
package earlier

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
)

// Variable names the environment variable with the commit, or the tag. Without it these tests are
// skipped.
const Variable = "KUBELET_AUTHENTICATOR_TEST_UPGRADE_FROM"

// Release is the product of one commit.
type Release struct {
	// Name is for messages, such as "e670793".
	Name string
	// Module is the folder with its sources and manifests.
	Module string
	// Plugin and Controller are the paths of its programs.
	Plugin, Controller string
}

// Build creates a folder with a release's sources, and builds its programs there. module is the top
// folder of the repository.
func Build(ctx context.Context, module, commit, dir string) (Release, error) {
	r := In(dir, commit)
	if err := find(ctx, module, commit); err != nil {
		return r, err
	}
	if err := os.MkdirAll(r.Module, 0o700); err != nil {
		return r, err
	}
	const unpack = `git -C "$1" archive --format=tar "$2" | tar -x -C "$3"`
	if out, err := exec.CommandContext(ctx, "bash", "-o", "pipefail", "-c", unpack, "bash", module, commit, r.Module).CombinedOutput(); err != nil { //nolint:gosec // G204: the developer names the commit
		return r, fmt.Errorf("unpack %s: %w\n%s", commit, err, out)
	}
	const path = "github.com/kubelet-authenticator/kubelet-authenticator/cmd/"
	return r, errors.Join(
		compile.Program(ctx, r.Module, r.Plugin, path+"kubelet-authenticator"), compile.Program(ctx, r.Module, r.Controller, path+"node-attestation-controller"),
	)
}

// In returns what Build puts into a folder.
func In(dir, commit string) Release {
	return Release{
		Name: commit, Module: filepath.Join(dir, "source"), Plugin: filepath.Join(dir, "kubelet-authenticator"), Controller: filepath.Join(dir, "node-attestation-controller"),
	}
}

// find checks that the repository has the commit, and says what to do if it does not.
func find(ctx context.Context, module, commit string) error {
	git := func(args ...string) (string, error) {
		out, err := exec.CommandContext(ctx, "git", append([]string{"-C", module}, args...)...).CombinedOutput() //nolint:gosec // G204: the developer names the commit
		return strings.TrimSpace(string(out)), err
	}
	// The sources may be a folder within somebody else's repository.
	if prefix, err := git("rev-parse", "--show-prefix"); err != nil || prefix != "" {
		return fmt.Errorf("upgrades from %s cannot be tested: these sources are no git repository. Run this in a clone of the repository", commit)
	}
	if _, err := git("rev-parse", "--verify", "--quiet", "--end-of-options", commit+"^{commit}"); err == nil {
		return nil
	}
	hint := "Run git fetch --tags"
	if shallow, err := git("rev-parse", "--is-shallow-repository"); err == nil && shallow == "true" {
		hint = "It is a shallow clone: run git fetch --unshallow --tags"
	}
	return fmt.Errorf("upgrades from %s cannot be tested: this repository lacks the commit. %s", commit, hint)
}
