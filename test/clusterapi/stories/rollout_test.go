// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"maps"
	"slices"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	bootstrapv1 "sigs.k8s.io/cluster-api/api/bootstrap/kubeadm/v1beta2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// rolloutLimit is the time limit for replacing a few Machines, one after the other.
const rolloutLimit = 10 * time.Minute

// A user changes the template of a MachineDeployment. Cluster API replaces its Machines one by one.
// Each new Machine attests with its own TPM, and has a Node before an old Machine is deleted. The
// records, Nodes and hosts of the old Machines are deleted, too. The old Machines get no second
// certificate.
func TestRollout(t *testing.T) {
	full(t)
	t.Parallel()
	s := newStory(t, nil)
	c := s.newCluster(t, "one")
	h := c.follow(t)
	d := c.newMachineDeployment(t, "workers", nil)
	const replicas = 2
	d.scale(t, replicas)
	before := d.awaitRunning(t, replicas)

	h.count(replicas)
	d.rollOut(t, func(template *bootstrapv1.KubeadmConfigTemplate) {
		template.Spec.Template.Spec.PreKubeadmCommands = append(template.Spec.Template.Spec.PreKubeadmCommands, "touch /etc/rolled-out")
	})
	after := d.awaitReplaced(t, before)
	h.check(t, after) // first: it waits until the watch has seen the whole rollout
	if fewest, most := h.counted(); fewest < replicas || most > replicas+1 {
		t.Errorf("there were as few as %d Machines with a Node, and as many as %d Machines", fewest, most)
	}

	for _, m := range after {
		host, err := s.hosts.Machine(t.Context(), s.hosts.IDs(m.Name)[0])
		harness.Must(t, err)
		_, err = host.Run(t.Context(), "test", "-e", "/etc/rolled-out")
		harness.Must(t, err)
	}
}

// rollOut gives the MachineDeployment a new KubeadmConfigTemplate. Cluster API's guides say to
// replace templates, not to edit them.
func (d *machineDeployment) rollOut(t *testing.T, change func(*bootstrapv1.KubeadmConfigTemplate)) {
	t.Helper()
	next := &bootstrapv1.KubeadmConfigTemplate{ObjectMeta: d.meta(""), Spec: *d.template.Spec.DeepCopy()}
	next.GenerateName = d.object.Name + "-"
	change(next)
	harness.Must(t, d.client.Create(t.Context(), next))
	before := d.object.DeepCopy()
	d.object.Spec.Template.Spec.Bootstrap.ConfigRef.Name = next.Name
	harness.Must(t, d.client.Patch(t.Context(), d.object, client.MergeFrom(before)))
}

// awaitReplaced waits until the old Machines are gone and as many new ones are Running. The old
// Machines must have left no Node and no host.
func (d *machineDeployment) awaitReplaced(t *testing.T, old []clusterv1.Machine) []clusterv1.Machine {
	t.Helper()
	names := map[string]bool{}
	for _, m := range old {
		names[m.Name] = true
	}
	began := time.Now()
	for slices.ContainsFunc(d.machines(t), func(m clusterv1.Machine) bool { return names[m.Name] }) {
		if time.Since(began) > rolloutLimit {
			t.Fatalf("%s: old Machines are still there after %s", d.object.Name, rolloutLimit)
		}
		time.Sleep(200 * time.Millisecond)
	}
	after := d.awaitRunning(t, len(old))
	for _, name := range slices.Sorted(maps.Keys(names)) {
		if ids := d.hosts.IDs(name); len(ids) > 0 {
			t.Errorf("the host of Machine %s is still on", name)
		}
		if _, err := d.workload.Client().CoreV1().Nodes().Get(t.Context(), name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			t.Errorf("Node %s is still there: %v", name, err)
		}
	}
	return after
}
