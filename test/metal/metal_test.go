// SPDX-License-Identifier: Apache-2.0

package metal_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/contract"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal/controlplanev1"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal/infrav1"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// shared is a management cluster without Cluster API's controllers: each test plays them.
var shared struct {
	*testbed.ControlPlane
	scheme *runtime.Scheme
	client client.Client
}

func TestMain(m *testing.M) {
	ctrl.SetLogger(logr.Discard())
	os.Exit(testbed.Main(m, func(ctx context.Context, cp *testbed.ControlPlane, _ string) error {
		source, err := compile.ModuleDir(ctx, ".", "sigs.k8s.io/cluster-api")
		if err != nil {
			return err
		}
		bases := filepath.Join(source, "core/config/crd/bases")
		crds, err := testbed.ReadCRDs(filepath.Join(bases, "cluster.x-k8s.io_clusters.yaml"), filepath.Join(bases, "cluster.x-k8s.io_machine*s.yaml"))
		if err != nil {
			return err
		}
		own, err := metal.CRDs()
		if err != nil {
			return err
		}
		shared.ControlPlane, shared.scheme = cp, runtime.NewScheme()
		if err := errors.Join(
			cp.InstallCRDs(ctx, append(crds, own...)...),
			clientgoscheme.AddToScheme(shared.scheme), clusterv1.AddToScheme(shared.scheme), metal.AddToScheme(shared.scheme),
		); err != nil {
			return err
		}
		shared.client, err = client.New(cp.AdminConfig(), client.Options{Scheme: shared.scheme})
		return err
	}))
}

// soon bounds a wait for the provider. quiet is how long it is watched not to do a thing: it acts
// within a fraction of that.
const (
	soon  = 20 * time.Second
	quiet = time.Second
)

// platform remembers what it was asked.
type platform struct {
	namespace string // of the world that it is for
	mu        sync.Mutex
	allocated map[types.UID]string
	on        map[string]boot
	boots     []boot
	released  []string
	// fails is what Release returns.
	fails error
}

// boot is one PowerOn of a host that was off, and the MetalMachine as the API server had it then.
type boot struct {
	id, userData string
	metadata     metal.Metadata
	machine      infrav1.MetalMachine
}

var eks = []string{fmt.Sprintf("%064d", 1), fmt.Sprintf("%064d", 2)}

const annotation = "sha256:0000000000000000000000000000000000000000000000000000000000000001," +
	"sha256:0000000000000000000000000000000000000000000000000000000000000002"

func (p *platform) Allocate(_ context.Context, owner types.UID, _ string) (metal.Host, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.allocated[owner] == "" {
		p.allocated[owner] = fmt.Sprintf("host-%d", len(p.allocated)+1)
	}
	return metal.Host{ID: p.allocated[owner], EKs: eks, Addresses: []clusterv1.MachineAddress{{Type: clusterv1.MachineInternalIP, Address: "192.0.2.1"}}}, nil
}

func (p *platform) PowerOn(ctx context.Context, id string, metadata metal.Metadata, userData []byte) error {
	all := &infrav1.MetalMachineList{}
	if err := shared.client.List(ctx, all, client.InNamespace(p.namespace)); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, on := p.on[id]; on {
		return nil
	}
	b := boot{id: id, userData: string(userData), metadata: metadata}
	for _, m := range all.Items {
		if m.Name == metadata.LocalHostname {
			b.machine = m
		}
	}
	p.on[id] = b
	p.boots = append(p.boots, b)
	return nil
}

func (p *platform) Release(_ context.Context, id string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.fails == nil {
		delete(p.on, id)
	}
	p.released = append(p.released, id)
	return p.fails
}

func (p *platform) failing(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fails = err
}

func (p *platform) seen() (boots []boot, released []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.boots), slices.Clone(p.released)
}

// world is a namespace with a Cluster that is ready for machines.
type world struct {
	*platform
	t       *testing.T
	name    string
	cluster *clusterv1.Cluster
	stop    func()
}

