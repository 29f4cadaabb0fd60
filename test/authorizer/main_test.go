// SPDX-License-Identifier: Apache-2.0

// Package authorizer tests node-attestation-controller authorizer. Three real API servers of one
// cluster ask it, each its own one. The nodes are real kubelets.
package authorizer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-logr/logr"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
)

const module = "../.."

var built controllerprocess.KubeletPrograms

// bed is a cluster with revocation, and with an authorizer for each of its API servers.
type bed struct {
	*testbed.ControlPlane
	servers     []*testbed.APIServer
	authorizers []*controllerprocess.Authorizer
	controller  *controllerprocess.Controller
	// authorizerArgs are added to the command line of each authorizer.
	authorizerArgs []string

	inventory controllerprocess.Machines
}

// shared is the cluster of most tests, which run at once. The first two API servers are for the
// test of a stolen key. The third is for the test that breaks its authorizer.
var shared *bed

func TestMain(m *testing.M) {
	ctrl.SetLogger(logr.Discard()) // what a client has to say, such as that a kind is deprecated
	os.Exit(controllerprocess.MainWithKubelets(inCluster{m}, module, &built, "kubectl-attest"))
}

// inCluster runs the tests in a cluster that they share.
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
	if shared, err = newBed(ctx, dir, 3); err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, shared.end()) }()
	code = m.M.Run()
	if code != 0 {
		fmt.Fprintln(os.Stderr, shared.logTails())
	}
	return code, nil
}

// newBed starts a cluster with a number of API servers. dir takes its files.
func newBed(ctx context.Context, dir string, servers int, authorizerArgs ...string) (_ *bed, err error) {
	b := &bed{authorizerArgs: authorizerArgs}
	for i := range servers {
		files := filepath.Join(dir, fmt.Sprintf("authorizer-%d", i))
		if err := os.Mkdir(files, 0o700); err != nil {
			return nil, err
		}
		a, err := controllerprocess.NewAuthorizer(module, files, built.Controller)
		if err != nil {
			return nil, err
		}
		b.authorizers = append(b.authorizers, a)
	}
	// No authorizer runs yet: an API server has to start without it.
	b.ControlPlane, err = testbed.Start(ctx, testbed.Options{Progress: os.Stderr, APIServerArgs: []string{b.authorizers[0].APIServerArg()}})
	if err != nil {
		return nil, err
	}
	if err := b.setUp(ctx, dir); err != nil {
		return nil, errors.Join(err, b.end())
	}
	return b, nil
}

// end ends all processes of the cluster.
func (b *bed) end() (err error) {
	if b.controller != nil { // nil if an earlier step failed
		err = b.controller.Stop()
	}
	for _, a := range b.authorizers {
		err = errors.Join(err, a.Kill())
	}
	return errors.Join(err, b.Stop())
}

// logTails are the ends of the product's logs, for the message of a failure.
func (b *bed) logTails() string {
	tails := b.controller.LogTail()
	for _, a := range b.authorizers {
		tails += a.Process().LogTail()
	}
	return tails
}

func (b *bed) setUp(ctx context.Context, dir string) (err error) {
	b.servers = []*testbed.APIServer{b.APIServer()}
	for _, a := range b.authorizers[1:] {
		server, err := b.AddAPIServer(ctx, a.APIServerArg())
		if err != nil {
			return err
		}
		b.servers = append(b.servers, server)
	}
	for _, step := range []func() error{
		// The nodes' right to file requests, without the bindings that approve them.
		func() error { return b.BindGroup(ctx, "bootstrap", "system:node-bootstrapper", testbed.BootstrapGroup) },
		func() error { return controllerprocess.Install(ctx, b.ControlPlane, module) },
		func() error { return controllerprocess.InstallRevocation(ctx, b.ControlPlane, module) },
		func() error { return controllerprocess.InstallAuthorizer(ctx, b.ControlPlane, module) },
		func() (err error) {
			b.controller, err = controllerprocess.New(controllerprocess.Options{
				ControlPlane: b.ControlPlane, Dir: dir, Binary: built.Controller, Args: []string{"--revocation"},
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
	return b.authorizers[i].Start(ctx, kubeconfig, b.authorizerArgs...)
}

// awaitLive waits until an authorizer has read the lists from its API server, and watches them.
func awaitLive(t *testing.T, a *controllerprocess.Authorizer) {
	t.Helper()
	harness.Eventually(t, harness.Soon, "the authorizer watches records", func() bool {
		metrics, err := a.Metrics(t.Context())
		return err == nil && strings.Contains(metrics, "\nnode_attestation_authorizer_list_age_seconds 0\n")
	})
}

// admit adds machines to the inventory.
func (b *bed) admit(t *testing.T, documents []byte) {
	t.Helper()
	harness.Must(t, b.inventory.Add(t.Context(), b.ControlPlane, documents))
}
