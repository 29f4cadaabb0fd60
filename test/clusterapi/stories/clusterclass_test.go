// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	bootstrapv1 "sigs.k8s.io/cluster-api/api/bootstrap/kubeadm/v1beta2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal/simulated"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// classStory is a management cluster with Cluster API's managers, the provider Metal and the
// controller, and a workload cluster without node attestation.
type classStory struct {
	management, workload           *testbed.ControlPlane
	managementAdmin, workloadAdmin string // kubeconfig files
	client                         client.Client
	hosts                          *simulated.Hosts
}

const (
	classExamples  = module + "/docs/examples/cluster-api"
	classNamespace = "fleet"
	// classCluster is the example's Cluster.
	classCluster = "three"
	classVersion = "v1.37.2"
	// classLimit is the time limit of each step.
	classLimit = 90 * time.Second
)

// classProviderRights let Cluster API's managers use the provider Metal's objects. Each provider
// ships such rights.
const classProviderRights = `
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: metal
  labels: {cluster.x-k8s.io/aggregate-to-manager: "true"}
rules:
- {apiGroups: [infrastructure.cluster.x-k8s.io, controlplane.cluster.x-k8s.io], resources: ["*"], verbs: ["*"]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: metal}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: metal}
subjects: [{kind: ServiceAccount, name: capi-kubeadm-bootstrap-manager, namespace: capi-kubeadm-bootstrap-system}]
`

// A user creates a Cluster of the documented ClusterClass. The ClusterResourceSet installs the
// policies and rights in the new cluster. The class's patch adds the plugin's configuration to the
// Machines, and they join. Then the user scales the topology down, and deletes the Cluster: no
// Machine and no record is left. The examples are applied unchanged, except for the address of the
// API server.
func TestClusterClass(t *testing.T) {
	full(t)
	s := newClassStory(t)
	s.apply(t, "clusterresourceset.yaml", "")
	s.apply(t, "clusterclass-hosted.yaml", s.endpointPatch(t))
	began := time.Now()

	s.awaitWorkloadObjects(t)
	t.Logf("the objects of the ClusterResourceSet are in force %s after the class was applied", time.Since(began).Round(100*time.Millisecond))
	s.awaitJoined(t, 3)
	t.Logf("3 Machines are Running, with records, after %s", time.Since(began).Round(100*time.Millisecond))
	s.checkUserData(t, 3)

	s.kubectl(t, "patch", "cluster", classCluster, "--namespace="+classNamespace, "--type=json",
		`--patch=[{"op":"replace","path":"/spec/topology/workers/machineDeployments/0/replicas","value":1}]`)
	s.awaitJoined(t, 1)
	s.kubectl(t, "delete", "cluster", classCluster, "--namespace="+classNamespace, "--timeout="+classLimit.String())
	s.awaitJoined(t, 0)
}

// kubectl runs kubectl in the management cluster, as an administrator.
func (s *classStory) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := s.management.RunKubectl(t.Context(), s.managementAdmin, args...)
	harness.Must(t, err)
	return out
}

func newClassStory(t *testing.T) *classStory {
	t.Helper()
	s := &classStory{}
	s.management, s.managementAdmin = s.start(t, testbed.Options{Progress: os.Stderr})
	s.workload, s.workloadAdmin = s.start(t, testbed.Options{Etcd: s.management})
	harness.Must(t, s.workload.BindKubeadmBootstrap(t.Context()))

	capi, err := testbed.StartClusterAPI(t.Context(), s.management, testbed.ClusterAPIOptions{Components: &built.clusterAPI, BootstrapTokenTTL: time.Hour})
	harness.Must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(capi.Logs())
		}
		harness.Must(t, capi.Stop())
	})
	crds, err := metal.CRDs()
	harness.Must(t, err)
	harness.Must(t, s.management.InstallCRDs(t.Context(), crds...))
	s.kubectl(t, "create", "--filename="+classFile(t, classProviderRights))
	s.kubectl(t, "apply", "--server-side", "-k", classExamples+"/management")
	s.kubectl(t, "create", "namespace", classNamespace)

	s.startMetal(t)
	s.startController(t)
	s.secrets(t)
	// The two commands of the guide.
	dir := t.TempDir()
	harness.Must(t, os.WriteFile(filepath.Join(dir, "workload.yaml"), []byte(s.kubectl(t, "kustomize", module+"/packaging/cluster-api/workload")), 0o600))
	s.kubectl(t, "create", "configmap", "node-attestation", "--namespace="+classNamespace,
		"--from-file="+dir+"/workload.yaml", "--from-file="+module+"/packaging/kubernetes/optional/serving.yaml")
	return s
}