func newWorld(t *testing.T) *world {
	t.Parallel()
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "metal-"}}
	harness.Must(t, shared.client.Create(t.Context(), namespace))
	w := &world{&platform{namespace: namespace.Name, allocated: map[types.UID]string{}, on: map[string]boot{}}, t, namespace.Name, nil, func() {}}
	w.cluster = &clusterv1.Cluster{ObjectMeta: w.meta("c"), Spec: clusterv1.ClusterSpec{
		InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: infrav1.GroupVersion.Group, Kind: "MetalCluster", Name: "c"},
	}}
	w.create(w.cluster)
	w.status(w.cluster, func() { w.cluster.Status.Initialization.InfrastructureProvisioned = ptr.To(true) })
	w.start()
	t.Cleanup(func() { w.stop() })
	return w
}

// start starts the provider, stop ends it.
func (w *world) start() {
	w.t.Helper()
	m, err := ctrl.NewManager(shared.AdminConfig(), ctrl.Options{
		Scheme: shared.scheme, Metrics: metricsserver.Options{BindAddress: "0"}, Cache: cache.Options{DefaultNamespaces: map[string]cache.Config{w.name: {}}},
	})
	harness.Must(w.t, err)
	harness.Must(w.t, metal.Add(w.t.Context(), m, metal.Options{Hosts: w.platform, Signers: contract.Signers{Client: "example.com/client"}}))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- m.Start(ctx) }()
	w.stop = func() {
		cancel()
		if err := <-ended; err != nil {
			w.t.Error(err)
		}
		w.stop = func() {}
	}
}

func (w *world) meta(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: w.name, Name: name, Labels: map[string]string{clusterv1.ClusterNameLabel: "c"}}
}

func (w *world) create(object client.Object) {
	w.t.Helper()
	harness.Must(w.t, shared.client.Create(w.t.Context(), object))
}

func (w *world) patch(object client.Object, change func()) {
	w.t.Helper()
	w.read(object)
	before := object.DeepCopyObject().(client.Object)
	change()
	harness.Must(w.t, shared.client.Patch(w.t.Context(), object, client.MergeFrom(before)))
}

func (w *world) status(object client.Object, change func()) {
	w.t.Helper()
	w.read(object)
	before := object.DeepCopyObject().(client.Object)
	change()
	harness.Must(w.t, shared.client.Status().Patch(w.t.Context(), object, client.MergeFrom(before)))
}

func (w *world) read(object client.Object) {
	w.t.Helper()
	harness.Must(w.t, shared.client.Get(w.t.Context(), client.ObjectKeyFromObject(object), object))
}

func (w *world) gone(object client.Object) bool {
	w.t.Helper()
	err := shared.client.Get(w.t.Context(), client.ObjectKeyFromObject(object), object)
	harness.Must(w.t, client.IgnoreNotFound(err))
	return apierrors.IsNotFound(err)
}

// eventually waits for a condition.
func (w *world) eventually(what string, condition func() bool) {
	w.t.Helper()
	harness.Eventually(w.t, soon, what, condition)
}

// booted waits for so many boots, and sees that there is none more.
func (w *world) booted(count int) []boot {
	w.t.Helper()
	w.eventually(fmt.Sprint(count, " boots"), func() bool { boots, _ := w.seen(); return len(boots) >= count })
	return w.stays(count)
}

// stays sees that no more hosts boot than so many.
func (w *world) stays(count int) []boot {
	w.t.Helper()
	time.Sleep(quiet) // nothing happens meanwhile
	boots, _ := w.seen()
	if len(boots) != count {
		w.t.Fatalf("%d boots instead of %d: %+v", len(boots), count, boots)
	}
	return boots
}

func (w *world) secret(name, value string) {
	w.t.Helper()
	w.create(&corev1.Secret{ObjectMeta: w.meta(name), StringData: map[string]string{"value": value}})
}

