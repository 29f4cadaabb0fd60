// SPDX-License-Identifier: Apache-2.0

package sources

import (
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/machineentry"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/machinelist"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/inventory"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// The shared machines change only when the file changes.
func TestInventoryIsParsedOnce(t *testing.T) {
	file := filepath.Join(t.TempDir(), "inventory.yaml")
	source := NewInventory(file, 0)
	now := time.Now()
	if _, err := source.Machines(t.Context(), now); err == nil {
		t.Error("machines of a file that is not there")
	}
	for i, nodeName := range []string{"a", "b"} {
		content := fmt.Sprintf("apiVersion: authenticator.cluster.x-k8s.io/v1alpha1\nkind: MachineInventory\nmachines:\n"+
			"- {name: m, nodeName: %s, providerID: test://m, bootstrapTokenID: abcde%d}\n", nodeName, i)
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		first, err := source.Shared(t.Context(), now)
		if err != nil || len(first) != 1 || first[0].Names[0].Value != nodeName {
			t.Fatalf("%+v, %v", first, err)
		}
		again, err := source.Shared(t.Context(), now)
		if err != nil || &again[0] != &first[0] {
			t.Errorf("parsed again: %v", err)
		}
		// Machines returns a copy that the caller may change.
		own, err := source.Machines(t.Context(), now)
		if err != nil || !reflect.DeepEqual(own, first) {
			t.Fatalf("%+v, %v", own, err)
		}
		own[0].Names[0].Value, own[0].ProviderID = "changed", "changed"
		if first[0].Names[0].Value != nodeName || first[0].ProviderID != "test://m" {
			t.Errorf("%+v", first)
		}
		if token, err := source.Token(t.Context(), fmt.Sprintf("abcde%d", i), now); err != nil || token.Machine.Name != "m" {
			t.Errorf("%+v, %v", token, err)
		}
	}
}

// listOf returns an inventory with these machines. Each has an EK of its name's first letter.
func listOf(names ...string) string {
	var machines []machineentry.Machine
	for _, name := range names {
		machines = append(machines, machineentry.Machine{NodeName: name, ProviderID: "test://" + name, EKs: []string{ekOf(name)}})
	}
	return machinelist.Of(machines...)
}

func ekOf(name string) string { return fmt.Sprintf("%064x", name[0]) }

// namesOf returns the names of all machines, with "!" behind those that are disputed.
func namesOf(t *testing.T, source *Inventory, now time.Time) string {
	t.Helper()
	machines, err := source.Shared(t.Context(), now)
	if err != nil {
		return err.Error()
	}
	var names []string
	for _, m := range machines {
		name := m.Ref.Name
		if m.Disputed {
			name += "!"
		}
		names = append(names, name)
	}
	return strings.Join(names, " ")
}

// An invalid, missing or deleted part does not affect the machines of other parts, and has a
// problem of its own.
func TestPartsAreIndependent(t *testing.T) {
	dir := t.TempDir()
	paths := []string{filepath.Join(dir, "a"), filepath.Join(dir, "b"), filepath.Join(dir, "c")}
	source := NewFileInventory(paths, 0)
	set := func(n int, content string) {
		t.Helper()
		if err := os.WriteFile(paths[n], []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	is := func(want string, problems ...string) {
		t.Helper()
		if got := namesOf(t, source, time.Now()); got != want {
			t.Errorf("the machines are %q, not %q", got, want)
		}
		if (source.Problem() == nil) != (len(problems) == 0) {
			t.Errorf("the problem is %v", source.Problem())
		}
		for n, s := range source.States()[:len(paths)] {
			said := ""
			for _, problem := range problems {
				if part, text, _ := strings.Cut(problem, ": "); strings.HasSuffix(paths[n], part) {
					said = text
				}
			}
			if s.Name != "inventory "+paths[n] || (s.Problem == nil) != (said == "") || said != "" && (!strings.Contains(s.Problem.Error(), said) || !strings.Contains(s.Problem.Error(), paths[n])) {
				t.Errorf("%s: the problem is %v, not %q", s.Name, s.Problem, said)
			}
		}
	}
	if _, err := source.Machines(t.Context(), time.Now()); err == nil || strings.Count(err.Error(), "no such file") != 3 {
		t.Errorf("without any part: %v", err)
	}
	set(0, listOf("alfa", "dora"))
	set(1, "nonsense")
	is("alfa dora", "b: must be an object, not a string", "c: no such file")
	known, err := source.Latest(t.Context(), time.Now())
	if err != nil || known.Complete() {
		t.Errorf("it is complete, or %v", err)
	}
	// The missing parts may have a machine of that name with the EK in its record. Then it would be
	// disputed, and its EK not replaced.
	rules, err := verifier.New(verifier.Policy{
		Cluster: "test", Providers: []verifier.Provider{{Name: "tpm"}}, Signers: []verifier.Signer{{Name: "example.com/signer", Providers: []string{"tpm"}}},
		Token: verifier.Off, Credential: verifier.Required, BootCounters: verifier.Warn,
		EKSources: []verifier.EKSource{verifier.EKInventory}, NameSources: []verifier.NameSource{verifier.NameInventory},
	})
	if err != nil {
		t.Fatal(err)
	}
	contradicted := func() bool {
		t.Helper()
		machines, err := source.Shared(t.Context(), time.Now())
		if err != nil {
			t.Fatal(err)
		}
		_, named := rules.ContradictedBy(&verifier.Record{Machine: machines[0].Ref, EK: ekOf("x"), EKSource: verifier.EKInventory}, &machines[0])
		return len(named) > 0
	}
	if contradicted() {
		t.Error("an EK is replaced although parts are missing")
	}
	set(1, listOf("bert"))
	set(2, listOf("carl"))
	is("alfa dora bert carl")
	if !contradicted() {
		t.Error("no EK is replaced although all parts are known")
	}
	before := source.parts[0].latest.Load()
	set(1, listOf("bert")+"  rack: 1\n")
	is("alfa dora bert carl", `b: rack: unknown field`)
	if err := os.Remove(paths[2]); err != nil {
		t.Fatal(err)
	}
	is("alfa dora bert carl", `b: rack: unknown field`, "c: no such file")
	set(1, listOf("bert", "emil"))
	set(2, listOf())
	is("alfa dora bert emil")
	if source.parts[0].latest.Load() != before {
		t.Error("a part was parsed again that did not change")
	}
	if known, err := source.Latest(t.Context(), time.Now()); err != nil || !known.Complete() {
		t.Errorf("it is not complete, or %v", err)
	}
}

// A conflict between two parts has a state of its own, and affects only the machines in it.
func TestPartsContradictEachOther(t *testing.T) {
	dir := t.TempDir()
	paths := []string{filepath.Join(dir, "a"), filepath.Join(dir, "b")}
	source := NewFileInventory(paths, 0)
	for _, c := range []struct{ second, machines, says string }{
		{listOf("bert"), "alfa bert", ""},
		{listOf("alfa", "bert"), "alfa bert", ""},
		{listOf("anna", "bert"), "alfa! anna! bert", `the EK "` + ekOf("a") + `" is claimed by machine "alfa" (` + paths[0] + `:4), machine "anna" (` + paths[1] + ":4)"},
		{strings.Replace(listOf("alfa", "bert"), ekOf("a"), ekOf("x"), 1), "alfa! bert", `machine "alfa" is listed differently`},
		{listOf("bert") + "  bootstrapTokenID: abcdef\n- {nodeName: c, bootstrapTokenID: abcdef}\n", "alfa bert! c!", "the bootstrapTokenID"},
		{listOf("bert") + "  bootstrapTokenID: abcdef\n", "alfa bert", ""},
	} {
		for n, content := range []string{listOf("alfa"), c.second} {
			if err := os.WriteFile(paths[n], []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if got := namesOf(t, source, time.Now()); got != c.machines {
			t.Errorf("the machines are %q, not %q", got, c.machines)
		}
		state := source.States()[2]
		if state.Name != NameConflicts || (state.Problem == nil) != (c.says == "") || c.says != "" && !strings.HasPrefix(state.Problem.Error(), c.says) || source.Problem() != nil {
			t.Errorf("%+v, not %q; %v", state, c.says, source.Problem())
		}
		token, err := source.Token(t.Context(), "abcdef", time.Now())
		if want := c.machines == "alfa bert" && strings.Contains(c.second, "abcdef"); err != nil || token.Known != want {
			t.Errorf("%s: %+v, %v", c.machines, token, err)
		}
	}
}

// mapAPI is a fake API server with ConfigMaps. A read of one that hangs never returns.
type mapAPI struct {
	client.Reader
	content map[string]string
	hangs   map[string]bool
	version int
	// whole counts the full reads of each ConfigMap, and all counts all reads.
	whole, all map[string]int
	mu         sync.Mutex
}

func (m *mapAPI) set(name, content string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.version++
	m.content[name] = content
}

func (m *mapAPI) Get(ctx context.Context, key client.ObjectKey, into client.Object, _ ...client.GetOption) error {
	m.mu.Lock()
	hangs, content, version := m.hangs[key.Name], m.content[key.Name], m.version
	m.all[key.Name]++
	object, whole := into.(*corev1.ConfigMap)
	if whole {
		m.whole[key.Name]++
	}
	m.mu.Unlock()
	if hangs {
		<-ctx.Done()
		return ctx.Err()
	}
	time.Sleep(100 * time.Millisecond)
	into.SetUID(types.UID(key.Name))
	into.SetResourceVersion(fmt.Sprint(version))
	if whole {
		object.Data = map[string]string{"k": content}
	}
	return nil
}

func newMaps() *mapAPI {
	return &mapAPI{content: map[string]string{}, hangs: map[string]bool{}, whole: map[string]int{}, all: map[string]int{}}
}

func entriesOf(names ...string) (entries []ConfigMapEntry) {
	for _, name := range names {
		entries = append(entries, ConfigMapEntry{types.NamespacedName{Namespace: "n", Name: name}, "k"})
	}
	return entries
}

// Parts are read concurrently. A part that hangs delays one decision by the budget, and no later
// one.
func TestSlowPart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newMaps()
		for _, name := range []string{"a", "b", "c"} {
			api.set(name, listOf(name))
		}
		source := NewConfigMapInventory(api, entriesOf("a", "b", "c")...)
		is := func(want string, took time.Duration) {
			t.Helper()
			began := time.Now()
			got := namesOf(t, source, began)
			if got != want || time.Since(began) != took {
				t.Errorf("the machines are %q, not %q, after %v, not %v", got, want, time.Since(began), took)
			}
		}
		is("a b c", 100*time.Millisecond)
		api.mu.Lock()
		api.hangs["b"] = true
		api.mu.Unlock()
		time.Sleep(maxAge)
		is("a b c", partBudget)
		if s := source.States()[1]; s.Problem == nil || !strings.Contains(s.Problem.Error(), "configmap b/k: reading it takes long") {
			t.Errorf("%+v", s)
		}
		api.set("c", listOf("c", "d"))
		time.Sleep(maxAge)
		is("a b c d", 200*time.Millisecond) // c is read again for its content
		time.Sleep(readTimeout)
		is("a b c d", partBudget) // the next try
		time.Sleep(readTimeout)
		if s := source.States(); s[1].Problem == nil || s[0].Problem != nil || s[2].Problem != nil {
			t.Errorf("%+v", s)
		}
		api.mu.Lock()
		api.hangs["b"] = false
		api.mu.Unlock()
		api.set("b", listOf("e"))
		time.Sleep(maxAge)
		is("a e c d", 200*time.Millisecond)
		if source.Problem() != nil {
			t.Error(source.Problem())
		}
	})
}

// A part that hangs from the start delays the others by one read's timeout.
func TestSlowPartAtTheStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newMaps()
		api.set("a", listOf("a"))
		api.hangs["b"] = true
		source := NewConfigMapInventory(api, entriesOf("a", "b")...)
		for _, limit := range []time.Duration{readTimeout, partBudget} {
			began := time.Now()
			if got := namesOf(t, source, began); got != "a" || time.Since(began) > limit {
				t.Errorf("the machines are %q after %v", got, time.Since(began))
			}
			if known, err := source.Latest(t.Context(), began); err != nil || known.Complete() {
				t.Errorf("it is complete, or %v", err)
			}
			time.Sleep(maxAge)
		}
		time.Sleep(readTimeout)
	})
}

