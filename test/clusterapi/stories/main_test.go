// SPDX-License-Identifier: Apache-2.0

// Package stories tests node attestation with Cluster API as users run it. Cluster API's own
// managers and node-attestation-controller serve the management cluster. Machines run the unchanged
// bootstrap data with cloud-init and kubeadm. Only the infrastructure provider is made for tests:
// package metal, with hosts in systemd-nspawn. The tests run in Linux namespaces of their own, and
// need root.
//
//	func TestExample(t *testing.T) {
//		full(t)                        // only make test-clusterapi runs this story
//		t.Parallel()                   // unless it stops a process that stories share
//		s := newStory(t, nil)          // a namespace, and a controller for it
//		c := s.newCluster(t, "one")    // a Cluster with an API server of its own
//		d := c.newMachineDeployment(t, "workers", nil)
//		d.scale(t, 3)
//		d.awaitRunning(t, 3)           // phase Running, Nodes Ready, and a record each
//		d.scale(t, 1)
//		d.awaitRunning(t, 1)           // the others are gone, with their records and hosts
//	}
//
// A story changes objects as a user does: s.client is for the management cluster, c.workload for
// the Nodes. It can kill s.controller and start it again. shared.clusterAPI has the managers, and
// shared.hosts the machines. At its end a story deletes its Clusters. It fails if Clusters,
// Machines, MetalMachines or records are left.
package stories

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/go-logr/logr"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal/nspawn"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	module = "../../.."
	// parallel is how many stories run at once: each booting machine uses a processor for seconds.
	parallel = 2
)

// full skips a story that is only for make test-clusterapi.
func full(t *testing.T) {
	t.Helper()
	testbed.Full(t)
}

// programs are the binaries that the tests start.
type programs struct {
	controller string
	node       nspawn.Programs
	clusterAPI compile.ClusterAPIComponents
	clusterctl string
}

var built programs

func TestMain(m *testing.M) {
	ctrl.SetLogger(logr.Discard()) // discard the logs of the provider Metal
	controller := func(dir string) string { return filepath.Join(dir, "node-attestation-controller") }
	build := func(ctx context.Context, dir string) error {
		return errors.Join(nspawn.Build(ctx, module, dir), controllerprocess.Build(ctx, module, controller(dir)))
	}
	os.Exit(testbed.MainIsolated(withBed{m}, parallel, build, func(ctx context.Context, dir string) (err error) {
		built.controller = controller(dir)
		if built.clusterAPI, err = compile.ClusterAPI(ctx, os.Stderr); err != nil {
			return err
		}
		if built.clusterctl, err = compile.Clusterctl(ctx, os.Stderr); err != nil {
			return err
		}
		built.node, err = nspawn.Find(ctx, module, dir)
		return err
	}))
}

// withBed starts the test bed before the tests, and stops it after them.
type withBed struct{ *testing.M }

func (m withBed) Run() int {
	var err error
	if shared, err = newBed(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "stories:", err)
		return 1
	}
	code := m.M.Run()
	if err := shared.stop(); err != nil {
		fmt.Fprintln(os.Stderr, "stories:", err)
		return 1
	}
	return code
}
