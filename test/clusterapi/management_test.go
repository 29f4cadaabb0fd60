// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/util/retry"
	bootstrapv1 "sigs.k8s.io/cluster-api/api/bootstrap/kubeadm/v1beta2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// management is a management cluster: Cluster API's CustomResourceDefinitions, and what
// packaging/cluster-api/management has. Of all controllers that Cluster API relies on it has
// Kubernetes' garbage collector.
type management struct {
	*testbed.ControlPlane
	client client.Client
	// admin is an administrator's kubeconfig, as a file.
	admin string
}

// clusterAPICRDs are the CustomResourceDefinitions of the tests' objects, and of their owners in
// Cluster API.
var clusterAPICRDs = []string{
	"core/config/crd/bases/cluster.x-k8s.io_clusters.yaml",
	"core/config/crd/bases/cluster.x-k8s.io_machine*s.yaml",
	"bootstrap/kubeadm/config/crd/bases/*_kubeadmconfigs.yaml",
	"controlplane/kubeadm/config/crd/bases/*_kubeadmcontrolplanes.yaml",
	"cmd/clusterctl/config/crd/bases/*_providers.yaml",
}

// newManagement makes a control plane a management cluster.
func newManagement(ctx context.Context, cp *testbed.ControlPlane) (*management, error) {
	m := &management{ControlPlane: cp, admin: filepath.Join(cp.Dir(), "management.kubeconfig")}
	if err := cp.WriteKubeconfig(m.admin, cp.AdminUser()); err != nil {
		return nil, err
	}
	crds, err := readCRDs(ctx)
	if err != nil {
		return nil, err
	}
	if err := cp.InstallCRDs(ctx, crds...); err != nil {
		return nil, err
	}
	if m.client, err = newClient(cp); err != nil {
		return nil, err
	}
	if err := install(ctx, cp, "management"); err != nil {
		return nil, err
	}
	return m, cp.StartControllerManager(ctx, "--controllers=garbage-collector-controller")
}

func readCRDs(ctx context.Context) ([]*apiextensionsv1.CustomResourceDefinition, error) {
	source, err := compile.ModuleDir(ctx, ".", "sigs.k8s.io/cluster-api")
	if err != nil {
		return nil, err
	}
	paths := []string{"testdata/*.yaml"}
	for _, path := range clusterAPICRDs {
		paths = append(paths, filepath.Join(source, path))
	}
	crds, err := testbed.ReadCRDs(paths...)
	if err != nil {
		return nil, err
	}
	for _, crd := range crds {
		if crd.Labels == nil {
			crd.Labels = map[string]string{}
		}
		// As the providers' kustomizations have it: clusterctl's own label, and which versions
		// fulfil which contract.
		crd.Labels["clusterctl.cluster.x-k8s.io"] = ""
		contract := "v1beta2"
		if crd.Spec.Names.Kind == "TestCluster" || crd.Spec.Names.Kind == "TestMachine" {
			contract = "v1"
		}
		crd.Labels["cluster.x-k8s.io/v1beta2"] = contract
		// A later Cluster API no longer serves this version.
		for i := range crd.Spec.Versions {
			if v := &crd.Spec.Versions[i]; v.Name == "v1beta1" {
				v.Served = false
			}
		}
	}
	return crds, nil
}

// install creates what a kustomization of packaging/cluster-api has.
func install(ctx context.Context, cp *testbed.ControlPlane, kustomization string) error {
	objects, err := cp.Kustomize(ctx, filepath.Join(module, "packaging", "cluster-api", kustomization))
	if err != nil {
		return err
	}
	return cp.CreateObjects(ctx, objects)
}

func newClient(cp *testbed.ControlPlane) (client.Client, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		clientgoscheme.AddToScheme, v1alpha1.AddToScheme, clusterv1.AddToScheme, bootstrapv1.AddToScheme, apiextensionsv1.AddToScheme,
	} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	return client.New(cp.AdminConfig(), client.Options{Scheme: scheme})
}

// newNamespace creates a namespace with a new name.
func (m *management) newNamespace(t *testing.T) string {
	t.Helper()
	name := unique("world")
	if err := m.client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}); err != nil {
		t.Fatal(err)
	}
	return name
}

// clusterAPI is the section of the configuration with which the controller serves workload
// clusters.
func clusterAPI(file map[string]any) map[string]any { return file["clusterAPI"].(map[string]any) }

// start starts a controller for the world's namespace, with the rights of packaging/cluster-api,
// and waits until it is ready. edit may change its configuration: see controllerprocess.Options.
func (w *world) start(t *testing.T, edit func(file map[string]any), args ...string) *controllerprocess.Controller {
	t.Helper()
	if err := shared.built(); err != nil {
		t.Fatal(err)
	}
	c := w.newController(t, shared.controller, edit, args...)
	if err := errors.Join(c.Start(t.Context()), c.Ready(t.Context())); err != nil {
		t.Fatal(err)
	}
	return c
}

// newController makes the controller that start starts. It may be of any program.
func (w *world) newController(t *testing.T, binary string, edit func(file map[string]any), args ...string) *controllerprocess.Controller {
	t.Helper()
	c := w.newControllerOf(t, controllerprocess.Options{Binary: binary, Args: args}, edit)
	w.mu.Lock()
	w.controllers = append(w.controllers, c)
	w.mu.Unlock()
	return c
}

