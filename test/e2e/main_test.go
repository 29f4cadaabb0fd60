// SPDX-License-Identifier: Apache-2.0

// Package e2e tests the plugin against a real control plane.
package e2e

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const builtinSigner = "kubernetes.io/kube-apiserver-client-kubelet"

// bed has what all tests of the package share.
//
// Tests that need kube-controller-manager, or the audit log, run one after the other. Then the
// parallel ones run: those whose requests the attestor answers, and TestSignerIsAway, which stops
// kube-controller-manager.
type bed struct {
	*testbed.ControlPlane
	// plugin is the product, testPlugin is built from the library with a provider that renews, and
	// client is a client-go program.
	plugin, testPlugin, client string
}

var shared *bed

func TestMain(m *testing.M) {
	testbed.Parallel(6) // they wait for slow TPMs and for back-offs
	os.Exit(testbed.Main(m, func(ctx context.Context, cp *testbed.ControlPlane, dir string) error {
		shared = &bed{cp, filepath.Join(dir, "kubelet-authenticator"), filepath.Join(dir, "testplugin"), filepath.Join(dir, "client")}
		for _, build := range []struct{ module, output, pkg string }{
			{"../..", shared.plugin, "./cmd/kubelet-authenticator"},
			{"..", shared.testPlugin, "./testplugin"},
			{"..", shared.client, "./e2e/client"},
		} {
			if err := compile.Program(ctx, build.module, build.output, build.pkg); err != nil {
				return err
			}
		}
		if err := cp.BindKubeadmBootstrap(ctx); err != nil {
			return err
		}
		return cp.StartControllerManager(ctx)
	}))
}
