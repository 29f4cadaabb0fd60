// SPDX-License-Identifier: Apache-2.0

// Package e2e tests the plugin against a real control plane.
package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const builtinSigner = "kubernetes.io/kube-apiserver-client-kubelet"

// bed is what all tests of the package share. They run one after the other.
type bed struct {
	*testbed.ControlPlane
	// plugin is the product, testPlugin is built from the library with a provider that renews, and client is a client-go program.
	plugin, testPlugin, client string
}

var shared *bed

func TestMain(m *testing.M) {
	code, err := runAll(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		code = 1
	}
	os.Exit(code)
}

func runAll(m *testing.M) (code int, err error) {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "e2e-")
	if err != nil {
		return 0, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	b := &bed{plugin: filepath.Join(dir, "kubelet-authenticator"), testPlugin: filepath.Join(dir, "testplugin"), client: filepath.Join(dir, "client")}
	for _, build := range []struct{ module, output, pkg string }{
		{"../..", b.plugin, "./cmd/kubelet-authenticator"},
		{"..", b.testPlugin, "./testplugin"},
		{"..", b.client, "./e2e/client"},
	} {
		if err := testbed.GoBuild(ctx, build.module, build.output, build.pkg); err != nil {
			return 0, err
		}
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
	if err := b.StartControllerManager(ctx); err != nil {
		return 0, err
	}
	shared = b
	return m.Run(), nil
}
