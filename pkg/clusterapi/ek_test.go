// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/inventory"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/sources"
)

func TestParseEKs(t *testing.T) {
	a, b := ek("a"), ek("b")
	for in, want := range map[string]string{
		a:                                   a,
		"sha256:" + a:                       a,
		a + "," + b:                         a + " " + b,
		" " + a + "\n\tsha256:" + b + " , ": a + " " + b,
		a + ",,," + b:                       a + " " + b,
	} {
		if got, err := parseEKs(in); err != nil || strings.Join(got, " ") != want {
			t.Errorf("%q: got %q, %v", in, got, err)
		}
	}
	distinct := func(n int) string {
		var all []string
		for i := range n {
			all = append(all, fmt.Sprintf("%064x", i+1))
		}
		return strings.Join(all, ",")
	}
	if got, err := parseEKs(distinct(maxEKs)); err != nil || len(got) != maxEKs {
		t.Errorf("got %d, %v", len(got), err)
	}
	for _, in := range []string{
		"", " ", ",", "sha256:", "none", strings.ToUpper(a), "SHA256:" + a, "sha256:sha256:" + a, "sha512:" + a, a[1:], a + "a", a + ";" + b,
		a + "," + a, a + " sha256:" + a, a + "," + ek("A"), a + "," + "g" + a[1:], "0x" + a[2:], strings.Repeat("a:", 32), "\x00" + a, a + "\xff",
		distinct(maxEKs + 1), distinct(10000), strings.Repeat("a", 1<<20), strings.Repeat(" ", 1<<20), strings.Repeat(",", maxAnnotation+1),
	} {
		got, err := parseEKs(in)
		if err == nil || got != nil {
			t.Errorf("%.80q: got %d EKs", in, len(got))
		} else if len(err.Error()) > text.MaxProblem {
			t.Errorf("%.80q: an error of %d bytes", in, len(err.Error()))
		}
	}
}

func FuzzParseEKs(f *testing.F) {
	f.Add("sha256:" + ek("a") + ", " + ek("b"))
	f.Fuzz(func(t *testing.T, in string) {
		got, err := parseEKs(in)
		if (err == nil) != (len(got) > 0) || len(got) > maxEKs {
			t.Fatalf("got %q, %v", got, err)
		}
		for _, ek := range got {
			if len(ek) != 64 || !strings.Contains(in, ek) {
				t.Fatalf("got %q", ek)
			}
		}
	})
}

// infraReader is an API server with the metadata of InfraMachines.
type infraReader struct {
	mu    sync.Mutex
	items map[string]string // annotation by name; "-" is none
	fail  error
	hang  bool
	lists int
	page  int
}

func (r *infraReader) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	return errors.New("a GET for each is too much")
}

func (r *infraReader) List(ctx context.Context, into client.ObjectList, opts ...client.ListOption) error {
	options := client.ListOptions{}
	options.ApplyOptions(opts)
	list, ok := into.(*metav1.PartialObjectMetadataList)
	if want := infraKindOf.WithVersion("v7"); !ok || list.GroupVersionKind() != want.GroupVersion().WithKind(want.Kind+"List") || options.Limit == 0 {
		return fmt.Errorf("a list of %T %v", into, into.GetObjectKind())
	}
	r.mu.Lock()
	r.lists++
	r.mu.Unlock()
	if r.hang {
		<-ctx.Done()
		return ctx.Err()
	}
	if r.fail != nil || options.Namespace != blue.Namespace {
		return r.fail
	}
	if r.page > 0 { // a page of one each
		n := 0
		_, _ = fmt.Sscan(options.Continue, &n)
		list.Items = []metav1.PartialObjectMetadata{{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("infra-%d", n)}}}
		if n+1 < r.page {
			list.Continue = fmt.Sprint(n + 1)
		}
		return nil
	}
	for name, value := range r.items {
		item := metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if value != "-" {
			item.Annotations = map[string]string{annotationEK: value}
		}
		list.Items = append(list.Items, item)
	}
	return nil
}

func mapper() meta.RESTMapper {
	m := meta.NewDefaultRESTMapper([]schema.GroupVersion{{Group: infraKindOf.Group, Version: "v7"}, rbacv1.SchemeGroupVersion})
	m.Add(infraKindOf.WithVersion("v7"), meta.RESTScopeNamespace)
	m.Add(schema.GroupVersionKind{Group: infraKindOf.Group, Version: "v7", Kind: "MetalZone"}, meta.RESTScopeRoot)
	m.Add(rbacv1.SchemeGroupVersion.WithKind("Role"), meta.RESTScopeNamespace)
	return m
}

