// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// instance is the name of the pool's instance metal://1: the SHA-256 is that of `printf metal://1 |
// sha256sum`.
const instance = "p/e574b79dd623a73c"

func TestInstances(t *testing.T) {
	p := pool("p", "metal://1", "metal://2", "", "metal://1")
	s := newMachineSource(machineSourceConfig{Reader: newStore(t, p), Cluster: blue, Annotations: true})
	got := read(t, s, start)
	if len(got) != 2 {
		t.Fatalf("got %+v", got)
	}
	// No name, no EK, no time of creation.
	want := verifier.Machine{Ref: verifier.MachineRef{Name: instanceName("p", "metal://1"), UID: "uid-p"}, ProviderID: "metal://1", Ready: true}
	if m := got[want.Ref.Name]; !reflect.DeepEqual(m, want) {
		t.Errorf("got  %+v\nwant %+v", m, want)
	}
	if m := got[instanceName("p", "metal://2")]; m.ProviderID != "metal://2" {
		t.Errorf("got %+v", m)
	}
}

func TestInstanceName(t *testing.T) {
	if got := instanceName("p", "metal://1"); got != instance {
		t.Errorf("got %s, want %s: records would be lost", got, instance)
	}
}

func TestPoolStates(t *testing.T) {
	for name, test := range map[string]struct {
		change  func(*clusterv1.MachinePool)
		ready   bool
		deleted bool
	}{
		"as it is":                 {func(*clusterv1.MachinePool) {}, true, false},
		"infrastructure not there": {func(p *clusterv1.MachinePool) { p.Status.Initialization.InfrastructureProvisioned = nil }, false, false},
		"bootstrap data not there": {func(p *clusterv1.MachinePool) { p.Status.Initialization.BootstrapDataSecretCreated = nil }, false, false},
		"paused":                   {func(p *clusterv1.MachinePool) { p.Annotations = map[string]string{clusterv1.PausedAnnotation: ""} }, false, false},
		"being deleted":            {func(p *clusterv1.MachinePool) { p.DeletionTimestamp = new(metav1.NewTime(start)) }, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			p := pool("p", "metal://1")
			test.change(p)
			m := read(t, newMachineSource(machineSourceConfig{Reader: newStore(t, p), Cluster: blue}), start)[instance]
			if m.Ready != test.ready || m.Deleted.IsZero() == test.deleted {
				t.Errorf("got %+v", m)
			}
		})
	}
}

// An instance that has a Machine counts once, as the Machine.
func TestPoolsWithMachines(t *testing.T) {
	ofPool := func(m *clusterv1.Machine) {
		m.OwnerReferences = []metav1.OwnerReference{{Kind: "MachinePool", Name: "p", UID: "uid-p"}}
	}
	for name, test := range map[string]struct {
		machine *clusterv1.Machine
		want    []string
	}{
		"no Machine": {machine("x"), []string{"x", "p/1", "p/2"}},
		"Machine of the provider ID that nobody owns": {
			machine("x", func(m *clusterv1.Machine) { m.Spec.ProviderID = "metal://1" }), []string{"x", "p/2"},
		},
		"Machine of the pool": { // the others are about to have theirs
			machine("x", ofPool, func(m *clusterv1.Machine) { m.Spec.ProviderID = "metal://1" }), []string{"x"},
		},
		"Machine of the pool, still without a provider ID": {
			machine("x", ofPool, func(m *clusterv1.Machine) { m.Spec.ProviderID = "" }), []string{"x"},
		},
		"Machine of another Cluster": {
			machine("x", ofPool, func(m *clusterv1.Machine) { m.Spec.ClusterName, m.Spec.ProviderID = "red", "metal://1" }), []string{"p/1", "p/2"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := read(t, newMachineSource(machineSourceConfig{Reader: newStore(t, pool("p", "metal://1", "metal://2"), test.machine), Cluster: blue}), start)
			for _, want := range test.want {
				if id, ok := strings.CutPrefix(want, "p/"); ok {
					want = instanceName("p", "metal://"+id)
				}
				if _, ok := got[want]; !ok {
					t.Errorf("%s is missing", want)
				}
			}
			if len(got) != len(test.want) {
				t.Errorf("got %+v", got)
			}
		})
	}
}

func TestInstancesAreBounded(t *testing.T) {
	var many []string
	for i := range maxInstances + 10 {
		many = append(many, fmt.Sprintf("metal://%d", i))
	}
	s := newMachineSource(machineSourceConfig{Reader: newStore(t, pool("p", many...)), Cluster: blue})
	if got := read(t, s, start); len(got) != maxInstances {
		t.Errorf("got %d", len(got))
	}
}

func TestInstancesFromInventory(t *testing.T) {
	inventory := inventoryOf(t, "machines: [{nodeName: n1, providerID: 'metal://1', addresses: [n1.example.org, 10.0.0.1], eks: [{fingerprint: "+ek("a")+"}]}, "+
		"{nodeName: n2, providerID: 'metal://m', addresses: [10.0.0.2], eks: [{fingerprint: "+ek("b")+"}]}, {nodeName: n3, eks: [{fingerprint: "+ek("c")+"}]}]")
	s := newMachineSource(machineSourceConfig{Reader: newStore(t, pool("p", "metal://1", "metal://2"), machine("m")), Cluster: blue, Inventory: inventory})
	for i := range 2 { // what was added must not pile up
		got := read(t, s, start.Add(time.Duration(i)*time.Second))
		first := got[instance]
		if ekList(first) != "Inventory a" || fmt.Sprint(first.Names) != "[{Inventory n1}]" || fmt.Sprint(first.Addresses) != "{[n1.example.org] [10.0.0.1]}" {
			t.Errorf("got %+v", first)
		}
		if second := got[instanceName("p", "metal://2")]; ekList(second) != "" || len(second.Names) != 0 {
			t.Errorf("got %+v", second)
		}
		// A Machine has its names and addresses from its object.
		if m := got["m"]; ekList(m) != "Inventory b" || fmt.Sprint(m.Names) != "[{MachineName m}]" || len(m.Addresses.IPs) != 0 {
			t.Errorf("got %+v", m)
		}
	}
	problem(t, s.Problem())
}
