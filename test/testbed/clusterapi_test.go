// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
)

// The kinds of an infrastructure and a control plane provider without controllers, and the rights
// that such a provider gives to Cluster API's managers.
const (
	providerKind = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: %[1]s.%[2]s.cluster.x-k8s.io
  labels: {cluster.x-k8s.io/v1beta2: v1}
spec:
  group: %[2]s.cluster.x-k8s.io
  scope: Namespaced
  names: {kind: %[3]s, plural: %[1]s}
  versions:
  - name: v1
    served: true
    storage: true
    subresources: {status: {}}
    schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
---
`
	providerRights = `
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: test-provider
  labels: {cluster.x-k8s.io/aggregate-to-manager: "true"}
rules:
- {apiGroups: [infrastructure.cluster.x-k8s.io, controlplane.cluster.x-k8s.io], resources: ["*"], verbs: ["*"]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: test-provider}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: test-provider}
subjects: [{kind: ServiceAccount, name: capi-kubeadm-bootstrap-manager, namespace: capi-kubeadm-bootstrap-system}]
`
	testCluster = `
apiVersion: infrastructure.cluster.x-k8s.io/v1
kind: TestCluster
metadata: {name: c, namespace: default}
status: {initialization: {provisioned: true}}
---
apiVersion: controlplane.cluster.x-k8s.io/v1
kind: TestControlPlane
metadata: {name: c, namespace: default}
spec: {version: %[1]s}
status: {initialization: {controlPlaneInitialized: true}, externalManagedControlPlane: true, version: %[1]s}
---
apiVersion: infrastructure.cluster.x-k8s.io/v1
kind: TestMachineTemplate
metadata: {name: m, namespace: default}
spec: {template: {spec: {}}}
---
apiVersion: bootstrap.cluster.x-k8s.io/v1beta2
kind: KubeadmConfigTemplate
metadata: {name: m, namespace: default}
spec: {template: {spec: {joinConfiguration: {nodeRegistration: {imagePullSerial: false}}}}}
---
apiVersion: cluster.x-k8s.io/v1beta1
kind: Cluster
metadata: {name: c, namespace: default}
spec:
  controlPlaneEndpoint: {host: 127.0.0.1, port: %[2]s}
  infrastructureRef: {apiVersion: infrastructure.cluster.x-k8s.io/v1, kind: TestCluster, name: c}
  controlPlaneRef: {apiVersion: controlplane.cluster.x-k8s.io/v1, kind: TestControlPlane, name: c}
---
apiVersion: cluster.x-k8s.io/v1beta2
kind: MachineDeployment
metadata: {name: m, namespace: default}
spec:
  clusterName: c
  replicas: 0
  selector: {matchLabels: {of: m}}
  template:
    metadata: {labels: {of: m}}
    spec:
      clusterName: c
      version: %[1]s
      bootstrap: {configRef: {apiGroup: bootstrap.cluster.x-k8s.io, kind: KubeadmConfigTemplate, name: m}}
      infrastructureRef: {apiGroup: infrastructure.cluster.x-k8s.io, kind: TestMachineTemplate, name: m}
`
	testClusterSecrets = `
