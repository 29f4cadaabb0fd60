// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

func TestMachine(t *testing.T) {
	good := func() verifier.Machine {
		return verifier.Machine{
			Ref: verifier.MachineRef{Name: "m", UID: "uid-m"}, ProviderID: "metal://m", Ready: true, Created: start,
			Names: []verifier.NodeName{{Source: verifier.NameMachine, Value: "m"}},
		}
	}
	for name, test := range map[string]struct {
		change func(*clusterv1.Machine)
		want   func(*verifier.Machine)
	}{
		"as it is": {func(*clusterv1.Machine) {}, func(*verifier.Machine) {}},
		"no provider ID yet": {
			func(m *clusterv1.Machine) { m.Spec.ProviderID = "" },
			func(m *verifier.Machine) { m.ProviderID = "" },
		},
		"infrastructure not there": {
			func(m *clusterv1.Machine) { m.Status.Initialization.InfrastructureProvisioned = nil },
			func(m *verifier.Machine) { m.Ready = false },
		},
		"bootstrap data not there": {
			func(m *clusterv1.Machine) { m.Status.Initialization.BootstrapDataSecretCreated = new(false) },
			func(m *verifier.Machine) { m.Ready = false },
		},
		"bootstrap data named, but made by a config": {
			func(m *clusterv1.Machine) {
				m.Status.Initialization.BootstrapDataSecretCreated = nil
				m.Spec.Bootstrap.DataSecretName = new("data")
			},
			func(m *verifier.Machine) { m.Ready = false },
		},
		"bootstrap data given by name": {
			func(m *clusterv1.Machine) {
				m.Status.Initialization.BootstrapDataSecretCreated = nil
				m.Spec.Bootstrap = clusterv1.Bootstrap{DataSecretName: new("data")}
			},
			func(*verifier.Machine) {},
		},
		"no bootstrap data at all": {
			func(m *clusterv1.Machine) {
				m.Status.Initialization.BootstrapDataSecretCreated = nil
				m.Spec.Bootstrap = clusterv1.Bootstrap{}
			},
			func(m *verifier.Machine) { m.Ready = false },
		},
		"paused": {
			// one source of each value is enough
			func(m *clusterv1.Machine) { m.Annotations = map[string]string{clusterv1.PausedAnnotation: "false"} },
			func(m *verifier.Machine) { m.Ready = false },
		},
		"being deleted": {
			func(m *clusterv1.Machine) { m.DeletionTimestamp = new(metav1.NewTime(start.Add(time.Hour))) },
			func(m *verifier.Machine) { m.Deleted = start.Add(time.Hour) },
		},
		"EK annotation that does not count": {annotated(ek("a")), func(*verifier.Machine) {}},
		// A node writes its Node, and Cluster API copies some fields into the Machine. Of these,
		// only the name of the Node is read.
		"nodeRef that points elsewhere": {
			func(m *clusterv1.Machine) {
				m.Status.NodeRef.Name = "control-plane-0"
				m.Status.NodeInfo = &corev1.NodeSystemInfo{MachineID: "control-plane-0", SystemUUID: "metal://control-plane-0"}
			},
			func(m *verifier.Machine) { m.NodeRef = "control-plane-0" },
		},
		"names by type": {
			addresses("Hostname=Worker-1", "InternalDNS=W1.Example.Org", "ExternalDNS=w1.example.com", "Hostname=worker-1"),
			func(m *verifier.Machine) {
				m.Names = append(m.Names, verifier.NodeName{Source: verifier.NameHostname, Value: "worker-1"},
					verifier.NodeName{Source: verifier.NameInternalDNS, Value: "w1.example.org"},
					verifier.NodeName{Source: verifier.NameExternalDNS, Value: "w1.example.com"})
				m.Addresses.DNSNames = []string{"worker-1", "w1.example.org", "w1.example.com"}
			},
		},
		"one name of two types": {
			addresses("Hostname=w", "InternalDNS=w"),
			func(m *verifier.Machine) {
				m.Names = append(m.Names, verifier.NodeName{Source: verifier.NameHostname, Value: "w"}, verifier.NodeName{Source: verifier.NameInternalDNS, Value: "w"})
				m.Addresses.DNSNames = []string{"w"}
			},
		},
		"two hostnames": {
			addresses("Hostname=a", "Hostname=b"),
			func(m *verifier.Machine) {
				m.Names = append(m.Names, verifier.NodeName{Source: verifier.NameHostname, Value: "a"}, verifier.NodeName{Source: verifier.NameHostname, Value: "b"})
				m.Addresses.DNSNames = []string{"a", "b"}
			},
		},
		"no names": {
			addresses("Hostname=localhost", "Hostname=LOCALHOST.localdomain", "InternalDNS=x.localhost", "InternalDNS=*.example.org",
				"Hostname=a b", "Hostname=", "Hostname=-a", "Hostname=a_b", "Hostname="+strings.Repeat("a", 254), "Other=a", "hostname=a"),
			func(*verifier.Machine) {},
		},
		"IPs": {
			addresses("InternalIP=10.0.0.1", "ExternalIP=2001:db8::1", "InternalIP=::ffff:10.0.0.2", "ExternalIP=10.0.0.1"),
			func(m *verifier.Machine) {
				m.Addresses.IPs = []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("10.0.0.2")}
			},
		},
		"no IPs": {
			addresses("InternalIP=127.0.0.1", "InternalIP=::1", "InternalIP=fe80::1%eth0", "InternalIP=2001:db8::1%eth0", "ExternalIP=169.254.0.1",
				"InternalIP=0.0.0.0", "ExternalIP=w.example.org", "InternalIP=10.0.0.0/8", "InternalIP=010.0.0.1", "InternalIP=", "Hostname=1:2"),
			func(*verifier.Machine) {},
		},
	} {
		t.Run(name, func(t *testing.T) {
			want := good()
			test.want(&want)
			s := newMachineSource(machineSourceConfig{Reader: newStore(t, machine("m", test.change)), Cluster: blue, ServingAddresses: anyAddress()})
			if got := read(t, s, start)["m"]; !reflect.DeepEqual(got, want) {
				t.Errorf("got  %+v\nwant %+v", got, want)
			}
			problem(t, s.Problem())
		})
	}
}