func (s *classStory) start(t *testing.T, options testbed.Options) (cp *testbed.ControlPlane, admin string) {
	t.Helper()
	cp, err := testbed.Start(t.Context(), options)
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, cp.Stop()) })
	admin = filepath.Join(t.TempDir(), "kubeconfig")
	harness.Must(t, cp.WriteKubeconfig(admin, cp.AdminUser()))
	return cp, admin
}

// startMetal starts the infrastructure provider in this process, with simulated hosts.
func (s *classStory) startMetal(t *testing.T) {
	t.Helper()
	maker, err := swtpm.NewCA()
	harness.Must(t, err)
	s.hosts = simulated.New(simulated.Options{
		Dir: t.TempDir(), Maker: maker, Version: classVersion, Log: t.Logf,
		Cluster: func(asked string) (fleet.Cluster, error) {
			if asked != strings.TrimPrefix(s.workload.ServerURL(), "https://") {
				return fleet.Cluster{}, fmt.Errorf("no cluster %s", asked)
			}
			return fleet.Cluster{URL: s.workload.ServerURL(), CA: s.workload.ServerCA(), Issuer: s.workload.ClientCA().Certificate()}, nil
		},
	})
	scheme := runtime.NewScheme()
	harness.Must(t, errors.Join(clientgoscheme.AddToScheme(scheme), clusterv1.AddToScheme(scheme), bootstrapv1.AddToScheme(scheme), metal.AddToScheme(scheme)))
	manager, err := ctrl.NewManager(s.management.AdminConfig(), ctrl.Options{Scheme: scheme, Metrics: metricsserver.Options{BindAddress: "0"}})
	harness.Must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	harness.Must(t, metal.Add(ctx, manager, metal.Options{Hosts: s.hosts}))
	ended := make(chan error, 1)
	go func() { ended <- manager.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		harness.Must(t, errors.Join(<-ended, s.hosts.Stop()))
	})
	s.client, err = client.New(s.management.AdminConfig(), client.Options{Scheme: scheme})
	harness.Must(t, err)
}

// startController starts the controller with the example's configuration.
func (s *classStory) startController(t *testing.T) {
	t.Helper()
	content, err := os.ReadFile(classExamples + "/management/config.yaml")
	harness.Must(t, err)
	var example map[string]any
	harness.Must(t, yaml.Unmarshal(content, &example))
	c, err := controllerprocess.New(controllerprocess.Options{
		ControlPlane: s.management, Dir: t.TempDir(), Binary: built.controller,
		// keep the test's addresses, take all else from the example
		Edit: func(file map[string]any) {
			maps.DeleteFunc(file, func(field string, _ any) bool { return !strings.HasSuffix(field, "BindAddress") })
			maps.Copy(file, example)
		},
	})
	harness.Must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(c.LogTail())
		}
		harness.Must(t, c.Stop())
	})
	harness.Must(t, errors.Join(c.Start(t.Context()), c.Ready(t.Context())))
}

// secrets creates the Secrets that a control plane provider would create.
func (s *classStory) secrets(t *testing.T) {
	t.Helper()
	key, err := s.workload.ClientCA().KeyPEM()
	harness.Must(t, err)
	for name, data := range map[string]map[string][]byte{
		"ca":         {"tls.crt": s.workload.ClientCA().CertPEM(), "tls.key": key},
		"kubeconfig": {"value": s.workload.AdminKubeconfig()},
	} {
		secret := &corev1.Secret{Type: clusterv1.ClusterSecretType, Data: data}
		secret.Namespace, secret.Name = classNamespace, classCluster+"-"+name
		secret.Labels = map[string]string{clusterv1.ClusterNameLabel: classCluster}
		harness.Must(t, s.client.Create(t.Context(), secret))
	}
}

// apply applies an example with kustomize, and with patches if there are any.
func (s *classStory) apply(t *testing.T, example, patches string) {
	t.Helper()
	dir := t.TempDir()
	content, err := os.ReadFile(filepath.Join(classExamples, example))
	harness.Must(t, err)
	harness.Must(t, errors.Join(
		os.WriteFile(filepath.Join(dir, example), content, 0o600),
		os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte("resources: ["+example+"]\nnamespace: "+classNamespace+"\n"+patches), 0o600),
	))
	s.kubectl(t, "apply", "--server-side", "--validate=strict", "-k", dir)
}

func (s *classStory) endpointPatch(t *testing.T) string {
	t.Helper()
	host, port, ok := strings.Cut(strings.TrimPrefix(s.workload.ServerURL(), "https://"), ":")
	if !ok {
		t.Fatal(s.workload.ServerURL())
	}
	return `patches:
- target: {kind: Cluster}
  patch: |-
    - {op: replace, path: /spec/controlPlaneEndpoint, value: {host: ` + host + `, port: ` + port + `}}
`
}