// countingMapper counts lookups: each that finds nothing costs the management cluster discovery.
type countingMapper struct {
	meta.RESTMapper

	lookups int
}

func (m *countingMapper) RESTMapping(kind schema.GroupKind, versions ...string) (*meta.RESTMapping, error) {
	m.lookups++
	return m.RESTMapper.RESTMapping(kind, versions...)
}

func TestAnnotations(t *testing.T) {
	a, b := ek("a"), ek("b")
	for name, test := range map[string]struct {
		machine, infra string // "-": no annotation; "": no object
		want           string
		problem        []string
		unsettled      bool
	}{
		"none":                           {"-", "-", "", nil, false},
		"on the Machine":                 {a, "-", "Annotation a", nil, false},
		"on the InfraMachine":            {"-", a, "Annotation a", nil, false},
		"the same on both":               {a + "," + b, "sha256:" + b + " " + a, "Annotation a, Annotation b", nil, false},
		"another on each":                {a, b, "", []string{`machine m: `, "differ"}, true},
		"fewer on one":                   {a + "," + b, a, "", []string{"differ"}, true},
		"malformed on the Machine":       {"x", a, "", []string{`machine m: `, `"x"`}, true},
		"malformed on the InfraMachine":  {a, "x", "", []string{`machine m: `, `"x"`}, true},
		"empty on the Machine":           {"", a, "", []string{"no EK"}, true},
		"huge on the InfraMachine":       {a, strings.Repeat(b+" ", 10000), "", []string{"longer"}, true},
		"InfraMachine not there, or yet": {a, "gone", "Annotation a", nil, true},
	} {
		t.Run(name, func(t *testing.T) {
			m := machine("m")
			if test.machine != "-" {
				annotated(test.machine)(m)
			}
			reader := &infraReader{items: map[string]string{"infra-m": test.infra, "infra-x": ek("c")}}
			if test.infra == "gone" {
				delete(reader.items, "infra-m")
			}
			s := newMachineSource(machineSourceConfig{Reader: newStore(t, m), Cluster: blue, Annotations: true, Infra: newInfraAnnotations(reader, mapper())})
			got := read(t, s, start)["m"]
			if ekList(got) != test.want {
				t.Errorf("got %s, want %s", ekList(got), test.want)
			}
			// A machine that is trusted on first use must be known to have no EK.
			if got.Created.IsZero() != test.unsettled {
				t.Errorf("created %v", got.Created)
			}
			problem(t, s.Problem(), test.problem...)
		})
	}
}

// Problems of several machines are all named, up to a limit.
func TestProblemsAreBounded(t *testing.T) {
	cache := newStore(t)
	for i := range 1000 {
		cache.put(machine(fmt.Sprintf("m%03d", i), annotated(strings.Repeat("\n\x1b]0;", 400))))
	}
	s := newMachineSource(machineSourceConfig{Reader: cache, Cluster: blue, Annotations: true})
	read(t, s, start)
	problem(t, s.Problem(), "machine m000: ", "machine m004: ", "and 995 more")
	for i := range 1000 {
		cache.drop(machine(fmt.Sprintf("m%03d", i)))
	}
	read(t, s, start.Add(time.Second))
	problem(t, s.Problem())
}

func TestInfraMachinesAreListedOnceASecond(t *testing.T) {
	reader := &infraReader{items: map[string]string{"infra-m": ek("a")}}
	shared := newInfraAnnotations(reader, mapper())
	var clusters []*machineSource
	cache := newStore(t)
	for i := range 20 {
		c := blue
		c.Name = fmt.Sprintf("c%d", i)
		cache.put(machine(fmt.Sprintf("m%d", i), func(m *clusterv1.Machine) {
			m.Spec.ClusterName, m.Spec.InfrastructureRef.Name = c.Name, "infra-m"
		}))
		clusters = append(clusters, newMachineSource(machineSourceConfig{Reader: cache, Cluster: c, Annotations: true, Infra: shared}))
	}
	all := func(now time.Time) {
		var wait sync.WaitGroup
		for i, s := range clusters {
			wait.Go(func() {
				// The concurrent calls have slightly different times.
				machines, err := s.Machines(ctx, now.Add(time.Duration(i-10)*time.Millisecond))
				if err != nil || len(machines) != 1 || ekList(machines[0]) != "Annotation a" {
					t.Errorf("got %+v, %v", machines, err)
				}
			})
		}
		wait.Wait()
	}
	all(start)
	all(start.Add(infraReadInterval / 2))
	if reader.lists != 1 {
		t.Errorf("%d lists", reader.lists)
	}
	all(start.Add(2 * infraReadInterval))
	if reader.lists != 2 {
		t.Errorf("%d lists", reader.lists)
	}
}

