// SPDX-License-Identifier: Apache-2.0

// Package upgrade upgrades plugin and controller from an earlier commit, in each order, and
// downgrades them again. It uses a real API server, with the manifests, records, configuration and
// state files of that commit. `make test-upgrade` runs it, and `make test-all` by it.
package upgrade

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/earlier"
)

const module = "../.."

// before and now are the two releases, and maker makes all TPMs.
var (
	before, now earlier.Release
	maker       *swtpm.CA
)

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	commit := os.Getenv(earlier.Variable)
	if commit == "" {
		fmt.Fprintln(os.Stderr, "upgrade: SKIPPED, NO UPGRADE WAS TESTED: run make test-upgrade")
		return 0
	}
	dir, err := os.MkdirTemp("", "upgrade-")
	if err == nil {
		defer func() { _ = os.RemoveAll(dir) }()
		err = build(context.Background(), commit, dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "upgrade:", err)
		return 1
	}
	return m.Run()
}

func build(ctx context.Context, commit, dir string) (err error) {
	if os.Geteuid() != 0 {
		return errors.New("the mount namespaces of nodes need root")
	}
	if before, err = earlier.Build(ctx, module, commit, filepath.Join(dir, "before")); err != nil {
		return err
	}
	now = earlier.In(filepath.Join(dir, "now"), "this release")
	now.Module = module
	if err := os.MkdirAll(filepath.Dir(now.Plugin), 0o700); err != nil {
		return err
	}
	if err := compile.Program(ctx, module, now.Plugin, "./cmd/kubelet-authenticator"); err != nil {
		return err
	}
	if err := controllerprocess.Build(ctx, module, now.Controller); err != nil {
		return err
	}
	maker, err = swtpm.NewCA()
	return err
}
