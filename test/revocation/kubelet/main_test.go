// SPDX-License-Identifier: Apache-2.0

// Package kubelet tests revocation with real kubelets. A kubelet's kubeconfig names the plugin. The
// suite has a software TPM, the shipped controller, and two API servers of one cluster. The package
// stories has simulated nodes.
package kubelet

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	module = "../../.."
	// checkInterval is the shortest that the plugin takes.
	checkInterval = 10 * time.Second
)

var built controllerprocess.KubeletPrograms

// bed is what all tests of the package share. They run at once.
type bed struct {
	*testbed.ControlPlane
	// second is another API server of the same cluster.
	second     *testbed.APIServer
	controller *controllerprocess.Controller
	client     client.Client

	inventory controllerprocess.Machines
}

var shared *bed

func TestMain(m *testing.M) {
	os.Exit(controllerprocess.MainWithKubelets(inCluster{m}, module, &built, "kubectl-attest"))
}

// inCluster runs the tests in a cluster with revocation.
type inCluster struct{ *testing.M }

func (m inCluster) Run() int { return testbed.Main(withController(m), setUp) }

// withController runs the tests, and then ends the controller.
type withController struct{ *testing.M }

func (m withController) Run() int {
	code := m.M.Run()
	if code != 0 {
		fmt.Fprintln(os.Stderr, shared.controller.LogTail())
	}
	if err := shared.controller.Stop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

func setUp(ctx context.Context, cp *testbed.ControlPlane, dir string) (err error) {
	b := &bed{ControlPlane: cp}
	scheme := runtime.NewScheme()
	for _, step := range []func() error{
		func() (err error) { b.second, err = b.AddAPIServer(ctx); return err },
		// The nodes' right to file requests, without the bindings that approve them.
		func() error { return b.BindGroup(ctx, "bootstrap", "system:node-bootstrapper", testbed.BootstrapGroup) },
		func() error { return controllerprocess.Install(ctx, cp, module) },
		func() error { return controllerprocess.InstallRevocation(ctx, cp, module) },
		// It finds out about nodes without a heartbeat. It has no CA: our controller signs.
		func() error {
			return b.StartControllerManager(ctx, "--controllers=node-lifecycle-controller", "--cluster-signing-cert-file=", "--cluster-signing-key-file=")
		},
		func() error { return errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)) },
		func() (err error) {
			b.client, err = client.New(b.AdminConfig(), client.Options{Scheme: scheme})
			return err
		},
		func() (err error) {
			b.controller, err = controllerprocess.New(controllerprocess.Options{
				ControlPlane: cp, Dir: dir, Binary: built.Controller, Args: []string{"--revocation"},
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
	shared = b
	return nil
}

// admit adds machines to the inventory.
func (b *bed) admit(t *testing.T, documents []byte) {
	t.Helper()
	harness.Must(t, b.inventory.Add(t.Context(), b.ControlPlane, documents))
}

// node is a machine with a real kubelet.
type node struct {
	*harness.KubeletNode
}

// newNode returns one that is ready, and has lost the token that it got its first certificate with.
func newNode(t *testing.T, name string) *node {
	t.Helper()
	m := harness.NewMachine(t, built.Plugin, name, swtpm.Options{Certified: []string{"ecc-p256"}})
	return &node{harness.StartKubeletNode(t, m, harness.KubeletNodeOptions{
		Cluster: shared.ControlPlane, Components: built.Kubelet, CheckInterval: checkInterval, Admit: shared.admit,
	})}
}