// A guest's own report is not trusted: only addresses of the configured types count for serving
// certificates. Node names have their own setting.
func TestServingAddresses(t *testing.T) {
	type types = []clusterv1.MachineAddressType
	all := []string{
		"Hostname=h", "InternalIP=10.0.0.1", "ExternalIP=192.0.2.1", "InternalDNS=i.example.org", "ExternalDNS=e.example.org",
		"InternalDNS=h", "ExternalIP=10.0.0.1",
	}
	const names = "[{Hostname h} {InternalDNS i.example.org} {ExternalDNS e.example.org} {InternalDNS h}]"
	for _, test := range []struct {
		types types
		want  string
	}{
		{nil, "{[] []}"},
		{types{clusterv1.MachineInternalIP}, "{[] [10.0.0.1]}"},
		{types{clusterv1.MachineExternalIP}, "{[] [192.0.2.1 10.0.0.1]}"},
		{types{clusterv1.MachineHostName}, "{[h] []}"},
		{types{clusterv1.MachineInternalDNS, clusterv1.MachineInternalIP}, "{[i.example.org h] [10.0.0.1]}"},
		{types{clusterv1.MachineExternalDNS}, "{[e.example.org] []}"},
		{anyAddress(), "{[h i.example.org e.example.org] [10.0.0.1 192.0.2.1]}"},
	} {
		s := newMachineSource(machineSourceConfig{Reader: newStore(t, machine("m", addresses(all...))), Cluster: blue, ServingAddresses: test.types})
		got := read(t, s, start)["m"]
		if fmt.Sprint(got.Addresses) != test.want || fmt.Sprint(got.Names[1:]) != names {
			t.Errorf("%v: got %v and %v, want %s", test.types, got.Addresses, got.Names, test.want)
		}
	}
}