// A ConfigMap is fully read after a change, and once a minute.
func TestConfigMapIsReadWholeOnlyAfterAChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newMaps()
		api.set("a", listOf("a"))
		source := NewConfigMapInventory(api, entriesOf("a")...)
		look := func(want string, whole int) {
			t.Helper()
			time.Sleep(maxAge)
			if got := namesOf(t, source, time.Now()); got != want || api.whole["a"] != whole {
				t.Errorf("the machines are %q, after %d whole reads", got, api.whole["a"])
			}
		}
		look("a", 1)
		look("a", 1)
		look("a", 1)
		api.set("a", "nonsense")
		look("a", 2)
		look("a", 2)
		if problem := source.Problem(); problem == nil || api.all["a"] != 6 {
			t.Errorf("%v, %d reads", problem, api.all["a"])
		}
		api.set("a", listOf("b"))
		look("b", 3)
		if source.Problem() != nil {
			t.Error(source.Problem())
		}
		time.Sleep(fullReadInterval)
		look("b", 4)
		look("b", 4)
	})
}

// fleetOf returns the parts of an inventory, as identify --output=entry prints the machines.
func fleetOf(machines, parts int) []string {
	var content []string
	for part := range parts {
		var own []machineentry.Machine
		for i := part; i < machines; i += parts {
			name := fmt.Sprintf("worker-%05d", i)
			own = append(own, machineentry.Machine{
				NodeName: name, ProviderID: "metal://rack/" + name, EKs: []string{fmt.Sprintf("%x", sha256.Sum256([]byte(name))), fmt.Sprintf("%x", sha256.Sum256([]byte(name+" RSA")))},
			})
		}
		content = append(content, machinelist.Of(own...))
	}
	return content
}

