// SPDX-License-Identifier: Apache-2.0

// Package authorizer tests node-attestation-controller authorizer. Three real API servers of one
// cluster ask it, each its own one. The nodes are real kubelets.
package authorizer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
)

const module = "../.."

// programs are the paths of what the tests start.
type programs struct {
	plugin, controller string
	commands           string // the folder with kubectl-attest
	kubelet            compile.KubeletComponents
}

var built programs

// bed is what all tests of the package share. They run at once.
type bed struct {
	*testbed.ControlPlane
	// servers are API servers of one cluster. The first two are for the test of a stolen key. The
	// third is for the test that breaks its authorizer.
	servers     [3]*testbed.APIServer
	authorizers [3]*controllerprocess.Authorizer
	controller  *controllerprocess.Controller

	mu        sync.Mutex
	inventory bytes.Buffer
}

var shared *bed

func TestMain(m *testing.M) {
	build := func(ctx context.Context, dir string) error {
		made := programsIn(dir)
		return errors.Join(
			os.Mkdir(made.commands, 0o700),
			compile.Program(ctx, module, made.plugin, "./cmd/kubelet-authenticator"),
			compile.Program(ctx, module, filepath.Join(made.commands, "kubectl-attest"), "./cmd/kubectl-attest"),
			controllerprocess.Build(ctx, module, made.controller))
	}
	os.Exit(testbed.MainIsolated(inCluster{m}, 4, build, func(ctx context.Context, dir string) (err error) {
		built = programsIn(dir)
		built.kubelet, err = compile.Kubelet(ctx, os.Stderr)
		return err
	}))
}

func programsIn(dir string) programs {
	return programs{plugin: filepath.Join(dir, "kubelet-authenticator"), controller: filepath.Join(dir, "node-attestation-controller"), commands: filepath.Join(dir, "commands")}
}

// inCluster runs the tests in a cluster with revocation, and with authorizers.
type inCluster struct{ *testing.M }

func (m inCluster) Run() int {
	code, err := m.run(context.Background())
	if err != nil {
		fmt.Fprintln(os.Stderr, "authorizer:", err)
		return 1
	}
	return code
}

func (m inCluster) run(ctx context.Context) (code int, err error) {
	dir, err := os.MkdirTemp("", "tests-")
	if err != nil {
		return 0, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	b := &bed{}
	for i := range b.authorizers {
		files := filepath.Join(dir, fmt.Sprintf("authorizer-%d", i))
		if err := os.Mkdir(files, 0o700); err != nil {
			return 0, err
		}
		if b.authorizers[i], err = controllerprocess.NewAuthorizer(module, files, built.controller); err != nil {
			return 0, err
		}
	}
	// No authorizer runs yet: an API server has to start without it.
	b.ControlPlane, err = testbed.Start(ctx, testbed.Options{Progress: os.Stderr, APIServerArgs: []string{b.authorizers[0].APIServerArg()}})
	if err != nil {
		return 0, err
	}
	defer func() {
		for _, a := range b.authorizers {
			err = errors.Join(err, a.Kill())
		}
		err = errors.Join(err, b.Stop())
	}()
	if err := b.setUp(ctx, dir); err != nil {
		return 0, err
	}
	shared = b
	code = m.M.Run()
	if code != 0 {
		fmt.Fprintln(os.Stderr, b.controller.LogTail())
		for _, a := range b.authorizers {
			fmt.Fprintln(os.Stderr, a.Process().LogTail())
		}
	}
	return code, b.controller.Stop()
}

func (b *bed) setUp(ctx context.Context, dir string) (err error) {
	b.servers[0] = b.APIServer()
	for i := 1; i < len(b.servers); i++ {
		if b.servers[i], err = b.AddAPIServer(ctx, b.authorizers[i].APIServerArg()); err != nil {
			return err
		}
	}
	for _, step := range []func() error{
		// The nodes' right to file requests, without the bindings that approve them.
		func() error { return b.BindGroup(ctx, "bootstrap", "system:node-bootstrapper", testbed.BootstrapGroup) },
		func() error { return controllerprocess.Install(ctx, b.ControlPlane, module) },
		func() error { return controllerprocess.InstallRevocation(ctx, b.ControlPlane, module) },
		func() error { return controllerprocess.InstallAuthorizer(ctx, b.ControlPlane, module) },
		func() (err error) {
			b.controller, err = controllerprocess.New(controllerprocess.Options{
				ControlPlane: b.ControlPlane, Dir: dir, Binary: built.controller, Args: []string{"--revocation"},
				Configure: func(c *config.Config) { c.LeaderElection.Enabled = false },
			})
			return err
		},
		func() error { return b.controller.Start(ctx) },
		func() error { return b.controller.Ready(ctx) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	for i := range b.authorizers {
		if err := b.startAuthorizer(ctx, i); err != nil {
			return err
		}
	}
	return nil
}

// startAuthorizer starts the authorizer of an API server, which reads the lists from that one.
func (b *bed) startAuthorizer(ctx context.Context, i int) error {
	kubeconfig, err := controllerprocess.AuthorizerKubeconfig(b.ControlPlane, b.servers[i])
	if err != nil {
		return err
	}
	return b.authorizers[i].Start(ctx, kubeconfig)
}

// admit adds machines to the inventory.
func (b *bed) admit(t *testing.T, documents []byte) {
	t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.inventory.Write(documents)
	harness.Must(t, controllerprocess.SetInventory(t.Context(), b.ControlPlane, b.inventory.Bytes()))
}
