// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/kubeconfig"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	// administrator is the user in Cluster API's kubeconfig Secrets. The controller never acts
	// as it.
	administrator = "kubernetes-admin"
	// controllerUser is the controller's user in workload clusters.
	controllerUser = "system:serviceaccount:" + controllerprocess.Namespace + ":" + controllerprocess.Account
)

// All that is done with the kubeconfig Secret's identity, and what the testbed's own policy has.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  users: [` + administrator + `]
- level: Metadata
  resources:
  - group: certificates.k8s.io
    resources: [certificatesigningrequests, "certificatesigningrequests/*"]
- level: None
`

// workload is an API server that Clusters have, one after the other.
type workload struct {
	*testbed.ControlPlane
	client client.Client
}

// pool has workload clusters, which share an etcd.
type pool struct {
	etcd     *testbed.ControlPlane
	starting chan struct{} // few at once: that takes all of two processors

	mu   sync.Mutex
	idle []*workload
}

// take returns a cluster that no other test has.
func (p *pool) take(ctx context.Context) (*workload, error) {
	p.mu.Lock()
	if n := len(p.idle); n > 0 {
		last := p.idle[n-1]
		p.idle = p.idle[:n-1]
		p.mu.Unlock()
		return last, nil
	}
	p.mu.Unlock()
	return p.start(ctx)
}

// fill starts as many clusters as are requested at once.
func (p *pool) fill(ctx context.Context, count int) error {
	p.mu.Lock()
	count -= len(p.idle)
	p.mu.Unlock()
	var (
		starting sync.WaitGroup
		mu       sync.Mutex
		errs     error
	)
	for range count {
		starting.Go(func() {
			w, err := p.start(ctx)
			mu.Lock()
			defer mu.Unlock()
			errs = errors.Join(errs, err)
			if err == nil {
				p.put(w)
			}
		})
	}
	starting.Wait()
	return errs
}

func (p *pool) put(w *workload) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.idle = append(p.idle, w)
}

// start starts one as kubeadm makes it, with what packaging/cluster-api/workload has.
func (p *pool) start(ctx context.Context) (_ *workload, err error) {
	p.starting <- struct{}{}
	cp, err := testbed.Start(ctx, testbed.Options{Etcd: p.etcd, AuditPolicy: []byte(auditPolicy)})
	<-p.starting
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, cp.Stop())
		}
	}()
	w := &workload{ControlPlane: cp}
	if w.client, err = newClient(cp); err != nil {
		return nil, err
	}
	if err := install(ctx, cp, "workload"); err != nil {
		return nil, err
	}
	if err := cp.BindKubeadmBootstrap(ctx); err != nil {
		return nil, err
	}
	return w, controllerprocess.AwaitPolicies(ctx, cp)
}

// idleMost is the number of idle clusters that are kept: each still costs some CPU time.
const idleMost = 6

// giveBack removes Nodes, requests and tokens before the next test. A cluster for which that fails
// is no longer used.
func (p *pool) giveBack(ctx context.Context, w *workload) {
	err := errors.Join(
		w.client.DeleteAllOf(ctx, &certificatesv1.CertificateSigningRequest{}),
		w.client.DeleteAllOf(ctx, &corev1.Node{}),
		w.client.DeleteAllOf(ctx, &corev1.Secret{}, client.InNamespace(metav1.NamespaceSystem),
			client.MatchingFields{"type": string(corev1.SecretTypeBootstrapToken)}),
	)
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil && len(p.idle) < idleMost {
		p.idle = append(p.idle, w)
		return
	}
	_ = w.Stop()
}

// cluster is a workload cluster with its Cluster. What is Cluster API's is in the management
// cluster, c.client; Nodes and requests are in the workload cluster, c.workload.client.
type cluster struct {
	*world
	workload *workload
	name     string
	object   *clusterv1.Cluster
	infra    *unstructured.Unstructured
	// ca and kubeconfig are the Secrets; a change for newCluster that makes one nil has it left
	// out. It may keep the CA in lateCA.
	ca, lateCA, kubeconfig *corev1.Secret
	// server is the address in the kubeconfig, the API server's unless it is changed.
	server string
}

func infraObject(kind, namespace, name string) *unstructured.Unstructured {
	u := &unstructured.Unstructured{}
	u.SetGroupVersionKind(schema.GroupVersionKind{Group: "infrastructure.cluster.x-k8s.io", Version: "v1", Kind: kind})
	u.SetNamespace(namespace)
	u.SetName(name)
	return u
}

// newCluster makes a Cluster that Cluster API is done with: infrastructure and control plane are
// there, and so are its Secrets. change may alter what is about to be created.
func (w *world) newCluster(t *testing.T, name string, change func(*cluster)) *cluster {
	t.Helper()
	workload, err := shared.workloads.take(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	w.mu.Lock()
	w.workloads = append(w.workloads, workload)
	w.mu.Unlock()
	return w.newClusterOn(t, workload, name, change)
}

// newClusterOn is newCluster with an API server that there is.
func (w *world) newClusterOn(t *testing.T, workload *workload, name string, change func(*cluster)) *cluster {
	t.Helper()
	c := &cluster{world: w, workload: workload, name: name, server: workload.ServerURL()}
	c.draft(t)
	if change != nil {
		change(c)
	}
	c.put(t)
	return c
}

func (c *cluster) meta(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: c.namespace, Name: name, Labels: map[string]string{clusterv1.ClusterNameLabel: c.name}}
}

func (c *cluster) draft(t *testing.T) {
	t.Helper()
	c.infra = infraObject("TestCluster", c.namespace, c.name)
	c.object = &clusterv1.Cluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, Name: c.name},
		Spec: clusterv1.ClusterSpec{
			ClusterNetwork: clusterv1.ClusterNetwork{
				Services: clusterv1.NetworkRanges{CIDRBlocks: []string{"10.96.0.0/24"}}, Pods: clusterv1.NetworkRanges{CIDRBlocks: []string{"10.244.0.0/16"}},
			},
			ControlPlaneEndpoint: endpoint(t, c.workload.ServerURL()),
			InfrastructureRef:    clusterv1.ContractVersionedObjectReference{APIGroup: c.infra.GroupVersionKind().Group, Kind: c.infra.GetKind(), Name: c.name},
		},
		Status: clusterv1.ClusterStatus{
			Initialization: clusterv1.ClusterInitializationStatus{InfrastructureProvisioned: new(true), ControlPlaneInitialized: new(true)},
			Conditions: []metav1.Condition{{
				Type: clusterv1.ClusterControlPlaneInitializedCondition, Status: metav1.ConditionTrue,
				Reason: clusterv1.ClusterControlPlaneInitializedReason, LastTransitionTime: metav1.Now(),
			}},
			Phase: string(clusterv1.ClusterPhaseProvisioned),
		},
	}
	key, err := c.workload.ClientCA().KeyPEM()
	if err != nil {
		t.Fatal(err)
	}
	c.ca = c.secret(secret.ClusterCA, map[string][]byte{secret.TLSCrtDataName: c.workload.ClientCA().CertPEM(), secret.TLSKeyDataName: key})
	// its content, when it is known where the server is
	c.kubeconfig = c.secret(secret.Kubeconfig, nil)
}

func endpoint(t *testing.T, server string) clusterv1.APIEndpoint {
	t.Helper()
	u, err := url.Parse(server)
	if err != nil {
		t.Fatal(err)
	}
	host, port, err := net.SplitHostPort(u.Host)
	if err != nil {
		t.Fatal(err)
	}
	number, err := strconv.ParseInt(port, 10, 32)
	if err != nil {
		t.Fatal(err)
	}
	return clusterv1.APIEndpoint{Host: host, Port: int32(number)}
}

// secret returns a Secret like Cluster API's.
func (c *cluster) secret(purpose secret.Purpose, data map[string][]byte) *corev1.Secret {
	return &corev1.Secret{ObjectMeta: c.meta(secret.Name(c.name, purpose)), Type: clusterv1.ClusterSecretType, Data: data}
}

// put creates the drafted objects. The status comes last: the controller connects to the workload
// cluster only after it is set.
func (c *cluster) put(t *testing.T) {
	t.Helper()
	status := c.object.Status
	c.create(t, c.object)
	c.infra.SetOwnerReferences([]metav1.OwnerReference{c.owner()})
	c.create(t, c.infra)
	updateStatus(t, c.client, c.infra, func(infra *unstructured.Unstructured) {
		infra.Object["status"] = map[string]any{"initialization": map[string]any{"provisioned": true}}
	})
	if c.ca != nil {
		c.putSecret(t, c.ca)
	}
	if c.kubeconfig != nil {
		c.putKubeconfig(t)
	}
	updateStatus(t, c.client, c.object, func(object *clusterv1.Cluster) { object.Status = status })
}

// putKubeconfig creates the Secret, with the administrator's identity, as Cluster API has it.
func (c *cluster) putKubeconfig(t *testing.T) {
	t.Helper()
	now := time.Now()
	pair, err := c.workload.ClientCA().IssueClient(administrator, []string{"system:masters"}, now.Add(-time.Hour), now.Add(24*time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	c.kubeconfig = kubeconfig.GenerateSecret(c.object, c.workload.Kubeconfig(testbed.CertificateUser(pair), testbed.WithServer(c.server)))
	c.create(t, c.kubeconfig)
}

// putSecret creates a Secret of the cluster.
func (c *cluster) putSecret(t *testing.T, object *corev1.Secret) {
	t.Helper()
	object.OwnerReferences = []metav1.OwnerReference{c.owner()}
	c.create(t, object)
}

func (c *cluster) owner() metav1.OwnerReference {
	return metav1.OwnerReference{APIVersion: clusterv1.GroupVersion.String(), Kind: "Cluster", Name: c.name, UID: c.object.UID}
}

func (w *world) create(t *testing.T, object client.Object) {
	t.Helper()
	if err := w.client.Create(t.Context(), object); err != nil {
		t.Fatalf("create %T %s: %v", object, object.GetName(), err)
	}
}

// behindProxy makes only the controller reach the workload cluster through a proxy. It is for
// newCluster.
func behindProxy(t *testing.T, proxy **testbed.Proxy) func(*cluster) {
	t.Helper()
	return func(c *cluster) {
		made, err := testbed.NewProxy(c.server)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := made.Close(); err != nil {
				t.Error(err)
			}
		})
		*proxy, c.server = made, made.URL()
	}
}

// newToken makes a bootstrap token in the workload cluster.
func (c *cluster) newToken(t *testing.T) string {
	t.Helper()
	token, err := c.workload.CreateBootstrapToken(t.Context(), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return token
}

// get returns a request.
func (c *cluster) get(t *testing.T, name string) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	object := &certificatesv1.CertificateSigningRequest{}
	if err := c.workload.client.Get(t.Context(), client.ObjectKey{Name: name}, object); err != nil {
		t.Fatal(err)
	}
	return object
}

// requests returns all requests of the workload cluster.
func (c *cluster) requests(t *testing.T) []certificatesv1.CertificateSigningRequest {
	t.Helper()
	list := &certificatesv1.CertificateSigningRequestList{}
	if err := c.workload.client.List(t.Context(), list); err != nil {
		t.Fatal(err)
	}
	return list.Items
}

// isAnswered reports whether a request was challenged or decided. The reason for its wait does not
// count.
func isAnswered(r *certificatesv1.CertificateSigningRequest) bool {
	annotations := maps.Clone(r.Annotations)
	delete(annotations, attestation.AnnotationWaiting)
	return len(annotations)+len(r.Status.Conditions)+len(r.Status.Certificate) > 0
}

// untouched checks that no request was answered.
func (c *cluster) untouched(t *testing.T) {
	t.Helper()
	for _, r := range c.requests(t) {
		if isAnswered(&r) {
			t.Errorf("%s: something was done with %s: %v %+v", c.name, r.Name, r.Annotations, r.Status)
		}
	}
}

func (c *cluster) String() string { return fmt.Sprintf("%s/%s", c.namespace, c.name) }

// isLetGo applies a change after which a controller no longer serves the cluster, and waits until
// the controller has logged that.
func (c *cluster) isLetGo(t *testing.T, controller *controllerprocess.Controller, do func()) {
	t.Helper()
	times := func() (n int) {
		for line := range bytes.Lines(logOf(t, controller)) {
			if bytes.Contains(line, []byte("no longer served")) && bytes.Contains(line, []byte(`"`+c.String()+`"`)) {
				n++
			}
		}
		return n
	}
	before := times()
	do()
	harness.Eventually(t, harness.Soon, "it is let go of", func() bool { return times() > before })
}

// isOf reports whether a list has a request.
func isOf(name string, requests []certificatesv1.CertificateSigningRequest) bool {
	return slices.ContainsFunc(requests, func(r certificatesv1.CertificateSigningRequest) bool { return r.Name == name })
}
