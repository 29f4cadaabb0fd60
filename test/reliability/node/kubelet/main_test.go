// SPDX-License-Identifier: Apache-2.0

// Package kubelet tests for a long time how a real kubelet handles faults. The plugin has a
// software TPM, and the controller is the shipped one. kube-controller-manager takes a node without
// a heartbeat for lost.
package kubelet

import (
	"context"
	"os"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const module = "../../../.."

var built controllerprocess.KubeletPrograms

func TestMain(m *testing.M) {
	os.Exit(controllerprocess.MainWithKubelets(inCluster{m}, module, &built))
}

var shared *testbed.ControlPlane

// inCluster runs the tests in a cluster with the packaged manifests.
type inCluster struct{ *testing.M }

func (m inCluster) Run() int { return testbed.Main(m.M, setUp) }

func setUp(ctx context.Context, cp *testbed.ControlPlane, _ string) error {
	shared = cp
	for _, step := range []func() error{
		// The nodes' right to file requests, without the bindings that approve them.
		func() error {
			return cp.BindGroup(ctx, "bootstrap", "system:node-bootstrapper", testbed.BootstrapGroup)
		},
		func() error { return controllerprocess.Install(ctx, cp, module) },
		// It finds out about nodes without a heartbeat. It has no CA: our controller signs.
		func() error {
			return cp.StartControllerManager(ctx, "--controllers=node-lifecycle-controller", "--cluster-signing-cert-file=", "--cluster-signing-key-file=")
		},
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// newController starts the controller, which challenges and approves. It leaves the signing to
// another: by itself it issues nothing that is due at once.
func newController(t *testing.T) *controllerprocess.Controller {
	t.Helper()
	c, err := controllerprocess.New(controllerprocess.Options{
		ControlPlane: shared, Dir: t.TempDir(), Binary: built.Controller,
		Configure: func(c *config.Config) {
			c.Signing = config.Signing{Mode: config.ApproveOnly}
			c.Signers = []config.Signer{{Name: certificatesv1.KubeAPIServerClientKubeletSignerName, Shared: true}}
		},
	})
	harness.Must(t, err)
	start(t, c)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(c.LogTail())
		}
		if err := c.Stop(); err != nil {
			t.Error(err)
		}
	})
	return c
}

func start(t *testing.T, c *controllerprocess.Controller) {
	t.Helper()
	harness.Must(t, c.Start(t.Context()))
	harness.Must(t, c.Ready(t.Context()))
}

// node is a machine with a real kubelet.
type node struct {
	*harness.Machine
	kubelet *testbed.Kubelet
}

// newNode returns one that the inventory has, and that is ready. It has lost the token that it got
// its first certificate with.
func newNode(t *testing.T, name string) *node {
	t.Helper()
	n := &node{Machine: harness.NewMachine(t, built.Plugin, name, swtpm.Options{Certified: []string{"ecc-p256"}})}
	n.Signer = certificatesv1.KubeAPIServerClientKubeletSignerName
	harness.Must(t, controllerprocess.SetInventory(t.Context(), shared, harness.Inventory(t, n.Machine)))
	token, err := shared.CreateBootstrapToken(t.Context(), 10*time.Minute)
	harness.Must(t, err)
	harness.Must(t, shared.WriteKubeconfig(n.Bootstrap, testbed.TokenUser(token)))
	n.kubelet, err = testbed.StartKubelet(t.Context(), testbed.KubeletOptions{
		Components: built.Kubelet, NodeName: name,
		Kubeconfig: shared.ExecKubeconfig("client.authentication.k8s.io/v1", built.Plugin, n.Flags(), nil, true),
	})
	harness.Must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(n.kubelet.LogTail())
			if log, err := os.ReadFile(n.Certs().File(cache.LogFile)); err == nil {
				t.Logf("--- worker ---\n%s", log)
			}
		}
		if err := n.kubelet.Remove(); err != nil {
			t.Error(err)
		}
		harness.KillWorker(t, n.Certs())
	})
	harness.Eventually(t, time.Minute, name+" is ready", func() bool {
		why, err := harness.NotReady(t.Context(), shared.Client(), name)
		return err == nil && why == ""
	})
	harness.Must(t, os.Remove(n.Bootstrap))
	harness.WorkerEnds(t, n.Certs())
	return n
}

// pair is the certificate and the key that the plugin hands out.
func (n *node) pair(t *testing.T) *cache.Pair {
	t.Helper()
	pair, err := n.Certs().Current()
	harness.Must(t, err)
	return pair
}