func TestInfraMachinesThatCannotBeListed(t *testing.T) {
	forbidden := apierrors.NewForbidden(schema.GroupResource{Group: infraKindOf.Group, Resource: "metalmachines"}, "", errors.New("no right"))
	reader := &infraReader{items: map[string]string{"infra-m": ek("a"), "infra-bare": ek("a")}, fail: forbidden}
	other := machine("other", annotated(ek("b")), func(m *clusterv1.Machine) { m.Spec.InfrastructureRef = clusterv1.ContractVersionedObjectReference{} })
	s := newMachineSource(machineSourceConfig{
		Reader:  newStore(t, machine("m", annotated(ek("c"))), machine("bare"), other),
		Cluster: blue, Annotations: true, Infra: newInfraAnnotations(reader, mapper()),
	})
	got := read(t, s, start)
	// A Machine's own annotation counts. Without it, the InfraMachine might have one.
	if ekList(got["m"]) != "Annotation c" || !got["m"].Created.IsZero() {
		t.Errorf("got %+v", got["m"])
	}
	if ekList(got["other"]) != "Annotation b" || got["other"].Created.IsZero() {
		t.Errorf("got %+v", got["other"])
	}
	problem(t, s.Problem(), "infrastructure MetalMachine.infrastructure.cluster.x-k8s.io", "list on the kind is needed", "forbidden")

	reader.fail = nil
	if got := read(t, s, start.Add(infraRetry/2)); ekList(got["bare"]) != "" || !got["bare"].Created.IsZero() || reader.lists != 1 {
		t.Errorf("tried again at once: %d lists", reader.lists)
	}
	reader.items["infra-m"] = ek("c")
	if got := read(t, s, start.Add(infraRetry+time.Second)); ekList(got["m"]) != "Annotation c" || got["m"].Created.IsZero() || ekList(got["bare"]) != "Annotation a" {
		t.Errorf("got %+v", got["m"])
	}
	problem(t, s.Problem())
	// The last known value is not used while the kind cannot be read.
	reader.fail = forbidden
	if got := read(t, s, start.Add(time.Minute)); ekList(got["bare"]) != "" || !got["bare"].Created.IsZero() {
		t.Errorf("got %+v", got["m"])
	}
}

func TestInfraKindsThatAreNone(t *testing.T) {
	for name, test := range map[string]struct {
		kind    schema.GroupKind
		lookups int
	}{
		"not known":     {schema.GroupKind{Group: infraKindOf.Group, Kind: "Unheard"}, 1},
		"no namespace":  {schema.GroupKind{Group: infraKindOf.Group, Kind: "MetalZone"}, 1},
		"another group": {schema.GroupKind{Group: rbacv1.GroupName, Kind: "Role"}, 0},
		"a core one":    {schema.GroupKind{Group: corev1.GroupName, Kind: "Secret"}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			kind, reader, counting := test.kind, &infraReader{}, &countingMapper{RESTMapper: mapper()}
			m := machine("m", func(m *clusterv1.Machine) {
				m.Spec.InfrastructureRef.APIGroup, m.Spec.InfrastructureRef.Kind = kind.Group, kind.Kind
			})
			s := newMachineSource(machineSourceConfig{Reader: newStore(t, m), Cluster: blue, Annotations: true, Infra: newInfraAnnotations(reader, counting)})
			for i := range 10 { // what is found is remembered
				if got := read(t, s, start.Add(time.Duration(i)*infraRetry/10))["m"]; ekList(got) != "" || !got.Created.IsZero() || reader.lists != 0 {
					t.Errorf("got %+v, %d lists", got, reader.lists)
				}
			}
			problem(t, s.Problem(), "infrastructure "+kind.String())
			if counting.lookups != test.lookups {
				t.Errorf("%d lookups", counting.lookups)
			}
		})
	}
}