// awaitWorkloadObjects waits until the workload cluster has every object of
// packaging/cluster-api/workload, and until its policies are in effect.
func (s *classStory) awaitWorkloadObjects(t *testing.T) {
	t.Helper()
	manifests := s.kubectl(t, "kustomize", module+"/packaging/cluster-api/workload")
	objects, err := testbed.ReadObjects([]byte(manifests))
	harness.Must(t, err)
	c, err := client.New(s.workload.AdminConfig(), client.Options{})
	harness.Must(t, err)
	if len(objects) < 10 {
		t.Fatalf("packaging/cluster-api/workload has only %d objects", len(objects))
	}
	for _, want := range objects {
		harness.Eventually(t, classLimit, want.GetKind()+" "+want.GetName()+" exists", func() bool {
			got := &unstructured.Unstructured{}
			got.SetGroupVersionKind(want.GroupVersionKind())
			err := c.Get(t.Context(), client.ObjectKeyFromObject(want), got)
			if err != nil && !apierrors.IsNotFound(err) {
				t.Fatal(err)
			}
			return err == nil
		})
	}
	harness.Must(t, controllerprocess.AwaitPolicies(t.Context(), s.workload))
}

// awaitJoined waits until there are count Machines, each Running with a Node of its own name, and
// as many records. Each Machine must own a record.
func (s *classStory) awaitJoined(t *testing.T, count int) {
	t.Helper()
	var machines clusterv1.MachineList
	var records unstructured.UnstructuredList
	records.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind("NodeAttestationList"))
	ok := func() bool {
		harness.Must(t, errors.Join(s.client.List(t.Context(), &machines, client.InNamespace(classNamespace)), s.client.List(t.Context(), &records, client.InNamespace(classNamespace))))
		owners := map[string]bool{}
		for _, record := range records.Items {
			for _, owner := range record.GetOwnerReferences() {
				owners[owner.Kind+"/"+owner.Name] = true
			}
		}
		return len(machines.Items) == count && len(records.Items) == count && !slices.ContainsFunc(machines.Items, func(m clusterv1.Machine) bool {
			return m.Status.Phase != string(clusterv1.MachinePhaseRunning) || m.Status.NodeRef.Name != m.Name || !owners["Machine/"+m.Name]
		})
	}
	deadline := time.Now().Add(classLimit)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("want %d Machines, each Running and with a record:\n%s", count,
				s.kubectl(t, "get", "clusters,machinedeployments,machines,metalmachines,hostedcontrolplanes,nodeattestations", "--namespace="+classNamespace, "--output=wide"))
		}
		time.Sleep(200 * time.Millisecond)
	}
}

// checkUserData checks that the class's patch is in the KubeadmConfig and user data of each
// Machine.
func (s *classStory) checkUserData(t *testing.T, count int) {
	t.Helper()
	var configs bootstrapv1.KubeadmConfigList
	harness.Must(t, s.client.List(t.Context(), &configs, client.InNamespace(classNamespace)))
	if len(configs.Items) != count {
		t.Errorf("there are %d KubeadmConfigs, want %d", len(configs.Items), count)
	}
	const providerID = "metal://{{ ds.meta_data.instance_id }}"
	for _, c := range configs.Items {
		files, arguments := c.Spec.Files, c.Spec.JoinConfiguration.NodeRegistration.KubeletExtraArgs
		if len(files) != 1 || files[0].Path != "/etc/kubelet-authenticator/config.yaml" || !strings.Contains(files[0].Content, "\nproviderID: '"+providerID+"'\n") {
			t.Errorf("%s has the files %+v", c.Name, files)
		}
		if len(arguments) != 1 || arguments[0].Name != "provider-id" || *arguments[0].Value != providerID {
			t.Errorf("%s has the kubelet's arguments %+v", c.Name, arguments)
		}
		var secret corev1.Secret
		harness.Must(t, s.client.Get(t.Context(), client.ObjectKey{Namespace: classNamespace, Name: c.Status.DataSecretName}, &secret))
		// Without the first line cloud-init does not replace {{ ds.meta_data.instance_id }}.
		if data := string(secret.Data["value"]); !strings.HasPrefix(data, "## template: jinja\n#cloud-config\n") || !strings.Contains(data, "providerID: '"+providerID+"'") {
			t.Errorf("%s has the user data\n%s", c.Name, data)
		}
	}
}

func classFile(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file.yaml")
	harness.Must(t, os.WriteFile(path, []byte(content), 0o600))
	return path
}
