// SPDX-License-Identifier: Apache-2.0

// Package doctor tests "kubelet-authenticator doctor" on a real control plane, with a software TPM.
package doctor

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// bed is what all tests of the package share. They run one after the other.
type bed struct {
	*testbed.ControlPlane
	plugin string
}

var shared *bed

func TestMain(m *testing.M) {
	code, err := runAll(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "doctor:", err)
		code = 1
	}
	os.Exit(code)
}

func runAll(m *testing.M) (code int, err error) {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "doctor-")
	if err != nil {
		return 0, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if err := os.Chmod(dir, 0o755); err != nil { // one test runs the plugin as another user
		return 0, err
	}
	b := &bed{plugin: filepath.Join(dir, "kubelet-authenticator")}
	if err := testbed.GoBuild(ctx, "../..", b.plugin, "./cmd/kubelet-authenticator"); err != nil {
		return 0, err
	}
	if b.ControlPlane, err = testbed.Start(ctx, testbed.Options{Progress: os.Stderr}); err != nil {
		return 0, err
	}
	defer func() {
		if stopErr := b.Stop(); err == nil {
			err = stopErr
		}
	}()
	if err := b.BindKubeadmBootstrap(ctx); err != nil {
		return 0, err
	}
	shared = b
	return m.Run(), nil
}
