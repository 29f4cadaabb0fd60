// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/kubeconfig"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	clusterNamespace = "clusters"
	// servingTimeout bounds the time until new clusters are served. afterServing is the time after
	// which their connections and caches are assumed to be stable.
	servingTimeout = time.Minute
	afterServing   = 5 * time.Second
)

// clusterAPICRDs are those of Cluster API's module that the controller reads.
var clusterAPICRDs = []string{
	"core/config/crd/bases/cluster.x-k8s.io_clusters.yaml", "core/config/crd/bases/cluster.x-k8s.io_machine*s.yaml",
	"bootstrap/kubeadm/config/crd/bases/*_kubeadmconfigs.yaml",
}

// growthClusters has one controller serve more and more clusters. One API server is used for all
// clusters, including the management cluster. The controller's cost of one more cluster does not
// depend on the API server. What twenty API servers would need for themselves is not its cost.
func growthClusters(ctx context.Context, b *bench) error {
	c := newCurve("clusters", "RSS, MiB", "heap, MiB", "goroutines", "sockets", "idle CPU, 1/1000", "calls a minute, idle")
	cp, err := testbed.Start(ctx, testbed.Options{Progress: os.Stderr})
	if err != nil {
		return err
	}
	err = b.serveClusters(ctx, cp, c)
	if err := errors.Join(err, cp.Stop()); err != nil {
		return err
	}
	c.finish()
	return nil
}

func (b *bench) serveClusters(ctx context.Context, cp *testbed.ControlPlane, c *curve) (err error) {
	api, err := installClusterAPI(ctx, cp)
	if err != nil {
		return err
	}
	binary, err := b.controllerBinary(ctx)
	if err != nil {
		return err
	}
	dir, err := b.folder("controller")
	if err != nil {
		return err
	}
	process, err := controllerprocess.New(controllerprocess.Options{
		ControlPlane: cp, Dir: dir, Binary: binary,
		Configure: func(c *config.Config) {
			c.ClusterUID, c.Signing, c.Inventory = "", config.Signing{Mode: config.Sign}, config.Inventory{}
			c.LeaderElection.Enabled = false
		},
		Edit: func(file map[string]any) {
			file["clusterAPI"] = map[string]any{"namespaces": []any{clusterNamespace}, "ekSources": []any{"Annotation"}}
		},
	})
	if err != nil {
		return err
	}
	if err := errors.Join(process.Start(ctx), process.Ready(ctx)); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("%w\n%s", err, process.LogTail())
		}
		err = errors.Join(err, process.Kill())
	}()
	s := &site{bench: b, cp: cp, controller: process}
	made := 0
	for _, count := range []int{0, 1, 5, 20} {
		for ; made < count; made++ {
			if err := putCluster(ctx, cp, api, fmt.Sprintf("cluster-%02d", made)); err != nil {
				return err
			}
		}
		if err := awaitServing(ctx, process, count); err != nil {
			return err
		}
		if err := sleep(ctx, afterServing); err != nil {
			return err
		}
		p, err := s.during(ctx, "", func() error { return sleep(ctx, idleFor) })
		if err != nil {
			return err
		}
		now, err := readController(ctx, process)
		if err != nil {
			return err
		}
		rss, err := memory(process.Process(), "VmRSS")
		if err != nil {
			return err
		}
		open, err := sockets(process.Process())
		if err != nil {
			return err
		}
		c.add(count, rss, mib(now, "go_memstats_heap_inuse_bytes"), now.sum("go_goroutines"), open, 1000*share(p.controller.cpu(), p.length()),
			p.controller.sum("rest_client_requests_total")/p.length().Minutes())
	}
	return nil
}

// installClusterAPI makes a control plane a management cluster, and each workload cluster.
func installClusterAPI(ctx context.Context, cp *testbed.ControlPlane) (client.Client, error) {
	source, err := compile.ModuleDir(ctx, ".", "sigs.k8s.io/cluster-api")
	if err != nil {
		return nil, err
	}
	var paths []string
	for _, path := range clusterAPICRDs {
		paths = append(paths, filepath.Join(source, path))
	}
	crds, err := testbed.ReadCRDs(paths...)
	if err != nil {
		return nil, err
	}
	for _, crd := range crds { // as the providers' kustomizations have it
		if crd.Labels == nil {
			crd.Labels = map[string]string{}
		}
		crd.Labels["cluster.x-k8s.io/v1beta2"] = "v1beta2"
	}
	if err := cp.InstallCRDs(ctx, crds...); err != nil {
		return nil, err
	}
	admin := filepath.Join(cp.Dir(), "clusters.kubeconfig")
	if err := cp.WriteKubeconfig(admin, cp.AdminUser()); err != nil {
		return nil, err
	}
	for _, half := range []string{"management", "workload"} {
		if _, err := cp.RunKubectl(ctx, admin, "apply", "--server-side", "--force-conflicts", "--kustomize="+filepath.Join(module, "packaging", "cluster-api", half)); err != nil {
			return nil, err
		}
	}
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), clusterv1.AddToScheme(scheme)); err != nil {
		return nil, err
	}
	api, err := client.New(cp.AdminConfig(), client.Options{Scheme: scheme})
	if err != nil {
		return nil, err
	}
	return api, api.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: clusterNamespace}})
}