// newMachine makes a Machine, and its MetalMachine as Cluster API does. The Machine names its
// bootstrap Secret if there is one.
func (w *world) newMachine(name, secret string) (*clusterv1.Machine, *infrav1.MetalMachine) {
	w.t.Helper()
	machine := &clusterv1.Machine{ObjectMeta: w.meta(name), Spec: clusterv1.MachineSpec{
		ClusterName: "c", FailureDomain: "rack-1",
		Bootstrap:         clusterv1.Bootstrap{ConfigRef: clusterv1.ContractVersionedObjectReference{APIGroup: "bootstrap.cluster.x-k8s.io", Kind: "KubeadmConfig", Name: name}},
		InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: infrav1.GroupVersion.Group, Kind: "MetalMachine", Name: name},
	}}
	if secret != "" {
		machine.Spec.Bootstrap.DataSecretName = &secret
	}
	w.create(machine)
	m := &infrav1.MetalMachine{ObjectMeta: w.meta(name)}
	harness.Must(w.t, controllerutil.SetControllerReference(machine, m, shared.scheme))
	w.create(m)
	return machine, m
}

func (w *world) provisioned(m *infrav1.MetalMachine) {
	w.t.Helper()
	w.eventually(m.Name+" is provisioned", func() bool { w.read(m); return ptr.Deref(m.Status.Initialization.Provisioned, false) })
}

// What the controller of node attestation reads is stored before the host can ask for a
// certificate.
func TestMachine(t *testing.T) {
	w := newWorld(t)
	w.secret("m-data", "user data")
	_, m := w.newMachine("m", "m-data")
	b := w.booted(1)[0]
	if b.machine.Spec.ProviderID != "metal://host-1" || b.machine.Annotations[attestation.AnnotationEK] != annotation {
		t.Errorf("when it booted: %+v", b.machine)
	}
	if !slices.Contains(b.machine.Finalizers, metal.Finalizer) {
		t.Errorf("finalizers when it booted: %q", b.machine.Finalizers)
	}
	if b.userData != "user data" || b.metadata != (metal.Metadata{InstanceID: "host-1", LocalHostname: "m"}) || b.id != "host-1" {
		t.Errorf("%+v", b)
	}
	w.provisioned(m)
	if m.Status.FailureDomain != "rack-1" || len(m.Status.Addresses) != 1 || m.Status.Addresses[0].Address != "192.0.2.1" {
		t.Errorf("%+v", m.Status)
	}
}

// Without its Machine's data or the Cluster's infrastructure nothing is touched.
func TestMachineWaits(t *testing.T) {
	w := newWorld(t)
	w.status(w.cluster, func() { w.cluster.Status.Initialization.InfrastructureProvisioned = nil })
	machine, m := w.newMachine("m", "")
	w.secret("m-data", "user data")
	w.stays(0)
	w.patch(machine, func() { machine.Spec.Bootstrap.DataSecretName = ptr.To("m-data") })
	w.stays(0)
	w.read(m)
	if len(m.Finalizers) > 0 || m.Spec.ProviderID != "" {
		t.Errorf("touched: %+v", m)
	}
	w.status(w.cluster, func() { w.cluster.Status.Initialization.InfrastructureProvisioned = ptr.To(true) })
	w.booted(1)
}

// The MetalMachine, and so its Machine, stays until its host is off.
func TestDeletion(t *testing.T) {
	w := newWorld(t)
	w.secret("m-data", "user data")
	_, m := w.newMachine("m", "m-data")
	w.booted(1)
	w.failing(errors.New("the platform is away"))
	harness.Must(t, shared.client.Delete(t.Context(), m))
	w.eventually("a Release is tried", func() bool { _, released := w.seen(); return len(released) > 1 })
	if w.gone(m) {
		t.Fatal("gone, and its host is on")
	}
	w.failing(nil)
	w.eventually("it goes", func() bool { return w.gone(m) })
	if _, released := w.seen(); slices.Contains(released, "") || !slices.Contains(released, "host-1") {
		t.Errorf("released %q", released)
	}
	// One that never had a host has nothing to wait for.
	_, m = w.newMachine("n", "")
	harness.Must(t, shared.client.Delete(t.Context(), m))
	w.eventually("it goes", func() bool { return w.gone(m) })
}

