// SPDX-License-Identifier: Apache-2.0

// Package tpm tests nodes whose TPM is in trouble: absent, in use, reset, locked out, busy, full,
// or hanging. Each ends with a certificate, or with a reason that names the command and its answer.
package tpm

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// What all tests of the package share.
var (
	cluster *testbed.ControlPlane
	plugin  string
)

func TestMain(m *testing.M) {
	testbed.Parallel(6) // they wait for back-offs
	os.Exit(testbed.Main(m, func(ctx context.Context, cp *testbed.ControlPlane, dir string) error {
		cluster, plugin = cp, filepath.Join(dir, "kubelet-authenticator")
		if err := compile.Program(ctx, "../../..", plugin, "./cmd/kubelet-authenticator"); err != nil {
			return err
		}
		return cp.BindKubeadmBootstrap(ctx)
	}))
}
