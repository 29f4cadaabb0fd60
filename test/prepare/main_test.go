// SPDX-License-Identifier: Apache-2.0

// Package prepare tests what the plugin does around the kubelet's start, on a real control plane:
// prepare, kubeconfig and reset.
package prepare

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// bed is what all tests share.
type bed struct {
	*testbed.ControlPlane
	plugin string
}

var shared *bed

func TestMain(m *testing.M) {
	code, err := runAll(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "prepare:", err)
		code = 1
	}
	os.Exit(code)
}

func runAll(m *testing.M) (code int, err error) {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "prepare-")
	if err != nil {
		return 0, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	b := &bed{plugin: filepath.Join(dir, "kubelet-authenticator")}
	if err := compile.Program(ctx, "../..", b.plugin, "./cmd/kubelet-authenticator"); err != nil {
		return 0, err
	}
	if b.ControlPlane, err = startCluster(ctx); err != nil {
		return 0, err
	}
	defer func() {
		if stopErr := b.Stop(); err == nil {
			err = stopErr
		}
	}()
	shared = b
	return m.Run(), nil
}

// startCluster starts an API server whose bootstrap tokens may file requests. Nobody answers them
// but the tests.
func startCluster(ctx context.Context) (*testbed.ControlPlane, error) {
	cp, err := testbed.Start(ctx, testbed.Options{Progress: os.Stderr})
	if err != nil {
		return nil, err
	}
	if err := cp.BindGroup(ctx, "bootstrap", "system:node-bootstrapper", testbed.BootstrapGroup); err != nil {
		_ = cp.Stop()
		return nil, err
	}
	return cp, nil
}