// startPlatform starts the controller of a program that knows a platform.
func (w *world) startPlatform(t *testing.T, binary, platform string, env ...string) *controllerprocess.Controller {
	t.Helper()
	c := w.newControllerOf(t, controllerprocess.Options{Binary: binary, Env: env}, onPlatform(platform))
	w.mu.Lock()
	w.controllers = append(w.controllers, c)
	w.mu.Unlock()
	if err := errors.Join(c.Start(t.Context()), c.Ready(t.Context())); err != nil {
		t.Fatal(err)
	}
	return c
}

// refusesPlatform checks that a program does not start for a platform, and what it says.
func (w *world) refusesPlatform(t *testing.T, says, binary, platform string, env ...string) {
	t.Helper()
	c := w.newControllerOf(t, controllerprocess.Options{Binary: binary, Env: env}, onPlatform(platform))
	if err := c.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	<-c.Process().Done()
	if err := c.Process().Err(); err == nil || !strings.Contains(err.Error(), says) || !strings.Contains(err.Error(), "exit status 10") {
		t.Errorf("%s does not say %q: %v", binary, says, err)
	}
}

// onPlatform configures a platform as the only source of EKs.
func onPlatform(name string) func(file map[string]any) {
	return func(file map[string]any) {
		clusterAPI(file)["ekSources"], clusterAPI(file)["platform"] = []any{"Platform"}, name
	}
}

// isInstance makes the Machine an instance of a platform. No annotation has its EK.
func (m *machine) isInstance(providerID string) {
	m.providerID = providerID
	m.object.Annotations = nil
	m.object.Spec.ProviderID = providerID
	m.infra.Object["spec"] = map[string]any{"providerID": providerID}
}

// newControllerOf makes a controller with a configuration for the world's namespace.
func (w *world) newControllerOf(t *testing.T, o controllerprocess.Options, edit func(file map[string]any)) *controllerprocess.Controller {
	t.Helper()
	o.ControlPlane, o.Dir = w.ControlPlane, t.TempDir()
	o.Configure = func(c *config.Config) {
		c.ClusterUID, c.Signing, c.Inventory = "", config.Signing{Mode: config.Sign}, config.Inventory{}
		c.LeaderElection.Enabled = false // tests run at once, and there is one Lease
	}
	o.Edit = func(file map[string]any) {
		file["clusterAPI"] = map[string]any{"namespaces": []any{w.namespace}, "ekSources": []any{"Annotation"}}
		if edit != nil {
			edit(file)
		}
	}
	c, err := controllerprocess.New(o)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// checkLog ends a controller, and checks that it lacked no right.
func checkLog(t *testing.T, c *controllerprocess.Controller) {
	t.Helper()
	if err := c.Kill(); err != nil {
		t.Errorf("the controller ended by itself: %v", err)
	}
	for line := range bytes.Lines(logOf(t, c)) {
		if bytes.Contains(line, []byte("forbidden")) {
			t.Errorf("the controller lacks a right: %s", line)
		}
	}
}

// logOf returns the whole log of a controller.
func logOf(t *testing.T, c *controllerprocess.Controller) []byte {
	t.Helper()
	log, err := os.ReadFile(c.LogFile())
	if err != nil {
		t.Fatal(err)
	}
	return log
}

// update changes an object, and tries again after a conflict. change gets the current object.
func update[T client.Object](t *testing.T, c client.Client, object T, change func(T)) {
	t.Helper()
	if err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(object), object); err != nil {
			return err
		}
		change(object)
		return c.Update(t.Context(), object)
	}); err != nil {
		t.Fatal(err)
	}
}

// updateStatus is update for the status.
func updateStatus[T client.Object](t *testing.T, c client.Client, object T, change func(T)) {
	t.Helper()
	if err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(object), object); err != nil {
			return err
		}
		change(object)
		return c.Status().Update(t.Context(), object)
	}); err != nil {
		t.Fatal(err)
	}
}

// records returns the records of a namespace.
func (w *world) records(t *testing.T) []v1alpha1.NodeAttestation {
	t.Helper()
	list := &v1alpha1.NodeAttestationList{}
	if err := w.client.List(t.Context(), list, client.InNamespace(w.namespace)); err != nil {
		t.Fatal(err)
	}
	return list.Items
}

// record returns the record of a Machine, nil if there is none.
func (w *world) record(t *testing.T, name string) *v1alpha1.NodeAttestation {
	t.Helper()
	record := &v1alpha1.NodeAttestation{}
	if err := w.client.Get(t.Context(), client.ObjectKey{Namespace: w.namespace, Name: name}, record); client.IgnoreNotFound(err) != nil {
		t.Fatal(err)
	} else if err != nil {
		return nil
	}
	return record
}

// recordOf returns the record of a machine by its provider ID, nil if there is none.
func (w *world) recordOf(t *testing.T, m *machine) *v1alpha1.NodeAttestation {
	t.Helper()
	for _, record := range w.records(t) {
		if record.Spec.ProviderID == m.providerID {
			return &record
		}
	}
	return nil
}