func TestAddressesAreBounded(t *testing.T) {
	var many []string
	for i := range 10 * maxAddresses {
		many = append(many, fmt.Sprintf("Hostname=h%d", i))
	}
	s := newMachineSource(machineSourceConfig{Reader: newStore(t, machine("m", addresses(many...))), Cluster: blue, ServingAddresses: anyAddress()})
	if got := read(t, s, start)["m"]; len(got.Addresses.DNSNames) != maxAddresses || len(got.Names) != 1+maxAddresses {
		t.Errorf("%d names and %d addresses", len(got.Names), len(got.Addresses.DNSNames))
	}
}

// A namespace may have many Clusters, and a cache many namespaces.
func TestMachinesOfOneCluster(t *testing.T) {
	other := machine("other", func(m *clusterv1.Machine) {
		m.Spec.ClusterName = "red"
		m.Labels = map[string]string{clusterv1.ClusterNameLabel: blue.Name} // the spec counts
	})
	elsewhere := machine("elsewhere", func(m *clusterv1.Machine) { m.Namespace = "another" })
	otherPool := pool("other-pool", "metal://x")
	otherPool.Spec.ClusterName = "red"
	s := newMachineSource(machineSourceConfig{Reader: newStore(t, machine("m"), other, elsewhere, otherPool), Cluster: blue})
	if got := read(t, s, start); len(got) != 1 || got["m"].Ref.Name != "m" {
		t.Errorf("got %+v", got)
	}
}

// Two machines have the same EK: both get it, and the rules refuse both.
func TestSameProviderID(t *testing.T) {
	twin := machine("twin", func(m *clusterv1.Machine) { m.Spec.ProviderID = "metal://m" })
	s := newMachineSource(machineSourceConfig{
		Reader: newStore(t, machine("m"), twin), Cluster: blue,
		Inventory: inventoryOf(t, "machines: [{nodeName: n, providerID: 'metal://m', eks: [{fingerprint: "+ek("a")+"}]}]"),
	})
	got := read(t, s, start)
	if ekList(got["m"]) != "Inventory a" || ekList(got["twin"]) != "Inventory a" {
		t.Errorf("got %+v", got)
	}
}

func TestChanges(t *testing.T) {
	cache := newStore(t, machine("m"))
	s := newMachineSource(machineSourceConfig{Reader: cache, Cluster: blue, Annotations: true})
	read(t, s, start)

	cache.put(machine("m", annotated(ek("a"))))
	cache.put(machine("late"))
	if got := read(t, s, start.Add(readInterval-1)); len(got) != 1 {
		t.Errorf("decisions at the same time do not share a reading: %+v", got)
	}
	if got := read(t, s, start.Add(readInterval)); len(got) != 2 || ekList(got["m"]) != "Annotation a" {
		t.Errorf("what changed is not seen: %+v", got)
	}
	// A clock that was set back does not prevent a read.
	cache.put(machine("m", annotated(ek("b"))))
	if got := read(t, s, start.Add(-time.Hour)); ekList(got["m"]) != "Annotation b" {
		t.Errorf("what changed is not seen: %+v", got)
	}
	// A new object of the same name is another machine.
	cache.put(machine("m", func(m *clusterv1.Machine) { m.UID = "new" }))
	if got := read(t, s, start.Add(time.Hour)); got["m"].Ref.UID != "new" || ekList(got["m"]) != "" {
		t.Errorf("the new machine is not seen: %+v", got)
	}
	cache.drop(machine("m"))
	cache.drop(machine("late"))
	if got := read(t, s, start.Add(2*time.Hour)); len(got) != 0 || len(s.memo) != 0 {
		t.Errorf("what is gone is still there: %+v, %d remembered", got, len(s.memo))
	}
}