// What is paused is left alone, deleted or not, by Cluster, by annotation, and where clusterctl has
// moved it.
func TestPaused(t *testing.T) {
	w := newWorld(t)
	w.patch(w.cluster, func() { w.cluster.Spec.Paused = ptr.To(true) })
	w.secret("data", "user data")
	_, m := w.newMachine("m", "data")
	w.stays(0)
	w.read(m)
	if len(m.Finalizers) > 0 {
		t.Errorf("finalizers %q", m.Finalizers)
	}
	w.patch(w.cluster, func() { w.cluster.Spec.Paused = nil })
	w.booted(1)
	w.provisioned(m)

	remains := func(what string) {
		t.Helper()
		harness.Must(t, shared.client.Delete(t.Context(), m))
		time.Sleep(quiet) // nothing happens meanwhile
		if _, released := w.seen(); len(released) > 0 || w.gone(m) {
			t.Fatalf("%s: released %q", what, released)
		}
	}
	w.patch(w.cluster, func() { w.cluster.Spec.Paused = ptr.To(true) })
	remains("the Cluster is paused")
	// A deletion by clusterctl move. The Cluster may be gone by then.
	w.patch(m, func() { m.Annotations = map[string]string{"clusterctl.cluster.x-k8s.io/delete-for-move": ""} })
	w.patch(w.cluster, func() { w.cluster.Spec.Paused = nil })
	remains("clusterctl has moved it")
	harness.Must(t, shared.client.Delete(t.Context(), w.cluster))
	w.patch(m, func() { m.Annotations = map[string]string{"x": ""} })
	remains("its Cluster is gone")
	_, m = w.newMachine("n", "data")
	w.stays(1)
}

func TestPausedByAnnotation(t *testing.T) {
	w := newWorld(t)
	w.secret("data", "user data")
	machine, m := w.newMachine("m", "")
	w.patch(m, func() { m.Annotations = map[string]string{clusterv1.PausedAnnotation: ""} })
	w.patch(machine, func() { machine.Spec.Bootstrap.DataSecretName = ptr.To("data") })
	w.stays(0)
	w.patch(m, func() { delete(m.Annotations, clusterv1.PausedAnnotation) })
	w.booted(1)
}

// After clusterctl move, which loses status and UID, and after a restart, the machine has the host
// that it had.
func TestMove(t *testing.T) {
	w := newWorld(t)
	w.secret("m-data", "user data")
	machine, m := w.newMachine("m", "m-data")
	w.provisioned(m)
	w.stop()
	w.patch(m, func() { m.Finalizers = nil })
	harness.Must(t, shared.client.Delete(t.Context(), m))
	moved := &infrav1.MetalMachine{ObjectMeta: w.meta("m"), Spec: m.Spec}
	moved.Annotations, moved.Finalizers = m.Annotations, []string{metal.Finalizer}
	harness.Must(t, controllerutil.SetControllerReference(machine, moved, shared.scheme))
	w.create(moved)
	if moved.UID == m.UID {
		t.Fatal("the same UID")
	}
	w.start()
	w.provisioned(moved)
	w.stays(1)
	if moved.Spec.ProviderID != "metal://host-1" || len(moved.Status.Addresses) != 1 || moved.Annotations[attestation.AnnotationEK] != annotation {
		t.Errorf("%+v", moved)
	}
	harness.Must(t, shared.client.Delete(t.Context(), moved))
	w.eventually("it goes", func() bool { return w.gone(moved) })
	if _, released := w.seen(); !slices.Equal(released, []string{"host-1"}) {
		t.Errorf("released %q", released)
	}
}

