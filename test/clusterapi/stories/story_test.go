// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	bootstrapv1 "sigs.k8s.io/cluster-api/api/bootstrap/kubeadm/v1beta2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/kubeconfig"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal/controlplanev1"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal/infrav1"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// The limits are long, because a machine with few processors boots Machines one after the other.
const (
	joinLimit = 4 * time.Minute
	goneLimit = 2 * time.Minute
)

// story is a namespace of the management cluster, with a controller that serves the Clusters in it.
type story struct {
	*bed
	namespace  string
	controller *controllerprocess.Controller
	clusters   []*cluster
}

// newStory makes a namespace, and starts the controller with the rights of packaging/cluster-api.
// edit may change its configuration: see controllerprocess.Options.
func newStory(t *testing.T, edit func(file map[string]any)) *story {
	t.Helper()
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "story-"}}
	harness.Must(t, shared.client.Create(t.Context(), namespace))
	return shared.newStory(t, namespace.Name, edit)
}

// newStory starts the controller for a namespace, which may be created later.
func (b *bed) newStory(t *testing.T, namespace string, edit func(file map[string]any)) *story {
	t.Helper()
	t.TempDir() // cleanups run in reverse order: this folder is removed after those below have run
	s := &story{bed: b, namespace: namespace}
	var err error
	s.controller, err = controllerprocess.New(controllerprocess.Options{
		ControlPlane: s.ControlPlane, Dir: t.TempDir(), Binary: built.controller,
		Configure: func(c *config.Config) {
			c.ClusterUID, c.Signing, c.Inventory = "", config.Signing{Mode: config.Sign}, config.Inventory{}
			c.LeaderElection.Enabled = false // parallel stories would share one Lease
		},
		Edit: func(file map[string]any) {
			file["clusterAPI"] = map[string]any{"namespaces": []any{s.namespace}, "ekSources": []any{"Annotation"}}
			if edit != nil {
				edit(file)
			}
		},
	})
	harness.Must(t, err)
	harness.Must(t, errors.Join(s.controller.Start(t.Context()), s.controller.Ready(t.Context())))
	t.Cleanup(func() { s.end(context.WithoutCancel(t.Context()), t) })
	return s
}

// end deletes all Clusters. It fails if anything blocks the deletion, or if the API server denied
// the controller a request for want of RBAC rights.
func (s *story) end(ctx context.Context, t *testing.T) {
	t.Helper()
	if t.Failed() {
		s.explain(ctx, t)
	}
	if err := s.deleteClusters(ctx); err != nil {
		t.Error(err)
	}
	if err := s.controller.Kill(); err != nil {
		t.Errorf("the controller exited before the end of the story: %v", err)
	}
	log, err := os.ReadFile(s.controller.LogFile())
	if err != nil {
		t.Error(err)
	}
	for line := range bytes.Lines(log) {
		if bytes.Contains(line, []byte("forbidden")) {
			t.Errorf("the controller lacks an RBAC right: %s", line)
		}
	}
	for _, c := range s.clusters {
		if err := c.workload.Stop(); err != nil {
			t.Error(err)
		}
	}
}