// Each caller gets a copy of its own.
func TestCallersShareNoList(t *testing.T) {
	s := newMachineSource(machineSourceConfig{Reader: newStore(t, machine("m")), Cluster: blue})
	for range 2 {
		machines, err := s.Machines(ctx, start)
		if err != nil || machines[0].Ref.Name != "m" {
			t.Fatalf("%v %v", machines, err)
		}
		machines[0].Ref.Name = "changed"
	}
}

// A move or a restore creates old Machines again, without their nodeRefs. They do not count as new
// machines.
func TestMovedMachines(t *testing.T) {
	aged := func(name string, age time.Duration) client.Object {
		return machine(name, func(m *clusterv1.Machine) { m.CreationTimestamp = metav1.NewTime(start.Add(age)) })
	}
	cache := newStore(t, aged("before", -time.Hour), aged("soon before", -59*time.Minute), aged("with it", 0), aged("soon", 59*time.Minute), aged("later", time.Hour))
	for moved, trusted := range map[time.Time][]string{
		{}:    {"before", "soon before", "with it", "soon", "later"},
		start: {"before", "later"},
	} {
		for name, m := range read(t, newMachineSource(machineSourceConfig{Reader: cache, Cluster: blue, MovedAt: moved}), start) {
			if slices.Contains(trusted, name) == m.Created.IsZero() {
				t.Errorf("moved at %s: %s was made at %s", moved, name, m.Created)
			}
		}
	}
}

func TestNothingReadable(t *testing.T) {
	cache := newStore(t, machine("m"))
	s := newMachineSource(machineSourceConfig{Reader: cache, Cluster: blue})
	read(t, s, start)
	cache.fail = errors.New("cache is not there")
	_, err := s.Machines(ctx, start.Add(time.Second))
	problem(t, err, "fleet/blue", "cache is not there")
	_, err = s.Token(ctx, "abcdef", start)
	problem(t, err, "fleet/blue", "cache is not there")
}

func TestOwner(t *testing.T) {
	s := newMachineSource(machineSourceConfig{Reader: newStore(t, machine("m"), pool("p", "metal://1")), Cluster: blue})
	for name, m := range read(t, s, start) {
		owner, err := s.Owner(m.Ref)
		want := metav1.OwnerReference{APIVersion: "cluster.x-k8s.io/v1beta2", Kind: "Machine", Name: "m", UID: "uid-m"}
		if name != "m" {
			want.Kind, want.Name, want.UID = "MachinePool", "p", "uid-p"
		}
		if err != nil || owner != want {
			t.Errorf("owner of %s is %+v, %v", name, owner, err)
		}
	}
	for _, ref := range []verifier.MachineRef{{}, {Name: "m"}, {UID: "u"}, {Name: "/0123", UID: "u"}} {
		_, err := s.Owner(ref)
		problem(t, err, "no object")
	}
}

func BenchmarkMachines(b *testing.B) {
	cache := newStore(b)
	for i := range 5000 {
		cache.put(kubeadmConfig(fmt.Sprintf("m%d", i), fmt.Sprintf("a%05d.", i)))
	}
	for i := range 5000 {
		cache.put(machine(fmt.Sprintf("m%d", i), annotated(ek("a")), addresses(fmt.Sprintf("Hostname=h%d", i), fmt.Sprintf("InternalDNS=h%d.example.org", i), "InternalIP=10.0.0.1")))
	}
	s := newMachineSource(machineSourceConfig{Reader: cache, Cluster: blue, Annotations: true})
	now := start
	b.ReportAllocs()
	for b.Loop() {
		now = now.Add(time.Second)
		if _, err := s.Machines(ctx, now); err != nil {
			b.Fatal(err)
		}
		if token, err := s.Token(ctx, "a00001", now); err != nil || token.Machine.Name != "m1" {
			b.Fatal(token, err)
		}
	}
}