// BenchmarkInventory measures one read of four ConfigMaps: without a change, after a change of one
// of them, and the first read.
func BenchmarkInventory(b *testing.B) {
	const parts = 4
	names := []string{"a", "b", "c", "d"}
	for _, machines := range []int{5_000, 20_000} {
		content := fleetOf(machines, parts)
		api := &configMaps{content: map[string]string{}}
		for n, name := range names {
			api.content[name] = content[n]
		}
		warm := NewConfigMapInventory(api, entriesOf(names...)...)
		now := time.Now()
		look := func(b *testing.B, source *Inventory) {
			b.Helper()
			now = now.Add(maxAge)
			list, err := source.Shared(b.Context(), now)
			if err != nil || len(list) != machines {
				b.Fatalf("%d machines, %v", len(list), err)
			}
		}
		look(b, warm)
		b.Run(fmt.Sprintf("unchanged/%d", machines), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				look(b, warm)
			}
		})
		b.Run(fmt.Sprintf("one-changed/%d", machines), func(b *testing.B) {
			b.ReportAllocs()
			for n := 0; b.Loop(); n++ {
				api.content["a"] = fmt.Sprintf("%s# %d\n", content[0], n)
				api.version++
				look(b, warm)
			}
		})
		b.Run(fmt.Sprintf("all/%d", machines), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				look(b, NewConfigMapInventory(api, entriesOf(names...)...))
			}
		})
		merged := make([]*inventory.Part, parts)
		for n := range content {
			merged[n], _ = inventory.ParsePart(names[n], []byte(content[n]))
		}
		b.Run(fmt.Sprintf("merge/%d", machines), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				newMachineList(inventory.Merge(merged...))
			}
		})
		list := newMachineList(inventory.Merge(merged...))
		b.Run(fmt.Sprintf("index/%d", machines), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				verifier.NewMachineIndex(list.machines)
			}
		})
	}
}

// configMaps is an API server that answers at once.
type configMaps struct {
	client.Reader
	content map[string]string
	version int
}

func (m *configMaps) Get(_ context.Context, key client.ObjectKey, into client.Object, _ ...client.GetOption) error {
	into.SetResourceVersion(fmt.Sprint(m.version))
	if object, whole := into.(*corev1.ConfigMap); whole {
		object.Data = map[string]string{"k": m.content[key.Name]}
	}
	return nil
}