// A user who may make Machines can write any kind into them. The controller looks up a limited
// number of kinds of a namespace: those that came first.
func TestManyInfraKinds(t *testing.T) {
	reader, counting := &infraReader{items: map[string]string{"infra-honest": ek("a")}}, &countingMapper{RESTMapper: mapper()}
	cache := newStore(t, machine("honest"))
	s := newMachineSource(machineSourceConfig{Reader: cache, Cluster: blue, Annotations: true, Infra: newInfraAnnotations(reader, counting)})
	read(t, s, start)
	for i := range 300 {
		cache.put(machine(fmt.Sprintf("a%d", i), func(m *clusterv1.Machine) { m.Spec.InfrastructureRef.Kind = fmt.Sprintf("Kind%d", i) }))
	}
	counting.lookups = 0
	got := read(t, s, start.Add(infraReadInterval))
	if counting.lookups > maxInfraKinds {
		t.Errorf("%d lookups", counting.lookups)
	}
	if ekList(got["honest"]) != "Annotation a" || got["honest"].Created.IsZero() || !got["a299"].Created.IsZero() {
		t.Errorf("got %+v and %+v", got["honest"], got["a299"])
	}
	problem(t, s.Problem(), "InfraMachines: the Machines of the namespace refer to more than 8 kinds", "infrastructure Kind", "and 3 more")
	// The kinds do not count for another namespace, nor after the Machines are deleted.
	red := types.NamespacedName{Namespace: "another", Name: "red"}
	elsewhere := machine("m", func(m *clusterv1.Machine) { m.Namespace, m.Spec.ClusterName = red.Namespace, red.Name })
	other := newMachineSource(machineSourceConfig{Reader: newStore(t, elsewhere), Cluster: red, Annotations: true, Infra: s.Infra})
	read(t, other, start.Add(infraReadInterval))
	problem(t, other.Problem())
	later := start.Add(infraExpiry + time.Minute)
	s.Reader = newStore(t, machine("late", func(m *clusterv1.Machine) { m.Spec.InfrastructureRef.Kind = "Late" }))
	counting.lookups = 0
	if read(t, s, later); counting.lookups != 1 {
		t.Errorf("%d lookups", counting.lookups)
	}
}

func TestInfraPages(t *testing.T) {
	reader := &infraReader{page: 3}
	i := newInfraAnnotations(reader, mapper())
	kind := infraKind{infraKindOf, blue.Namespace}
	if got := i.read(ctx, kind, start); got.err != nil || len(got.names) != 3 || reader.lists != 3 {
		t.Errorf("got %+v, %d lists", got, reader.lists)
	}
	reader.page = infraPages + 1
	if got := i.read(ctx, kind, start.Add(time.Minute)); got.err == nil || got.names != nil {
		t.Errorf("got %+v", got)
	}
}

// All calls share one wait for a kind that does not answer. Then there is a back-off.
func TestInfraThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reader := &infraReader{hang: true}
		i := newInfraAnnotations(reader, mapper())
		kind := infraKind{infraKindOf, blue.Namespace}
		begin := time.Now()
		var wait sync.WaitGroup
		for range 10 {
			wait.Go(func() {
				if got := i.read(t.Context(), kind, time.Now()); got.err == nil {
					t.Error("no error")
				}
			})
			time.Sleep(time.Millisecond)
		}
		wait.Wait()
		if took := time.Since(begin); took > infraTimeout+time.Second || reader.lists != 1 {
			t.Errorf("waited %s for %d lists", took, reader.lists)
		}
		time.Sleep(infraRetry / 2)
		i.read(t.Context(), kind, time.Now())
		if reader.lists != 1 {
			t.Errorf("tried again at once")
		}

		// The end of a caller's context is no error of the kind.
		reader.hang = false
		time.Sleep(time.Minute)
		ended, end := context.WithCancel(t.Context())
		end()
		reader.fail = context.Canceled
		if got := i.read(ended, kind, time.Now()); got.err == nil {
			t.Error("no error")
		}
		reader.fail = nil
		if got := i.read(t.Context(), kind, time.Now()); got.err != nil {
			t.Error(got.err)
		}
	})
}

func TestInfraForgets(t *testing.T) {
	i := newInfraAnnotations(&infraReader{}, mapper())
	for n := range 100 {
		i.read(ctx, infraKind{infraKindOf, fmt.Sprint(n)}, start)
	}
	i.read(ctx, infraKind{infraKindOf, blue.Namespace}, start.Add(infraExpiry+1))
	if len(i.kinds) != 1 {
		t.Errorf("%d kinds are remembered", len(i.kinds))
	}
}

// inventoryOf returns the inventory with some fields of a list.
func inventoryOf(t testing.TB, fields string) *sources.Inventory {
	t.Helper()
	path := filepath.Join(t.TempDir(), "inventory.yaml")
	writeInventory(t, path, fields)
	return sources.NewInventory(path, 0)
}

