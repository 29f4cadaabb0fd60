// SPDX-License-Identifier: Apache-2.0

// Package doctor tests "kubelet-authenticator doctor" on a real control plane, with a software TPM.
package doctor

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// bed is what all tests of the package share. They run one after the other.
type bed struct {
	*testbed.ControlPlane
	plugin string
}

var shared *bed

func TestMain(m *testing.M) {
	os.Exit(testbed.Main(m, func(ctx context.Context, cp *testbed.ControlPlane, dir string) error {
		if err := os.Chmod(dir, 0o755); err != nil { // one test runs the plugin as another user
			return err
		}
		shared = &bed{cp, filepath.Join(dir, "kubelet-authenticator")}
		if err := compile.Program(ctx, "../..", shared.plugin, "./cmd/kubelet-authenticator"); err != nil {
			return err
		}
		return cp.BindKubeadmBootstrap(ctx)
	}))
}