func TestPool(t *testing.T) {
	w := newWorld(t)
	w.secret("p-data", "first token")
	pool := &clusterv1.MachinePool{ObjectMeta: w.meta("p"), Spec: clusterv1.MachinePoolSpec{ClusterName: "c", Replicas: ptr.To[int32](1)}}
	pool.Spec.Template.Spec = clusterv1.MachineSpec{
		ClusterName: "c", Bootstrap: clusterv1.Bootstrap{DataSecretName: ptr.To("p-data")},
		InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: infrav1.GroupVersion.Group, Kind: "MetalMachinePool", Name: "p"},
	}
	w.create(pool)
	p := &infrav1.MetalMachinePool{ObjectMeta: w.meta("p")}
	harness.Must(t, controllerutil.SetControllerReference(pool, p, shared.scheme))
	w.create(p)
	w.adopt("p-0")
	if b := w.booted(1)[0]; b.userData != "first token" || b.machine.Annotations[attestation.AnnotationEK] != annotation {
		t.Errorf("%+v", b)
	}
	w.reports(p, "metal://host-1")

	// The token is rotated: those that boot later have the new one, and nobody else boots.
	data := &corev1.Secret{ObjectMeta: w.meta("p-data")}
	w.patch(data, func() { data.Data["value"] = []byte("second token") })
	w.stays(1)
	w.patch(pool, func() { pool.Spec.Replicas = ptr.To[int32](2) })
	w.adopt("p-1")
	if b := w.booted(2)[1]; b.userData != "second token" || b.metadata.LocalHostname != "p-1" {
		t.Errorf("%+v", b)
	}
	w.reports(p, "metal://host-1", "metal://host-2")

	// To scale down is to delete the Machine, which Cluster API drains.
	w.patch(pool, func() { pool.Spec.Replicas = ptr.To[int32](1) })
	machine := &clusterv1.Machine{ObjectMeta: w.meta("p-1")}
	w.eventually("the Machine goes", func() bool { return w.gone(machine) })
	// as Cluster API does next
	harness.Must(t, shared.client.Delete(t.Context(), &infrav1.MetalMachine{ObjectMeta: w.meta("p-1")}))
	w.reports(p, "metal://host-1")
	w.stays(2)

	// A move loses the status. The list is never empty: Cluster API would delete the Nodes.
	w.stop()
	w.status(p, func() { p.Status = infrav1.MetalMachinePoolStatus{} })
	left := &infrav1.MetalMachine{ObjectMeta: w.meta("p-0")}
	w.status(left, func() { left.Status = infrav1.MetalMachineStatus{} })
	version := p.Generation
	w.start()
	w.reports(p, "metal://host-1")
	w.provisioned(left)
	w.stays(2)
	if w.read(p); p.Generation != version {
		t.Error("the spec was written")
	}

	// The pool stays until its hosts are off.
	w.failing(errors.New("the platform is away"))
	harness.Must(t, shared.client.Delete(t.Context(), p))
	machine = &clusterv1.Machine{ObjectMeta: w.meta("p-0")}
	w.eventually("the Machine goes", func() bool { return w.gone(machine) })
	harness.Must(t, shared.client.Delete(t.Context(), left))
	time.Sleep(quiet) // nothing goes meanwhile
	if w.gone(p) || w.gone(left) {
		t.Error("gone, and its host is on")
	}
	w.failing(nil)
	w.eventually("the pool goes", func() bool { return w.gone(left) && w.gone(p) })
}

// adopt makes the Machine of a pool's MetalMachine, as Cluster API does.
func (w *world) adopt(name string) {
	w.t.Helper()
	m := &infrav1.MetalMachine{ObjectMeta: w.meta(name)}
	w.eventually("there is "+name, func() bool { return !w.gone(m) })
	meta := w.meta(name)
	meta.Labels[clusterv1.MachinePoolNameLabel] = m.Labels[clusterv1.MachinePoolNameLabel]
	machine := &clusterv1.Machine{ObjectMeta: meta, Spec: clusterv1.MachineSpec{
		ClusterName: "c", Bootstrap: clusterv1.Bootstrap{DataSecretName: ptr.To("")},
		InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: infrav1.GroupVersion.Group, Kind: "MetalMachine", Name: name},
	}}
	w.create(machine)
	w.patch(m, func() { harness.Must(w.t, controllerutil.SetControllerReference(machine, m, shared.scheme)) })
}

