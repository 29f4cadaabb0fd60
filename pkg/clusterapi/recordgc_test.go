// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

// ownedRecord returns the record of a machine.
func ownedRecord(name, kind string, owner types.UID, machine, node, cluster string) *v1alpha1.NodeAttestation {
	return &v1alpha1.NodeAttestation{
		ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: name, UID: types.UID("uid-" + name), OwnerReferences: []metav1.OwnerReference{{Kind: kind, Name: "x", UID: owner}}},
		Spec:       v1alpha1.NodeAttestationSpec{Cluster: cluster, NodeName: node, Machine: v1alpha1.MachineReference{Name: machine}},
	}
}

func newRecordGC(t *testing.T, clock *time.Time, objects ...client.Object) (*recordGC, *events.FakeRecorder) {
	t.Helper()
	scheme, err := Management{}.Scheme()
	if err != nil {
		t.Fatal(err)
	}
	api := fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).
		WithIndex(&v1alpha1.NodeAttestation{}, v1alpha1.FieldCluster, func(o client.Object) []string { return []string{o.(*v1alpha1.NodeAttestation).Spec.Cluster} }).Build()
	said := events.NewFakeRecorder(10)
	return &recordGC{
		cached: api, live: api, cluster: types.NamespacedName{Namespace: "n", Name: "c"}, uid: "u", events: said, log: logr.Discard(),
		now: func() time.Time { return *clock },
	}, said
}

// If a Machine's nodeRef is another Node than the one that attested, an Event reports it once for
// each Node.
func TestNodeRefsAreCompared(t *testing.T) {
	t.Parallel()
	machine := func(name, ref string) *clusterv1.Machine {
		return &clusterv1.Machine{
			ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: name, UID: types.UID(name)}, Spec: clusterv1.MachineSpec{ClusterName: "c"},
			Status: clusterv1.MachineStatus{NodeRef: clusterv1.MachineNodeReference{Name: ref}},
		}
	}
	clock := time.Now()
	u, said := newRecordGC(t, &clock,
		machine("good", "node-good"), ownedRecord("good", "Machine", "good", "good", "node-good", "u"),
		machine("bad", "node-good"), ownedRecord("bad", "Machine", "bad", "bad", "node-bad", "u"),
		machine("none", ""), ownedRecord("none", "Machine", "none", "none", "node-none", "u"),
		machine("unrecorded", "node-x"),
		machine("another", "node-y"), ownedRecord("another", "Machine", "another", "another", "node-z", "another cluster"),
	)
	for range 2 {
		if err := u.run(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if len(said.Events) != 1 {
		t.Fatalf("%d Events", len(said.Events))
	}
	if note := <-said.Events; !strings.Contains(note, reasonNodeRef) || !strings.Contains(note, "node-good") || !strings.Contains(note, "node-bad") {
		t.Error(note)
	}
}

// The record of an instance is deleted an hour after the instance has left its pool. An empty list
// deletes no record.
func TestRecordsOfInstancesGo(t *testing.T) {
	t.Parallel()
	pool := func(name string, ids ...string) *clusterv1.MachinePool {
		return &clusterv1.MachinePool{
			ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: name, UID: types.UID(name)},
			Spec:       clusterv1.MachinePoolSpec{ClusterName: "c", ProviderIDList: ids},
		}
	}
	of := func(record, pool, id, cluster string) client.Object {
		return ownedRecord(record, "MachinePool", types.UID(pool), instanceName(pool, id), "node-"+record, cluster)
	}
	clock := time.Now()
	emptied := pool("emptied")
	u, _ := newRecordGC(t, &clock,
		pool("p", "a"), emptied,
		of("stays", "p", "a", "u"), of("goes", "p", "b", "u"), of("emptied", "emptied", "a", "u"), of("another", "p", "b", "another cluster"), of("no-pool", "q", "a", "u"),
		ownedRecord("machine", "Machine", "m", "m", "node-m", "u"),
	)
	left := func() []string {
		t.Helper()
		if err := u.run(t.Context()); err != nil {
			t.Fatal(err)
		}
		list := &v1alpha1.NodeAttestationList{}
		if err := u.live.List(t.Context(), list); err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, record := range list.Items {
			names = append(names, record.Name)
		}
		slices.Sort(names)
		return names
	}
	all := []string{"another", "emptied", "goes", "machine", "no-pool", "stays"}
	for _, step := range []struct {
		after time.Duration
		want  []string
	}{{0, all}, {instanceGracePeriod - time.Minute, all}, {2 * time.Minute, []string{"another", "emptied", "machine", "no-pool", "stays"}}, {24 * time.Hour, []string{"another", "emptied", "machine", "no-pool", "stays"}}} {
		clock = clock.Add(step.after)
		if got := left(); !slices.Equal(got, step.want) {
			t.Errorf("after %s: %q", step.after, got)
		}
	}
	// An instance that returns in time keeps its record.
	emptied.Spec.ProviderIDList = []string{"z"}
	if err := u.live.Update(t.Context(), emptied); err != nil {
		t.Fatal(err)
	}
	left()
	clock = clock.Add(instanceGracePeriod - time.Minute)
	emptied.Spec.ProviderIDList = []string{"z", "a"}
	if err := u.live.Update(t.Context(), emptied); err != nil {
		t.Fatal(err)
	}
	left()
	emptied.Spec.ProviderIDList = []string{"z"}
	if err := u.live.Update(t.Context(), emptied); err != nil {
		t.Fatal(err)
	}
	left()
	clock = clock.Add(instanceGracePeriod - time.Minute)
	if got := left(); !slices.Contains(got, "emptied") {
		t.Errorf("%q", got)
	}
}