// putCluster makes a Cluster that Cluster API is done with.
func putCluster(ctx context.Context, cp *testbed.ControlPlane, api client.Client, name string) error {
	address, err := url.Parse(cp.ServerURL())
	if err != nil {
		return err
	}
	port, err := strconv.ParseInt(address.Port(), 10, 32)
	if err != nil {
		return err
	}
	object := &clusterv1.Cluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: clusterNamespace, Name: name},
		Spec: clusterv1.ClusterSpec{
			ControlPlaneEndpoint: clusterv1.APIEndpoint{Host: address.Hostname(), Port: int32(port)},
			InfrastructureRef:    clusterv1.ContractVersionedObjectReference{APIGroup: "infrastructure.cluster.x-k8s.io", Kind: "TestCluster", Name: name},
		},
	}
	if err := api.Create(ctx, object); err != nil {
		return err
	}
	key, err := cp.ClientCA().KeyPEM()
	if err != nil {
		return err
	}
	owner := metav1.OwnerReference{APIVersion: clusterv1.GroupVersion.String(), Kind: "Cluster", Name: name, UID: object.UID}
	ca := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: clusterNamespace, Name: secret.Name(name, secret.ClusterCA), Labels: map[string]string{clusterv1.ClusterNameLabel: name},
			OwnerReferences: []metav1.OwnerReference{owner},
		},
		Type: clusterv1.ClusterSecretType, Data: map[string][]byte{secret.TLSCrtDataName: cp.ClientCA().CertPEM(), secret.TLSKeyDataName: key},
	}
	// An identity of its own for each, so that client-go shares no connections between them.
	pair, err := cp.ClientCA().IssueClient("administrator-of-"+name, []string{"system:masters"}, time.Now().Add(-time.Hour), time.Now().Add(time.Hour))
	if err != nil {
		return err
	}
	for _, s := range []*corev1.Secret{ca, kubeconfig.GenerateSecret(object, cp.Kubeconfig(testbed.CertificateUser(pair)))} {
		if err := api.Create(ctx, s); err != nil {
			return err
		}
	}
	object.Status = clusterv1.ClusterStatus{
		Initialization: clusterv1.ClusterInitializationStatus{InfrastructureProvisioned: new(true), ControlPlaneInitialized: new(true)},
		Conditions: []metav1.Condition{{
			Type: clusterv1.ClusterControlPlaneInitializedCondition, Status: metav1.ConditionTrue,
			Reason: clusterv1.ClusterControlPlaneInitializedReason, LastTransitionTime: metav1.Now(),
		}},
		Phase: string(clusterv1.ClusterPhaseProvisioned),
	}
	return api.Status().Update(ctx, object)
}

// awaitServing waits until so many clusters are served.
func awaitServing(ctx context.Context, c *controllerprocess.Controller, count int) error {
	ctx, cancel := context.WithTimeout(ctx, servingTimeout)
	defer cancel()
	for {
		log, err := os.ReadFile(c.LogFile())
		if err != nil {
			return err
		}
		served := strings.Count(string(log), `"serving the cluster"`)
		if served == count {
			return nil
		}
		if err := sleep(ctx, time.Second/10); err != nil {
			return fmt.Errorf("%d of %d clusters are served: %w", served, count, err)
		}
	}
}

// sockets counts a process's.
func sockets(p *testbed.Process) (count int, err error) {
	folder := fmt.Sprintf("/proc/%d/fd", p.PID())
	files, err := os.ReadDir(folder)
	if err != nil {
		return 0, err
	}
	for _, file := range files {
		if target, err := os.Readlink(filepath.Join(folder, file.Name())); err == nil && strings.HasPrefix(target, "socket:") {
			count++
		}
	}
	return count, nil
}