// reports waits until a pool says that it has these hosts.
func (w *world) reports(p *infrav1.MetalMachinePool, ids ...string) {
	w.t.Helper()
	w.eventually(fmt.Sprintf("the pool has %q", ids), func() bool {
		w.read(p)
		return slices.Equal(p.Spec.ProviderIDList, ids) && p.Status.Ready && int(p.Status.Replicas) == len(ids) &&
			p.Status.InfrastructureMachineKind == "MetalMachine"
	})
}

func TestCluster(t *testing.T) {
	w := newWorld(t)
	m := &infrav1.MetalCluster{ObjectMeta: w.meta("c")}
	w.create(m)
	w.eventually("it is provisioned, with signers", func() bool {
		w.read(m)
		return ptr.Deref(m.Status.Initialization.Provisioned, false) && m.Status.KubeletClientCertificateSigner == "example.com/client"
	})
	h := &controlplanev1.HostedControlPlane{ObjectMeta: w.meta("c"), Spec: controlplanev1.HostedControlPlaneSpec{Version: "v1.37.2"}}
	w.create(h)
	w.eventually("it is external", func() bool {
		w.read(h)
		return ptr.Deref(h.Status.ExternalManagedControlPlane, false) && h.Status.Version == "v1.37.2"
	})
	if h.Status.Initialization.ControlPlaneInitialized != nil {
		t.Error("initialized without a kubeconfig")
	}
	w.secret("c-kubeconfig", "a kubeconfig")
	w.eventually("it is initialized", func() bool { w.read(h); return ptr.Deref(h.Status.Initialization.ControlPlaneInitialized, false) })
}

// Contract v1beta2 and clusterctl find the kinds by these labels.
func TestCRDs(t *testing.T) {
	crds, err := metal.CRDs()
	harness.Must(t, err)
	if len(crds) != 7 {
		t.Errorf("%d CRDs", len(crds))
	}
	for _, crd := range crds {
		if _, ok := crd.Labels["clusterctl.cluster.x-k8s.io"]; !ok || crd.Labels["cluster.x-k8s.io/v1beta2"] != "v1beta1" {
			t.Errorf("%s: %v", crd.Name, crd.Labels)
		}
	}
}

// A template cannot choose a host: nobody would then have vouched for the host's EKs. A
// MetalMachine cannot change to another host either, because that host would be wiped with it.
func TestNobodyChoosesAHost(t *testing.T) {
	w := newWorld(t)
	template := &unstructured.Unstructured{Object: map[string]any{
		"metadata": map[string]any{"namespace": w.name, "name": "choosy"},
		"spec":     map[string]any{"template": map[string]any{"spec": map[string]any{"providerID": "metal://host-of-others"}}},
	}}
	template.SetGroupVersionKind(infrav1.GroupVersion.WithKind("MetalMachineTemplate"))
	err := client.WithFieldValidation(shared.client, metav1.FieldValidationStrict).Create(t.Context(), template)
	if !apierrors.IsBadRequest(err) {
		t.Errorf("a template with a host: %v", err)
	}

	m := &infrav1.MetalMachine{ObjectMeta: w.meta("chosen")}
	w.create(m)
	w.patch(m, func() { m.Spec.ProviderID = "metal://host-1" })
	for _, other := range []string{`{"spec":{"providerID":"metal://host-2"}}`, `{"spec":{"providerID":null}}`, `{"spec":null}`} {
		if err := shared.client.Patch(t.Context(), m, client.RawPatch(types.MergePatchType, []byte(other))); !apierrors.IsInvalid(err) {
			t.Errorf("%s: %v", other, err)
		}
	}
}