func writeInventory(t testing.TB, path, fields string) {
	t.Helper()
	content := fmt.Sprintf("apiVersion: %s\nkind: %s\n%s\n", inventory.APIVersion, inventory.Kind, fields)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// If parts contradict each other about a machine, the machine is disputed. A part that was not read
// yet may have any machine.
func TestInventoryOfParts(t *testing.T) {
	dir := t.TempDir()
	paths := []string{filepath.Join(dir, "a"), filepath.Join(dir, "b")}
	entry := func(name, id, key string) string {
		return "{nodeName: " + name + ", providerID: 'metal://" + id + "', eks: [{fingerprint: " + ek(key) + "}]}"
	}
	s := newMachineSource(machineSourceConfig{Reader: newStore(t, machine("m"), machine("other")), Cluster: blue, Inventory: sources.NewFileInventory(paths, 0)})
	for n, c := range []struct {
		first, second    string
		m, other         string // EKs
		disputed, unsure bool   // m is disputed, and what is known of other is not all
	}{
		{"machines: [" + entry("n", "m", "a") + "]", "nonsense", "Inventory a", "", false, true},
		{"machines: [" + entry("n", "m", "a") + "]", "machines: [" + entry("o", "other", "b") + "]", "Inventory a", "Inventory b", false, false},
		{"machines: [" + entry("n", "m", "a") + "]", "machines: [" + entry("o", "other", "b") + ", " + entry("n", "m", "c") + "]", "Inventory a, Inventory c", "Inventory b", true, false},
		{"machines: [" + entry("n", "m", "a") + "]", "machines: [" + entry("o", "other", "b") + ", " + entry("p", "p", "a") + "]", "Inventory a", "Inventory b", true, false},
		{"machines: [" + entry("n", "m", "a") + "]", "machines: []", "Inventory a", "", false, false},
	} {
		writeInventory(t, paths[0], c.first)
		writeInventory(t, paths[1], c.second)
		got := read(t, s, start.Add(time.Duration(n)*time.Second))
		m, other := got["m"], got["other"]
		if ekList(m) != c.m || ekList(other) != c.other || m.Disputed != c.disputed || other.Disputed {
			t.Errorf("%d: %+v, %+v", n, m, other)
		}
		// Without a time of creation a machine is not trusted on first use.
		if m.Created.IsZero() != c.disputed || other.Created.IsZero() != c.unsure {
			t.Errorf("%d: made at %v and %v", n, m.Created, other.Created)
		}
	}
}

func TestInventoryChanges(t *testing.T) {
	path := filepath.Join(t.TempDir(), "inventory.yaml")
	s := newMachineSource(machineSourceConfig{Reader: newStore(t, machine("m")), Cluster: blue, Inventory: sources.NewInventory(path, 0)})
	// The inventory was never read, so the machine's EKs are not known.
	if got := read(t, s, start)["m"]; ekList(got) != "" || !got.Created.IsZero() {
		t.Errorf("got %+v", got)
	}
	problem(t, s.Problem(), "inventory: ")
	writeInventory(t, path, "machines: [{nodeName: n, providerID: 'metal://m', eks: [{fingerprint: "+ek("a")+"}, {fingerprint: "+ek("b")+"}]}]")
	if got := read(t, s, start.Add(time.Second))["m"]; ekList(got) != "Inventory a, Inventory b" || got.Created.IsZero() {
		t.Errorf("got %+v", got)
	}
	problem(t, s.Problem())
	writeInventory(t, path, "machines: {}")
	if got := read(t, s, start.Add(2*time.Second))["m"]; ekList(got) != "Inventory a, Inventory b" {
		t.Errorf("the last good one is not in use: %+v", got)
	}
	problem(t, s.Problem(), "inventory: ")
	writeInventory(t, path, "machines: []")
	if got := read(t, s, start.Add(3*time.Second))["m"]; ekList(got) != "" || got.Created.IsZero() {
		t.Errorf("got %+v", got)
	}
	// An entry without a provider ID belongs to no machine, not even to one without a provider ID.
	writeInventory(t, path, "machines: [{nodeName: n, eks: [{fingerprint: "+ek("a")+"}]}]")
	s.Reader = newStore(t, machine("m", func(m *clusterv1.Machine) { m.UID, m.Spec.ProviderID = "another", "" }))
	if got := read(t, s, start.Add(4*time.Second))["m"]; ekList(got) != "" || got.ProviderID != "" {
		t.Errorf("got %+v", got)
	}
}
