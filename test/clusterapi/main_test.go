// SPDX-License-Identifier: Apache-2.0

// Package clusterapi tests the shipped node-attestation-controller in Cluster API management
// clusters. It uses real API servers with Cluster API's own CustomResourceDefinitions. Cluster
// API's controllers do not run: each test plays them. Each workload cluster has an API server of
// its own. The plugin is the real one, with software TPMs.
//
//	w := newWorld(t, shared.management)     // a namespace
//	c := w.newCluster(t, "c", nil)          // a Cluster, its API server and its Secrets
//	w.start(t, nil)                         // the controller, for that namespace
//	m := c.newMachine(t, "m", nil)          // a computer with a TPM, and its Machine
//	m.enrols(t)                             // by the plugin
//
// Tests call t.Parallel where nothing speaks against it: they mostly wait.
package clusterapi

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	module = "../.."
	// parallel tests mostly wait.
	parallel = 6
)

// bed has what all tests of the package share.
type bed struct {
	management         *management
	workloads          pool
	plugin, controller string
	// built returns when the plugin and the controller are built.
	built func() error
	// maker makes all TPMs.
	maker *swtpm.CA
}

var shared *bed

func TestMain(m *testing.M) {
	ctrl.SetLogger(logr.Discard()) // what a client has to say, such as that a kind is deprecated
	testbed.Parallel(parallel)
	os.Exit(testbed.Main(m, func(ctx context.Context, cp *testbed.ControlPlane, dir string) error {
		b := &bed{plugin: filepath.Join(dir, "kubelet-authenticator"), controller: filepath.Join(dir, "node-attestation-controller")}
		shared = b
		b.workloads = pool{etcd: cp, starting: make(chan struct{}, 3)}
		b.built = sync.OnceValue(func() error {
			return errors.Join(
				compile.Program(ctx, module, b.plugin, "./cmd/kubelet-authenticator"), controllerprocess.Build(ctx, module, b.controller),
			)
		})
		go func() { _ = b.built() }() // a test that needs it asks again
		return b.setUp(ctx, cp)
	}))
}

func (b *bed) setUp(ctx context.Context, cp *testbed.ControlPlane) (err error) {
	if b.maker, err = swtpm.NewCA(); err != nil {
		return err
	}
	b.management, err = newManagement(ctx, cp)
	return err
}

// world is one test's part of a management cluster: a namespace, its clusters, and the controllers
// that serve it.
type world struct {
	*management
	namespace string

	mu          sync.Mutex
	controllers []*controllerprocess.Controller
	workloads   []*workload
}

// newWorld makes a namespace. When the test has ended, first all controllers end, and then others
// may have the workload clusters.
func newWorld(t *testing.T, m *management) *world {
	t.Helper()
	w := &world{management: m, namespace: m.newNamespace(t)}
	w.ends(t)
	return w
}

// ends ends the world with the test.
func (w *world) ends(t *testing.T) {
	t.Helper()
	t.TempDir() // before the cleanup, so that directories go after it
	t.Cleanup(func() {
		for _, c := range w.controllers {
			if t.Failed() {
				t.Logf("controller: %s", c.LogTail())
			}
			checkLog(t, c)
		}
		for _, workload := range w.workloads {
			shared.workloads.giveBack(context.WithoutCancel(t.Context()), workload)
		}
	})
}

// decided is the longest time until a decision after its cause. slack is what a busy machine may
// add.
const (
	decided = 2 * time.Second
	slack   = 6 * time.Second
)

// follows checks the time that a step took.
func follows(t *testing.T, what string, since time.Time) {
	t.Helper()
	took := time.Since(since)
	t.Logf("%s: %s", what, took.Round(time.Millisecond))
	if took > decided+slack {
		t.Errorf("%s: after %s, not within %s", what, took, decided)
	}
}

var names struct {
	sync.Mutex
	count int
}

// unique returns a name that no other test has.
func unique(prefix string) string {
	names.Lock()
	defer names.Unlock()
	names.count++
	return fmt.Sprintf("%s-%d", prefix, names.count)
}
