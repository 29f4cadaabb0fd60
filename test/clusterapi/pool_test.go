// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	bootstrapv1 "sigs.k8s.io/cluster-api/api/bootstrap/kubeadm/v1beta2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// machinePool is a MachinePool whose instances have no Machines.
type machinePool struct {
	*cluster
	object *clusterv1.MachinePool
}

// newPool makes one, with its bootstrap configuration, in which token is; it may be empty.
func (c *cluster) newPool(t *testing.T, name, token string, providerIDs ...string) *machinePool {
	t.Helper()
	p := &machinePool{cluster: c, object: &clusterv1.MachinePool{
		ObjectMeta: c.meta(name),
		Spec: clusterv1.MachinePoolSpec{
			ClusterName: c.name, ProviderIDList: providerIDs, Replicas: new(int32(3)),
			Template: clusterv1.MachineTemplateSpec{Spec: clusterv1.MachineSpec{
				ClusterName: c.name,
				Bootstrap: clusterv1.Bootstrap{
					ConfigRef:      clusterv1.ContractVersionedObjectReference{APIGroup: bootstrapv1.GroupVersion.Group, Kind: "KubeadmConfig", Name: name},
					DataSecretName: &name,
				},
				InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: "infrastructure.cluster.x-k8s.io", Kind: "TestMachinePool", Name: name},
			}},
		},
	}}
	p.object.OwnerReferences = []metav1.OwnerReference{c.owner()}
	c.create(t, p.object)
	updateStatus(t, c.client, p.object, func(object *clusterv1.MachinePool) {
		object.Status.Initialization = clusterv1.MachinePoolInitializationStatus{InfrastructureProvisioned: new(true), BootstrapDataSecretCreated: new(true)}
	})
	c.putConfig(t, c.kubeadmConfig(name, token), p.owner())
	return p
}

func (p *machinePool) owner() metav1.OwnerReference {
	return metav1.OwnerReference{APIVersion: clusterv1.GroupVersion.String(), Kind: "MachinePool", Name: p.object.Name, UID: p.object.UID}
}

// newInstance is a machine that nothing in the management cluster is about.
func (c *cluster) newInstance(t *testing.T, name string) *machine {
	t.Helper()
	return c.newMachine(t, name, func(m *machine) { m.object = nil })
}

