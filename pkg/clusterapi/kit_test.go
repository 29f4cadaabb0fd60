// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	bootstrapv1 "sigs.k8s.io/cluster-api/api/bootstrap/kubeadm/v1beta2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

var (
	start = time.Date(2026, 5, 4, 3, 2, 1, 0, time.UTC)
	blue  = types.NamespacedName{Namespace: "fleet", Name: "blue"}
	ctx   = context.Background()
)

// ek returns the fingerprint made of one digit.
func ek(digit string) string { return strings.Repeat(digit, 64) }

// store is a cache whose reads are not copies: callers must not change the objects.
type store struct {
	t       testing.TB
	objects map[string]client.Object
	before  map[string]client.Object
	version int
	fail    error
}

func newStore(t testing.TB, objects ...client.Object) *store {
	s := &store{t: t, objects: map[string]client.Object{}, before: map[string]client.Object{}}
	for _, o := range objects {
		s.put(o)
	}
	t.Cleanup(func() {
		for key, o := range s.objects {
			if !equality.Semantic.DeepEqual(o, s.before[key]) {
				t.Errorf("%s was changed by who read it", key)
			}
		}
	})
	return s
}

func keyOf(o client.Object) string { return fmt.Sprintf("%T %s/%s", o, o.GetNamespace(), o.GetName()) }

// put stores a new version of an object.
func (s *store) put(o client.Object) {
	s.version++
	o.SetResourceVersion(strconv.Itoa(s.version))
	s.objects[keyOf(o)], s.before[keyOf(o)] = o, o.DeepCopyObject().(client.Object)
}

func (s *store) drop(o client.Object) {
	delete(s.objects, keyOf(o))
	delete(s.before, keyOf(o))
}

func (s *store) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	s.t.Fatal("an object is read by itself")
	return nil
}

func (s *store) List(_ context.Context, list client.ObjectList, opts ...client.ListOption) error {
	if s.fail != nil {
		return s.fail
	}
	options := client.ListOptions{}
	options.ApplyOptions(opts)
	if options.UnsafeDisableDeepCopy == nil || !*options.UnsafeDisableDeepCopy {
		s.t.Errorf("%T is read as a deep copy", list)
	}
	var items []runtime.Object
	for _, key := range slices.Sorted(maps.Keys(s.objects)) {
		o := s.objects[key]
		if o.GetNamespace() == options.Namespace && strings.HasPrefix(key, strings.TrimSuffix(fmt.Sprintf("%T", list), "List")+" ") {
			items = append(items, o)
		}
	}
	return apimeta.SetList(list, items)
}

var infraKindOf = schema.GroupKind{Group: "infrastructure.cluster.x-k8s.io", Kind: "MetalMachine"}

// machine returns a Machine that is ready.
func machine(name string, change ...func(*clusterv1.Machine)) *clusterv1.Machine {
	m := &clusterv1.Machine{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: blue.Namespace, Name: name, UID: types.UID("uid-" + name), CreationTimestamp: metav1.NewTime(start),
		},
		Spec: clusterv1.MachineSpec{
			ClusterName: blue.Name, ProviderID: "metal://" + name,
			Bootstrap: clusterv1.Bootstrap{ConfigRef: clusterv1.ContractVersionedObjectReference{
				APIGroup: bootstrapv1.GroupVersion.Group, Kind: "KubeadmConfig", Name: "config-" + name,
			}},
			InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: infraKindOf.Group, Kind: infraKindOf.Kind, Name: "infra-" + name},
		},
		Status: clusterv1.MachineStatus{Initialization: clusterv1.MachineInitializationStatus{
			InfrastructureProvisioned: new(true), BootstrapDataSecretCreated: new(true),
		}},
	}
	for _, c := range change {
		c(m)
	}
	return m
}

func annotated(value string) func(*clusterv1.Machine) {
	return func(m *clusterv1.Machine) { m.Annotations = map[string]string{annotationEK: value} }
}

func addresses(pairs ...string) func(*clusterv1.Machine) {
	return func(m *clusterv1.Machine) { m.Status.Addresses = addressList(pairs...) }
}

func addressList(pairs ...string) clusterv1.MachineAddresses {
	var list clusterv1.MachineAddresses
	for _, pair := range pairs {
		kind, address, _ := strings.Cut(pair, "=")
		list = append(list, clusterv1.MachineAddress{Type: clusterv1.MachineAddressType(kind), Address: address})
	}
	return list
}

// anyAddress are all types of addresses.
func anyAddress() []clusterv1.MachineAddressType {
	return []clusterv1.MachineAddressType{
		clusterv1.MachineHostName, clusterv1.MachineInternalIP, clusterv1.MachineExternalIP, clusterv1.MachineInternalDNS, clusterv1.MachineExternalDNS,
	}
}

// pool returns a MachinePool that is ready.
func pool(name string, providerIDs ...string) *clusterv1.MachinePool {
	return &clusterv1.MachinePool{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: blue.Namespace, Name: name, UID: types.UID("uid-" + name), CreationTimestamp: metav1.NewTime(start),
		},
		Spec: clusterv1.MachinePoolSpec{
			ClusterName: blue.Name, ProviderIDList: providerIDs,
			Template: clusterv1.MachineTemplateSpec{Spec: clusterv1.MachineSpec{
				Bootstrap: clusterv1.Bootstrap{ConfigRef: clusterv1.ContractVersionedObjectReference{
					APIGroup: bootstrapv1.GroupVersion.Group, Kind: "KubeadmConfig", Name: "config-" + name,
				}},
				InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: infraKindOf.Group, Kind: "MetalMachinePool", Name: name},
			}},
		},
		Status: clusterv1.MachinePoolStatus{
			Initialization: clusterv1.MachinePoolInitializationStatus{InfrastructureProvisioned: new(true), BootstrapDataSecretCreated: new(true)},
			NodeRefs:       []corev1.ObjectReference{{Name: "some-node"}},
		},
	}
}

// read returns the machines by name.
func read(t testing.TB, s *machineSource, now time.Time) map[string]verifier.Machine {
	t.Helper()
	machines, err := s.Machines(ctx, now)
	if err != nil {
		t.Fatal(err)
	}
	byName := map[string]verifier.Machine{}
	for _, m := range machines {
		if _, twice := byName[m.Ref.Name]; twice {
			t.Fatalf("%s is there twice", m.Ref.Name)
		}
		byName[m.Ref.Name] = m
	}
	return byName
}

// ekList returns the EKs of a machine, each with its source.
func ekList(m verifier.Machine) string {
	var all []string
	for _, n := range m.EKs {
		all = append(all, string(n.Source)+" "+n.EK[:1])
	}
	return strings.Join(all, ", ")
}

// problem fails unless err has each of the words, or is nil if there are none.
func problem(t testing.TB, err error, words ...string) {
	t.Helper()
	switch {
	case len(words) == 0 && err != nil:
		t.Errorf("problem %v, want none", err)
	case len(words) > 0 && err == nil:
		t.Errorf("no problem, want one with %q", words)
	case err != nil:
		for _, word := range words {
			if !strings.Contains(err.Error(), word) {
				t.Errorf("problem %v, want one with %q", err, word)
			}
		}
		if strings.Contains(err.Error(), "\n") || len(err.Error()) > 8192 {
			t.Errorf("problem of %d bytes, or of more lines: %.200q", len(err.Error()), err)
		}
	}
}

// Problem returns what is wrong with the sources of EKs, in one line.
func (s *machineSource) Problem() error {
	var all []error
	for _, state := range s.States() {
		all = append(all, state.Problem)
	}
	return text.JoinLine(all)
}