apiVersion: v1
kind: Secret
metadata: {name: c-ca, namespace: default, labels: {cluster.x-k8s.io/cluster-name: c}}
type: cluster.x-k8s.io/secret
stringData: {tls.crt: %[1]q, tls.key: %[2]q}
---
apiVersion: v1
kind: Secret
metadata: {name: c-kubeconfig, namespace: default, labels: {cluster.x-k8s.io/cluster-name: c}}
type: cluster.x-k8s.io/secret
stringData: {value: %[3]q}
`
)

// A MachineDeployment scales from 0 to 3 to 1, with a restart of the managers in between. There is
// no infrastructure: the test checks that bootstrap data is made, and deleted with its Machine. The
// Cluster is written in an older API version, so that the conversion webhook is needed.
func TestClusterAPI(t *testing.T) {
	Full(t)
	components := buildForTest(t)
	managers, err := compile.ClusterAPI(t.Context(), os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	cp, err := Start(t.Context(), Options{Components: &components})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stopAndLookAround(t, cp) })
	begun := time.Now()
	capi, err := StartClusterAPI(t.Context(), cp, ClusterAPIOptions{Components: &managers, BootstrapTokenTTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("Cluster API ready after %s", time.Since(begun).Round(time.Millisecond))
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(capi.Logs())
		}
		if err := capi.Stop(); err != nil {
			t.Error(err)
		}
	})

	createTestCluster(t, cp)
	begun = time.Now()
	scaleTestMachines(t, cp, 3)
	awaitBootstrapData(t, cp, 3)
	t.Logf("bootstrap data of 3 Machines after %s", time.Since(begun).Round(time.Millisecond))

	pid := capi.Core.PID()
	for _, manager := range []*Manager{capi.Core, capi.KubeadmBootstrap} {
		if err := manager.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if capi.Core.PID() == pid {
		t.Error("the core manager was not restarted")
	}
	scaleTestMachines(t, cp, 1)
	awaitBootstrapData(t, cp, 1)
}

func createTestCluster(t *testing.T, cp *ControlPlane) {
	t.Helper()
	var manifests strings.Builder
	for _, kind := range [][3]any{
		{"testclusters", "infrastructure", "TestCluster"}, {"testmachines", "infrastructure", "TestMachine"},
		{"testmachinetemplates", "infrastructure", "TestMachineTemplate"}, {"testcontrolplanes", "controlplane", "TestControlPlane"},
	} {
		fmt.Fprintf(&manifests, providerKind, kind[:]...)
	}
	manifests.WriteString(providerRights)
	server, err := url.Parse(cp.ServerURL())
	if err != nil {
		t.Fatal(err)
	}
	key, err := cp.ClientCA().KeyPEM()
	if err != nil {
		t.Fatal(err)
	}
	// The Cluster is its own management cluster.
	fmt.Fprintf(&manifests, "---"+testClusterSecrets, cp.ClientCA().CertPEM(), key, cp.AdminKubeconfig())
	fmt.Fprintf(&manifests, "---"+testCluster, cp.components.KubernetesVersion, server.Port())
	objects, err := ReadObjects([]byte(manifests.String()))
	if err != nil {
		t.Fatal(err)
	}
	statuses := map[*unstructured.Unstructured]any{}
	for _, object := range objects {
		statuses[object] = object.Object["status"]
	}
	if err := cp.CreateObjects(t.Context(), objects); err != nil {
		t.Fatal(err)
	}
	c := testClient(t, cp)
	for object, status := range statuses {
		if status == nil {
			continue
		}
		before := object.DeepCopy()
		object.Object["status"] = status
		if err := c.Status().Patch(t.Context(), object, client.MergeFrom(before)); err != nil {
			t.Fatal(err)
		}
	}
}

func testClient(t *testing.T, cp *ControlPlane) client.Client {
	t.Helper()
	c, err := client.New(cp.AdminConfig(), client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func scaleTestMachines(t *testing.T, cp *ControlPlane, replicas int) {
	t.Helper()
	object := clusterAPIObject("cluster.x-k8s.io/v1beta2", "MachineDeployment")
	object.SetNamespace("default")
	object.SetName("m")
	patch := fmt.Sprintf(`{"spec":{"replicas":%d}}`, replicas)
	if err := testClient(t, cp).Patch(t.Context(), object, client.RawPatch("application/merge-patch+json", []byte(patch))); err != nil {
		t.Fatal(err)
	}
}

func clusterAPIObject(apiVersion, kind string) *unstructured.Unstructured {
	object := &unstructured.Unstructured{}
	object.SetAPIVersion(apiVersion)
	object.SetKind(kind)
	return object
}

// awaitBootstrapData waits until there are so many Machines, KubeadmConfigs and TestMachines, and a
// Secret with bootstrap data for each.
func awaitBootstrapData(t *testing.T, cp *ControlPlane, count int) {
	t.Helper()
	c := testClient(t, cp)
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	if err := poll(ctx, fmt.Sprintf("bootstrap data of %d Machines", count), func(ctx context.Context) error {
		for apiVersion, kind := range map[string]string{
			"cluster.x-k8s.io/v1beta2": "Machine", "bootstrap.cluster.x-k8s.io/v1beta2": "KubeadmConfig", "infrastructure.cluster.x-k8s.io/v1": "TestMachine",
		} {
			list := &unstructured.UnstructuredList{}
			list.SetAPIVersion(apiVersion)
			list.SetKind(kind + "List")
			if err := c.List(ctx, list, client.InNamespace("default")); err != nil {
				return err
			}
			if len(list.Items) != count {
				return fmt.Errorf("%d of kind %s", len(list.Items), kind)
			}
		}
		return haveBootstrapData(ctx, c, count)
	}); err != nil {
		t.Fatal(err)
	}
}

// haveBootstrapData counts the Secrets with the command that a machine joins with.
func haveBootstrapData(ctx context.Context, c client.Client, count int) error {
	secrets := &unstructured.UnstructuredList{}
	secrets.SetAPIVersion("v1")
	secrets.SetKind("SecretList")
	if err := c.List(ctx, secrets, client.InNamespace("default"), client.MatchingLabels{"cluster.x-k8s.io/cluster-name": "c"}); err != nil {
		return err
	}
	found := 0
	for _, secret := range secrets.Items {
		if format, _, _ := unstructured.NestedString(secret.Object, "data", "format"); format != "" {
			found++
		}
	}
	if found != count {
		return fmt.Errorf("%d Secrets with bootstrap data", found)
	}
	return nil
}