// deleteClusters deletes the Clusters as a user does, and waits until left returns nothing.
func (s *story) deleteClusters(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, goneLimit)
	defer cancel()
	for _, c := range s.clusters {
		if err := s.client.Delete(ctx, c.object); client.IgnoreNotFound(err) != nil {
			return err
		}
	}
	for {
		left, err := s.left(ctx)
		if err == nil && len(left) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the Clusters were deleted, but these objects are left: %v: %w", left, errors.Join(ctx.Err(), err))
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// left returns the Clusters, Machines, MetalMachines and records that still exist in the namespace.
func (s *story) left(ctx context.Context) (left []string, err error) {
	for _, list := range []client.ObjectList{
		&clusterv1.ClusterList{}, &clusterv1.MachineList{}, &infrav1.MetalMachineList{}, &v1alpha1.NodeAttestationList{},
	} {
		if err := s.client.List(ctx, list, client.InNamespace(s.namespace)); err != nil {
			return nil, err
		}
		if err := apimeta.EachListItem(list, func(object runtime.Object) error {
			left = append(left, fmt.Sprintf("%T %s", object, object.(client.Object).GetName()))
			return nil
		}); err != nil {
			return nil, err
		}
	}
	return left, nil
}

// explain logs the state of the Machines and all components' logs, for a failed story.
func (s *story) explain(ctx context.Context, t *testing.T) {
	t.Helper()
	t.Log(s.controller.LogTail())
	t.Log(s.clusterAPI.Logs())
	machines := &clusterv1.MachineList{}
	if err := s.client.List(ctx, machines, client.InNamespace(s.namespace)); err != nil {
		t.Log(err)
	}
	for _, m := range machines.Items {
		t.Logf("Machine %s: phase %s, Node %q, provider ID %s, %+v", m.Name, m.Status.Phase, m.Status.NodeRef.Name, m.Spec.ProviderID, m.Status.Conditions)
		for _, id := range s.hosts.IDs(m.Name) {
			ctx, cancel := context.WithTimeout(ctx, time.Minute)
			t.Log(s.hosts.Logs(ctx, id))
			cancel()
		}
	}
}

// records returns the NodeAttestations of the story.
func (s *story) records(t *testing.T) []v1alpha1.NodeAttestation {
	t.Helper()
	list := &v1alpha1.NodeAttestationList{}
	harness.Must(t, s.client.List(t.Context(), list, client.InNamespace(s.namespace)))
	return list.Items
}

// cluster is a Cluster object, and its workload cluster.
type cluster struct {
	*story
	name     string
	object   *clusterv1.Cluster
	workload *testbed.ControlPlane
}

// workloadAudit logs all requests: our controller impersonates users there, and an audit policy can
// only select by the impersonating user.
const workloadAudit = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: Metadata}
`

// newCluster starts an API server as kubeadm init sets one up, installs
// packaging/cluster-api/workload there, and creates the Cluster.
//
// The kubeadm bootstrap provider pins the CA of the Secret <cluster>-ca in the user data. Machines
// get the API server's CA from cluster-info. kubeadm uses one CA for both, so the option OneCA does
// too.
func (s *story) newCluster(t *testing.T, name string) *cluster {
	t.Helper()
	cp, err := testbed.Start(t.Context(), testbed.Options{Etcd: s.ControlPlane, OneCA: true, AuditPolicy: []byte(workloadAudit)})
	harness.Must(t, err)
	c := &cluster{story: s, name: name, workload: cp}
	s.clusters = append(s.clusters, c)
	c.object = &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: name}}
	harness.Must(t, cp.StartControllerManager(t.Context()))
	_, err = cp.KubeadmInit(t.Context(), built.node.Kubeadm())
	harness.Must(t, err)
	harness.Must(t, install(t.Context(), cp, "workload"))
	harness.Must(t, controllerprocess.AwaitPolicies(t.Context(), cp))
	address := strings.TrimPrefix(cp.ServerURL(), "https://")
	s.hosts.reach(address, fleet.Cluster{URL: cp.ServerURL(), CA: cp.ServerCA(), Issuer: cp.ClientCA().Certificate()})
	host, port, err := net.SplitHostPort(address)
	harness.Must(t, err)
	number, err := strconv.ParseInt(port, 10, 32)
	harness.Must(t, err)

	infra := &infrav1.MetalCluster{ObjectMeta: c.meta(name)}
	controlPlane := &controlplanev1.HostedControlPlane{
		ObjectMeta: c.meta(name), Spec: controlplanev1.HostedControlPlaneSpec{Version: s.KubernetesVersion()},
	}
	c.object.Spec = clusterv1.ClusterSpec{
		ControlPlaneEndpoint: clusterv1.APIEndpoint{Host: host, Port: int32(number)},
		InfrastructureRef:    reference(infrav1.GroupVersion.Group, "MetalCluster", name),
		ControlPlaneRef:      reference(controlplanev1.GroupVersion.Group, "HostedControlPlane", name),
	}
	for _, object := range []client.Object{infra, controlPlane, c.object} {
		harness.Must(t, s.client.Create(t.Context(), object))
	}
	c.createSecrets(t)
	return c
}

// createSecrets creates the Secrets that the provider of an external control plane would create.
func (c *cluster) createSecrets(t *testing.T) {
	t.Helper()
	key, err := c.workload.ClientCA().KeyPEM()
	harness.Must(t, err)
	ca := &corev1.Secret{
		ObjectMeta: c.meta(secret.Name(c.name, secret.ClusterCA)), Type: clusterv1.ClusterSecretType,
		Data: map[string][]byte{secret.TLSCrtDataName: c.workload.ClientCA().CertPEM(), secret.TLSKeyDataName: key},
	}
	ca.OwnerReferences = []metav1.OwnerReference{{APIVersion: clusterv1.GroupVersion.String(), Kind: "Cluster", Name: c.name, UID: c.object.UID}}
	harness.Must(t, c.client.Create(t.Context(), ca))
	harness.Must(t, c.client.Create(t.Context(), kubeconfig.GenerateSecret(c.object, c.workload.AdminKubeconfig())))
}

func (c *cluster) meta(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: c.namespace, Name: name, Labels: map[string]string{clusterv1.ClusterNameLabel: c.name}}
}

func reference(group, kind, name string) clusterv1.ContractVersionedObjectReference {
	return clusterv1.ContractVersionedObjectReference{APIGroup: group, Kind: kind, Name: name}
}

// machineDeployment is a MachineDeployment with its templates.
type machineDeployment struct {
	*cluster
	object   *clusterv1.MachineDeployment
	infra    *infrav1.MetalMachineTemplate
	template *bootstrapv1.KubeadmConfigTemplate
}

// pluginConfig is the one file that node attestation adds to a template. cloud-init fills in the
// instance ID, from which Metal makes the provider ID.
const pluginConfig = `apiVersion: authenticator.cluster.x-k8s.io/v1alpha1
kind: KubeletAuthenticatorConfiguration
provider: tpm
providerID: 'metal://{{ ds.meta_data.instance_id }}'
`

// newMachineDeployment creates a MachineDeployment with 0 replicas, and its templates. change may
// edit the objects before they are created.
func (c *cluster) newMachineDeployment(t *testing.T, name string, change func(*machineDeployment)) *machineDeployment {
	t.Helper()
	d := &machineDeployment{cluster: c}
	d.infra = &infrav1.MetalMachineTemplate{ObjectMeta: c.meta(name)}
	d.template = &bootstrapv1.KubeadmConfigTemplate{ObjectMeta: c.meta(name)}
	d.template.Spec.Template.Spec = bootstrapv1.KubeadmConfigSpec{
		JoinConfiguration: bootstrapv1.JoinConfiguration{NodeRegistration: bootstrapv1.NodeRegistrationOptions{
			Name: "{{ ds.meta_data.local_hostname }}", CRISocket: "unix:///run/fakecri.sock", IgnorePreflightErrors: []string{"all"},
			KubeletExtraArgs: []bootstrapv1.Arg{{Name: "provider-id", Value: ptr.To("metal://{{ ds.meta_data.instance_id }}")}},
		}},
		Files: []bootstrapv1.File{{Path: "/etc/kubelet-authenticator/config.yaml", Owner: "root:root", Permissions: "0600", Content: pluginConfig}},
	}
	labels := map[string]string{clusterv1.ClusterNameLabel: c.name, "of": name}
	d.object = &clusterv1.MachineDeployment{
		ObjectMeta: c.meta(name),
		Spec: clusterv1.MachineDeploymentSpec{
			ClusterName: c.name, Replicas: ptr.To[int32](0), Selector: metav1.LabelSelector{MatchLabels: labels},
			Template: clusterv1.MachineTemplateSpec{
				ObjectMeta: clusterv1.ObjectMeta{Labels: labels},
				Spec: clusterv1.MachineSpec{
					ClusterName: c.name, Version: c.KubernetesVersion(),
					Bootstrap:         clusterv1.Bootstrap{ConfigRef: reference(bootstrapv1.GroupVersion.Group, "KubeadmConfigTemplate", name)},
					InfrastructureRef: reference(infrav1.GroupVersion.Group, "MetalMachineTemplate", name),
				},
			},
		},
	}
	if change != nil {
		change(d)
	}
	for _, object := range []client.Object{d.infra, d.template, d.object} {
		harness.Must(t, c.client.Create(t.Context(), object))
	}
	return d
}

// scale changes the number of replicas.
func (d *machineDeployment) scale(t *testing.T, replicas int32) {
	t.Helper()
	before := d.object.DeepCopy()
	d.object.Spec.Replicas = &replicas
	harness.Must(t, d.client.Patch(t.Context(), d.object, client.MergeFrom(before)))
}

// machines returns all Machines, including those that are being deleted.
func (d *machineDeployment) machines(t *testing.T) []clusterv1.Machine {
	t.Helper()
	list := &clusterv1.MachineList{}
	harness.Must(t, d.client.List(t.Context(), list, client.InNamespace(d.namespace), client.MatchingLabels(d.object.Spec.Selector.MatchLabels)))
	return list.Items
}

// awaitRunning waits until there are exactly count Machines, and problem finds nothing wrong.
func (d *machineDeployment) awaitRunning(t *testing.T, count int) []clusterv1.Machine {
	t.Helper()
	began := time.Now()
	var problem string
	for time.Since(began) < joinLimit {
		machines := d.machines(t)
		if problem = d.problem(t, machines, count); problem == "" {
			t.Logf("%d Machines of %s are Running after %s", count, d.object.Name, time.Since(began).Round(100*time.Millisecond))
			return machines
		}
		time.Sleep(100 * time.Millisecond)
	}
	t.Fatalf("%s: after %s: %s", d.object.Name, joinLimit, problem)
	return nil
}

// problem returns the first thing that is wrong, or an empty string. Each Machine must be in phase
// Running, and its nodeRef must name a Ready Node of the Machine's own name. The Node and the
// record must have the Machine's provider ID. Each Machine must have one host. There may be no
// other records.
func (d *machineDeployment) problem(t *testing.T, machines []clusterv1.Machine, count int) string {
	t.Helper()
	if len(machines) != count {
		return fmt.Sprintf("there are %d Machines, want %d", len(machines), count)
	}
	records := map[string]string{}
	for _, record := range d.records(t) {
		// the names of its Machines begin so
		if strings.HasPrefix(record.Spec.NodeName, d.object.Name+"-") {
			records[record.Spec.NodeName] = record.Spec.ProviderID
		}
	}
	if len(records) != count {
		return fmt.Sprintf("there are %d records, want %d", len(records), count)
	}
	for _, m := range machines {
		if m.Status.Phase != string(clusterv1.MachinePhaseRunning) || m.Status.NodeRef.Name != m.Name {
			return fmt.Sprintf("Machine %s is in phase %s, its Node is %q", m.Name, m.Status.Phase, m.Status.NodeRef.Name)
		}
		node, err := d.workload.Client().CoreV1().Nodes().Get(t.Context(), m.Name, metav1.GetOptions{})
		if err != nil || node.Spec.ProviderID != m.Spec.ProviderID || !isReady(node) {
			return fmt.Sprintf("Node of Machine %s: %v, ready %t, provider ID %s, want %s", m.Name, err, isReady(node), node.Spec.ProviderID, m.Spec.ProviderID)
		}
		if records[m.Name] != m.Spec.ProviderID {
			return fmt.Sprintf("the record of Node %s has provider ID %q, want %s", m.Name, records[m.Name], m.Spec.ProviderID)
		}
		if len(d.hosts.IDs(m.Name)) != 1 {
			return fmt.Sprintf("Machine %s has %d hosts", m.Name, len(d.hosts.IDs(m.Name)))
		}
	}
	return ""
}

func isReady(node *corev1.Node) bool {
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}
