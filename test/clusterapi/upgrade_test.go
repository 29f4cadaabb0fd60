// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/earlier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// upgraded is a management cluster and a workload cluster whose manifests, controller and plugins
// are replaced.
type upgraded struct {
	*world
	workload   *workload
	controller *controllerprocess.Controller
	// binary is the path of the controller's program, of any release.
	binary string
}

// apply applies a release's manifests, those of the workload cluster first.
func (u *upgraded) apply(ctx context.Context, release earlier.Release) error {
	for _, part := range []struct {
		*testbed.ControlPlane
		kustomization string
	}{{u.workload.ControlPlane, "workload"}, {u.ControlPlane, "management"}} {
		admin := filepath.Join(part.Dir(), "install.kubeconfig")
		if err := part.WriteKubeconfig(admin, part.AdminUser()); err != nil {
			return err
		}
		folder := filepath.Join(release.Module, "packaging", "cluster-api", part.kustomization)
		if _, err := part.RunKubectl(ctx, admin, "apply", "--server-side", "--kustomize="+folder); err != nil {
			return err
		}
	}
	return controllerprocess.AwaitPolicies(ctx, u.workload.ControlPlane)
}

// starts starts a release's controller.
func (u *upgraded) starts(t *testing.T, release earlier.Release) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), "cp", "--", release.Controller, u.binary).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	harness.Must(t, u.controller.Start(t.Context()))
	harness.Must(t, u.controller.Ready(t.Context()))
}

func newUpgraded(t *testing.T, release earlier.Release) *upgraded {
	t.Helper()
	start := func(options testbed.Options) *testbed.ControlPlane {
		options.Etcd = shared.management.ControlPlane
		cp, err := testbed.Start(t.Context(), options)
		harness.Must(t, err)
		t.Cleanup(func() {
			if err := cp.Stop(); err != nil {
				t.Error(err)
			}
		})
		return cp
	}
	m := &management{ControlPlane: start(testbed.Options{})}
	u := &upgraded{workload: &workload{ControlPlane: start(testbed.Options{AuditPolicy: []byte(auditPolicy)})}, binary: filepath.Join(t.TempDir(), "node-attestation-controller")}
	u.world = &world{management: m}
	crds, err := readCRDs(t.Context())
	harness.Must(t, err)
	harness.Must(t, m.InstallCRDs(t.Context(), crds...))
	harness.Must(t, u.workload.BindKubeadmBootstrap(t.Context()))
	harness.Must(t, u.apply(t.Context(), release))
	var problem error
	m.client, err = newClient(m.ControlPlane)
	u.workload.client, problem = newClient(u.workload.ControlPlane)
	harness.Must(t, errors.Join(err, problem))
	u.namespace = m.newNamespace(t)
	u.ends(t)
	// Written once: the file is read by both releases.
	u.controller = u.newController(t, u.binary, func(file map[string]any) {
		shortLived(file)
		clusterAPI(file)["unattestedControlPlanes"], clusterAPI(file)["nodeNames"] = true, []any{"MachineName"}
	})
	return u
}

// The halves are upgraded one by one in a management cluster, and downgraded. Each time a node
// renews by the record that the releases before have written into the namespace of its Cluster, and
// another one is new.
func TestUpgradeClusterAPI(t *testing.T) {
	commit := os.Getenv(earlier.Variable)
	if commit == "" {
		t.Skip("make test-upgrade runs it")
	}
	before, err := earlier.Build(t.Context(), module, commit, filepath.Join(t.TempDir(), "before"))
	harness.Must(t, err)
	harness.Must(t, shared.built())
	now := earlier.Release{Name: "this release", Module: module, Plugin: shared.plugin, Controller: shared.controller}

	u := newUpgraded(t, before)
	u.starts(t, before)
	c := u.newClusterOn(t, u.workload, "upgraded", nil)
	due := c.newMachine(t, "due", func(m *machine) { m.plugin = before.Plugin })
	due.becomesDue(t)
	controls := before
	for i, state := range []struct{ controller, plugin earlier.Release }{{now, before}, {now, now}, {before, now}, {before, before}, {now, now}} {
		began := time.Now()
		due.becomesDue(t)
		if state.controller != controls {
			harness.Must(t, u.controller.Stop())
			harness.Must(t, u.apply(t.Context(), state.controller))
			u.starts(t, state.controller)
			controls = state.controller
		}
		due.plugin = state.plugin.Plugin
		due.renews(t)
		fresh := c.newMachine(t, unique("fresh"), func(m *machine) { m.plugin = state.plugin.Plugin })
		fresh.enrols(t)
		if u.record(t, fresh.name) == nil {
			t.Errorf("%s has no record", fresh.name)
		}
		t.Logf("%d. controller of %s, plugin of %s: %s", i+1, state.controller.Name, state.plugin.Name, time.Since(began).Round(time.Second))
	}
}

// becomesDue enrols until the machine has a certificate that is due: the renewal time is random.
func (m *machine) becomesDue(t *testing.T) {
	t.Helper()
	for range 30 {
		m.removeState(t)
		if r := m.enrols(t); earlier.Due(r.Leaf) {
			harness.WorkerEnds(t, m.certs())
			return
		}
	}
	t.Fatalf("%s: no certificate is due", m.name)
}

// renews gets the next certificate by the record that there is, and checks that the record stays
// that of the machine.
func (m *machine) renews(t *testing.T) {
	t.Helper()
	current := func() string {
		pair, err := m.certs().Current()
		harness.Must(t, err)
		return pair.Fingerprint()
	}
	due, was, renewals := current(), m.record(t, m.name), len(m.renewals(t, m.name))
	m.enrols(t)
	harness.Eventually(t, 30*time.Second, m.name+" has renewed", func() bool { return current() != due })
	harness.WorkerEnds(t, m.certs())
	if n := len(m.renewals(t, m.name)); n != renewals+1 {
		t.Errorf("%s: %d proofs were filed with its own certificate, were %d", m.name, n, renewals)
	}
	is := m.record(t, m.name)
	for _, fingerprint := range []string{due, current()} {
		if !slices.ContainsFunc(is.Status.Certificates, func(c v1alpha1.IssuedCertificate) bool { return c.SHA256 == fingerprint }) {
			t.Errorf("%s: the record lacks %s: %+v", m.name, fingerprint, is.Status.Certificates)
		}
	}
	if is.UID != was.UID || is.Spec.EK.Fingerprint != was.Spec.EK.Fingerprint || is.Spec.Machine != was.Spec.Machine || is.Spec.AKName != was.Spec.AKName ||
		!equality.Semantic.DeepEqual(is.OwnerReferences, was.OwnerReferences) || len(is.OwnerReferences) == 0 {
		t.Errorf("%s: the record was %+v, and is %+v", m.name, was, is)
	}
}