// entry is what an operator makes of a machine's own words for an inventory.
func (m *machine) entry(t *testing.T) []byte {
	t.Helper()
	device, err := m.provider.(provider.Inspector).Identify(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	out, err := yaml.Marshal(map[string]any{"nodeName": m.name, "providerID": m.providerID, "provider": tpm.Name, "device": device})
	if err != nil {
		t.Fatal(err)
	}
	return append([]byte("---\n"), out...)
}

// The machines of a pool come and go, and nobody makes a token for them. They have a static
// credential that lets them file requests and nothing else. So there is no race between a token in
// their boot data and its rotation. An inventory maps provider IDs to EKs.
func TestMachinePool(t *testing.T) {
	t.Parallel()
	const user, group = "pool-bootstrapper", "example.test:pool-bootstrappers"
	w := newWorld(t, shared.management)
	c := w.newCluster(t, "workload", nil)
	inventory := filepath.Join(t.TempDir(), "inventory.yaml")
	first, second, third, stranger := c.newInstance(t, "pool-0"), c.newInstance(t, "pool-1"), c.newInstance(t, "pool-2"), c.newInstance(t, "pool-3")
	last := c.newInstance(t, "pool-4")
	var known bytes.Buffer
	for _, m := range []*machine{first, second, third, last} {
		known.Write(m.entry(t))
	}
	if err := os.WriteFile(inventory, known.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	w.start(t, func(file map[string]any) {
		inventoried(inventory)(file)
		file["bootstrappers"] = []any{map[string]any{"username": user, "group": group}}
	})
	c.bindGroup(t, group)
	now := time.Now()
	pair, err := c.workload.ClientCA().IssueClient(user, []string{group}, now.Add(-time.Hour), now.Add(24*time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	static := func(config *rest.Config) { config.CertData, config.KeyData = pair.CertPEM, pair.KeyPEM }

	// It is filed before the platform says that the instance is there, and waits.
	p := c.newPool(t, "pool", "", first.providerID)
	for _, m := range []*machine{first, second, third, stranger, last} {
		m.static = static
	}
	late := second.begins(t)
	first.attests(t)
	record := c.recordOf(t, first)
	if record == nil || len(record.OwnerReferences) != 1 || record.OwnerReferences[0].UID != p.object.UID || record.OwnerReferences[0].Kind != "MachinePool" ||
		record.Spec.ProviderID != first.providerID || record.Spec.EK.Fingerprint != first.ek {
		t.Fatalf("%+v", record)
	}
	first.attests(t) // a renewal
	late.waits(t, lateWait)
	since := time.Now()
	update(t, c.client, p.object, func(o *clusterv1.MachinePool) { o.Spec.ProviderIDList = []string{first.providerID, second.providerID} })
	late.follows(t, "providerIDList", since)

	p2 := c.newPool(t, "another", "", third.providerID)
	third.attests(t)
	if record := c.recordOf(t, third); record == nil || record.OwnerReferences[0].UID != p2.object.UID {
		t.Errorf("%+v", record)
	}
	// One that is in no inventory, or claims another's provider ID, waits or is refused.
	hello := stranger.peer(t).hello(t)
	claims := c.newPeer(t, stranger.computer, stranger.credential(), second.name, second.providerID).hello(t)
	time.Sleep(3 * time.Second) // no challenge may come
	for _, r := range []string{hello.Name, claims.Name} {
		if got := c.get(t, r); got.Annotations[attestation.AnnotationChallenge] != "" || len(got.Status.Conditions) > 0 && reasonOf(got) == "" {
			t.Errorf("a stranger: %+v %+v", got.Annotations, got.Status)
		}
	}

	// The platform takes an instance away: its node renews no more, and the others go on.
	update(t, c.client, p.object, func(o *clusterv1.MachinePool) { o.Spec.ProviderIDList = []string{second.providerID} })
	// One watch tells of all pools: of a new one last.
	c.newPool(t, "last", "", last.providerID)
	last.attests(t)
	gone := first.begins(t)
	second.attests(t)
	gone.waits(t, 3*time.Second)
	if err := c.client.Delete(t.Context(), p.object); err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, 30*time.Second, "the pool's records are collected", func() bool { return c.recordOf(t, first) == nil && c.recordOf(t, second) == nil })
	if c.recordOf(t, third) == nil {
		t.Error("another pool's record was collected")
	}
}

// inventoried has an inventory be the source of EKs.
func inventoried(path string) func(map[string]any) {
	return func(file map[string]any) {
		clusterAPI(file)["ekSources"] = []any{"Inventory"}
		file["inventory"] = map[string]any{"file": path}
	}
}

// A token in a pool's boot data was made for no one machine: where tokens count, its instances
// cannot show one.
func TestMachinePoolToken(t *testing.T) {
	t.Parallel()
	w := newWorld(t, shared.management)
	c := w.newCluster(t, "workload", nil)
	m := c.newInstance(t, "pool-0")
	inventory := filepath.Join(t.TempDir(), "inventory.yaml")
	if err := os.WriteFile(inventory, m.entry(t), 0o600); err != nil {
		t.Fatal(err)
	}
	w.start(t, inventoried(inventory))
	c.newPool(t, "pool", m.token, m.providerID)
	if reason := c.refusesTry(t, m.peer(t)); reason != string(verifier.ReasonTokenNotForMachine) {
		t.Errorf("with a pool's token: %s", reason)
	}
}

// bindGroup lets a group file requests and watch its own, with the role that the manifests have for
// that.
func (c *cluster) bindGroup(t *testing.T, group string) {
	t.Helper()
	t.Cleanup(func() {
		binding := &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: group}}
		if err := c.workload.client.Delete(context.WithoutCancel(t.Context()), binding); err != nil {
			t.Error(err)
		}
	})
	if err := c.workload.BindGroup(t.Context(), group, "node-attestation-requester", group); err != nil {
		t.Fatal(err)
	}
}
