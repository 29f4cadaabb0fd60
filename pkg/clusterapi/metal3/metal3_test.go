// SPDX-License-Identifier: Apache-2.0

package metal3

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	apimeta "k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/platformkit"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/platformkit/platformkittest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

const token = "controller"

var blue = types.NamespacedName{Namespace: "fleet", Name: "blue"}

// object is an object as the API server stores it.
type object = map[string]any

// imitation is an API server with the objects of CAPM3, and the cache of Clusters.
type imitation struct {
	server *platformkittest.Server
	// derived says that Machines have no provider ID.
	derived bool

	mu sync.Mutex
	// lists are the objects by resource.
	lists   map[string][]object
	cluster *clusterv1.Cluster
	made    int
}

func newImitation(t *testing.T, derived bool) *imitation {
	t.Helper()
	i := &imitation{
		derived: derived,
		lists: map[string][]object{"metal3clusters": {{
			"metadata": object{"namespace": blue.Namespace, "name": "m3c", "uid": "uid-of-m3c"},
			"spec":     object{"cloudProviderEnabled": false},
		}}},
		cluster: &clusterv1.Cluster{Spec: clusterv1.ClusterSpec{
			InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: infraGroup, Kind: clusterKind, Name: "m3c"},
		}},
	}
	i.server = platformkittest.NewServer(t, i)
	return i
}

// ServeHTTP answers lists as an API server does, in pages of the limit.
func (i *imitation) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	i.mu.Lock()
	defer i.mu.Unlock()
	parts := strings.Split(strings.TrimPrefix(r.URL.Path, "/"), "/")
	kinds := map[string]string{
		"infrastructure.cluster.x-k8s.io/v1beta2/metal3clusters": clusterKind, "infrastructure.cluster.x-k8s.io/v1beta2/metal3machines": machineKind,
		"metal3.io/v1alpha1/baremetalhosts": "BareMetalHost",
	}
	if r.Header.Get("Authorization") != "Bearer "+token {
		http.Error(w, "Unauthorized", http.StatusUnauthorized)
		return
	}
	if len(parts) != 6 || parts[0] != "apis" || parts[3] != "namespaces" || kinds[parts[1]+"/"+parts[2]+"/"+parts[5]] == "" {
		http.NotFound(w, r)
		return
	}
	metadataOnly := strings.Contains(r.Header.Get("Accept"), "as=PartialObjectMetadataList;g=meta.k8s.io;v=v1")
	var all []object
	for _, o := range i.lists[parts[5]] {
		m := o["metadata"].(object)
		labels, _ := m["labels"].(object)
		if m["namespace"] != parts[4] || !selects(r.URL.Query().Get("labelSelector"), labels) || !selects(r.URL.Query().Get("fieldSelector"), object{"metadata.name": m["name"]}) {
			continue
		}
		if metadataOnly {
			o = object{"metadata": m}
		}
		all = append(all, o)
	}
	from, _ := strconv.Atoi(r.URL.Query().Get("continue"))
	limit, err := strconv.Atoi(r.URL.Query().Get("limit"))
	if err != nil || limit > 500 {
		http.Error(w, "no limit", http.StatusBadRequest)
		return
	}
	to, meta := min(from+limit, len(all)), object{}
	if to < len(all) {
		meta["continue"] = strconv.Itoa(to)
	}
	answer := object{"apiVersion": parts[1] + "/" + parts[2], "kind": kinds[parts[1]+"/"+parts[2]+"/"+parts[5]] + "List", "metadata": meta, "items": all[from:to]}
	if metadataOnly {
		answer["apiVersion"], answer["kind"] = "meta.k8s.io/v1", "PartialObjectMetadataList"
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(answer)
}

// selects reports whether a selector k=v selects, as an empty one does.
func selects(selector string, values object) bool {
	key, value, _ := strings.Cut(selector, "=")
	return selector == "" || values[key] == value
}

// Get reads the Cluster as the manager's cache does.
func (i *imitation) Get(_ context.Context, key client.ObjectKey, into client.Object, _ ...client.GetOption) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if key != blue {
		return fmt.Errorf("no Cluster %s", key)
	}
	i.cluster.DeepCopyInto(into.(*clusterv1.Cluster))
	return nil
}

// List is not used.
func (*imitation) List(context.Context, client.ObjectList, ...client.ListOption) error {
	panic("a list of Clusters")
}

func mapper() apimeta.RESTMapper {
	infra, hosts := schema.GroupVersion{Group: infraGroup, Version: "v1beta2"}, schema.GroupVersion{Group: "metal3.io", Version: "v1alpha1"}
	m := apimeta.NewDefaultRESTMapper([]schema.GroupVersion{infra, hosts})
	m.Add(infra.WithKind(clusterKind), apimeta.RESTScopeNamespace)
	m.Add(infra.WithKind(machineKind), apimeta.RESTScopeNamespace)
	m.Add(hosts.WithKind("BareMetalHost"), apimeta.RESTScopeNamespace)
	return m
}

func (i *imitation) open(t *testing.T, budget *platformkit.Budget) *platform {
	t.Helper()
	api, err := newAPI(&rest.Config{Host: i.server.URL, BearerToken: token, TLSClientConfig: rest.TLSClientConfig{CAFile: i.server.CAFile}}, mapper(), budget)
	if err != nil {
		t.Fatal(err)
	}
	return &platform{api: api, clusters: i}
}

func (i *imitation) Server() *platformkittest.Server { return i.server }

func (i *imitation) Trust(t *testing.T, options platformkit.Options, budget *platformkit.Budget) clusterapi.EKTrust {
	t.Helper()
	return newTrust(i.open(t, budget), options)
}

func (i *imitation) Machine(name string) clusterapi.PlatformMachine {
	m := clusterapi.PlatformMachine{
		Cluster: blue, Name: name, UID: types.UID("uid-" + name), ProviderID: "metal3://fleet/host-" + name + "/m3m-" + name,
		Infrastructure: clusterv1.ContractVersionedObjectReference{APIGroup: infraGroup, Kind: machineKind, Name: "m3m-" + name},
	}
	if i.derived {
		m.ProviderID = ""
	}
	return m
}

func (i *imitation) Foreign() []clusterapi.PlatformMachine {
	var all []clusterapi.PlatformMachine
	for _, id := range []string{
		"aws:///a/i-1", "metal3://fleet/host-a", "metal3://0b3f7c1e-8a6d-4e52-9c47-1f6f5f0a2d3b", "metal3://", "metal3://other/host-a/m3m-a", "metal3://fleet/host-a/m3m-b",
		"metal3://fleet/host-a/m3m-a/x", "metal3:///host-a/m3m-a", "metal3://fleet//m3m-a", "Metal3://fleet/host-a/m3m-a", " metal3://fleet/host-a/m3m-a",
		"metal3://fleet/host-a/m3m-a\n", "metal3://fleet/../m3m-a", "metal3://fleet/host-a%2fm3m-a/m3m-a",
	} {
		m := i.Machine("a")
		m.ProviderID, m.Name = id, fmt.Sprintf("foreign%d", len(all))
		all = append(all, m)
	}
	for _, change := range []func(*clusterapi.PlatformMachine){
		func(m *clusterapi.PlatformMachine) { m.MachinePool = true },
		func(m *clusterapi.PlatformMachine) { m.UID = "" },
		func(m *clusterapi.PlatformMachine) { m.Infrastructure.Name = "" },
		func(m *clusterapi.PlatformMachine) { m.Infrastructure.Kind = "DockerMachine" },
		func(m *clusterapi.PlatformMachine) { m.Infrastructure.APIGroup = "cluster.x-k8s.io" },
	} {
		m := i.Machine("a")
		m.Name = fmt.Sprintf("foreign%d", len(all))
		change(&m)
		all = append(all, m)
	}
	return all
}

// metadata returns the metadata of an object of Cluster blue.
func metadata(name, uid string) object {
	return object{"namespace": blue.Namespace, "name": name, "uid": uid, "labels": object{clusterv1.ClusterNameLabel: blue.Name}}
}

func consumer(m3m string) object {
	return object{"apiVersion": infraGroup + "/v1beta2", "kind": machineKind, "namespace": blue.Namespace, "name": m3m}
}

func ekOf(number int) tpm.Fingerprint { return sha256.Sum256(fmt.Append(nil, "key ", number)) }

// Launch makes the Metal3Machine, and the host that it consumes.
func (i *imitation) Launch(name string, chip platformkittest.TPM) ([]tpm.Fingerprint, bool) {
	// No call is about one host, and no annotation says that there is no TPM.
	if chip.Silent || chip.None {
		return nil, false
	}
	i.Terminate(name)
	ek, annotation := ekOf(chip.Number), "sha256:"+ekOf(chip.Number).String()
	if chip.Broken {
		annotation += ",sha256:0"
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.made++
	m3m, host := metadata("m3m-"+name, fmt.Sprintf("uid-of-m3m-%d", i.made)), metadata("host-"+name, fmt.Sprintf("uid-of-host-%d", i.made))
	m3m["ownerReferences"] = []any{
		object{"apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "MachineSet", "name": "set", "uid": "uid-of-set"},
		object{"apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "Machine", "name": name, "uid": "uid-" + name, "controller": true},
	}
	host["annotations"] = object{attestation.AnnotationEK: annotation}
	i.lists["metal3machines"] = append(i.lists["metal3machines"], object{"metadata": m3m, "spec": object{"image": object{"url": "x"}}})
	i.lists["baremetalhosts"] = append(i.lists["baremetalhosts"], object{
		"metadata": host, "spec": object{"online": true, "consumerRef": consumer("m3m-" + name)},
		"status": object{"provisioning": object{"state": "provisioned", "ID": "x"}},
	})
	return []tpm.Fingerprint{ek}, true
}

// Change gives the same host another annotation. An invalid one is no failed read: see
// TestRefusals.
func (i *imitation) Change(name string, chip platformkittest.TPM) ([]tpm.Fingerprint, bool) {
	if chip.Broken {
		return nil, false
	}
	annotation := ekOf(chip.Number).String()
	i.change("baremetalhosts", "host-"+name, func(host object) {
		host["metadata"].(object)["annotations"] = object{attestation.AnnotationEK: annotation}
	})
	return []tpm.Fingerprint{ekOf(chip.Number)}, true
}

// change changes an object.
func (i *imitation) change(resource, name string, change func(object)) {
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, o := range i.lists[resource] {
		if o["metadata"].(object)["name"] == name {
			change(o)
			return
		}
	}
	panic("there is no " + name)
}

func (i *imitation) remove(resource, name string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.lists[resource] = slices.DeleteFunc(i.lists[resource], func(o object) bool { return o["metadata"].(object)["name"] == name })
}

func (i *imitation) Terminate(name string) {
	i.remove("metal3machines", "m3m-"+name)
	i.remove("baremetalhosts", "host-"+name)
}

func (i *imitation) Double(name string) bool {
	i.change("baremetalhosts", "host-"+name, func(host object) { i.lists["baremetalhosts"] = append(i.lists["baremetalhosts"], host) })
	return true
}

// Twins: a Metal3Machine has one Machine.
func (*imitation) Twins() bool { return false }

func TestConformance(t *testing.T) {
	for name, derived := range map[string]bool{"with provider ID": false, "without provider ID": true} {
		t.Run(name, func(t *testing.T) {
			platformkittest.Run(t, func(t *testing.T) platformkittest.Imitation { return newImitation(t, derived) })
		})
	}
}

// asked is an adapter that is asked about machines again and again.
type asked struct {
	*imitation
	trust clusterapi.EKTrust
}

func ask(t *testing.T, derived bool) asked {
	t.Helper()
	i := newImitation(t, derived)
	return asked{i, i.Trust(t, platformkit.Options{}, platformkit.NewBudget(1000, 1000))}
}

// answer returns the answer about a machine. It must be there: a machine that is left out keeps its
// last answer.
func (a asked) answer(t *testing.T, m clusterapi.PlatformMachine) (clusterapi.PlatformAnswer, string) {
	t.Helper()
	answers, err := a.trust.EndorsementKeys(t.Context(), []clusterapi.PlatformMachine{m})
	answer, ok := answers[m]
	if !ok {
		t.Fatalf("machine %s keeps its last answer: %v", m.Name, err)
	}
	if err == nil {
		return answer, ""
	}
	return answer, err.Error()
}

func (a asked) known(t *testing.T, m clusterapi.PlatformMachine, ek tpm.Fingerprint) {
	t.Helper()
	if answer, err := a.answer(t, m); answer.Unknown || err != "" || !slices.Equal(answer.EKs, []tpm.Fingerprint{ek}) {
		t.Errorf("machine %s: %+v %s", m.Name, answer, err)
	}
}

// refused fails unless the machine has no answer, and the error says why. An empty text: it has no
// error.
func (a asked) refused(t *testing.T, m clusterapi.PlatformMachine, says string) {
	t.Helper()
	answer, err := a.answer(t, m)
	if !answer.Unknown || len(answer.EKs) > 0 || answer.ProviderID != "" || !strings.Contains(err, says) || says == "" && err != "" {
		t.Errorf("machine %s: %+v, error %q, want %q", m.Name, answer, err, says)
	}
}

// Each row takes from a machine with an answer one thing that the answer needs. The answer goes at
// once, and comes back when the thing is there again.
func TestRefusals(t *testing.T) {
	owners := func(change object) func(*imitation) {
		return func(i *imitation) {
			i.change("metal3machines", "m3m-a", func(o object) {
				owner := maps.Clone(o["metadata"].(object)["ownerReferences"].([]any)[1].(object))
				maps.Copy(owner, change)
				o["metadata"].(object)["ownerReferences"] = []any{owner}
			})
		}
	}
	consumed := func(change object) func(*imitation) {
		return func(i *imitation) {
			i.change("baremetalhosts", "host-a", func(o object) {
				by := consumer("m3m-a")
				maps.Copy(by, change)
				o["spec"] = object{"consumerRef": by}
			})
		}
	}
	clusterSpec := func(spec object) func(*imitation) {
		return func(i *imitation) { i.change("metal3clusters", "m3c", func(o object) { o["spec"] = spec }) }
	}
	infrastructure := func(group, kind, name string) func(*imitation) {
		return func(i *imitation) {
			i.mu.Lock()
			defer i.mu.Unlock()
			i.cluster.Spec.InfrastructureRef = clusterv1.ContractVersionedObjectReference{APIGroup: group, Kind: kind, Name: name}
		}
	}
	state := func(state string) func(*imitation) {
		return func(i *imitation) {
			i.change("baremetalhosts", "host-a", func(o object) { o["status"] = object{"provisioning": object{"state": state}} })
		}
	}
	const notOwned, notConsumed, cloud = "is not controlled by this Machine", "is not consumed by", "does not have cloudProviderEnabled: false"
	// says is the error for a Machine with a provider ID, and derived for one without: "-" is the
	// same one, and "" none. "known" is an answer.
	for name, row := range map[string]struct {
		change        func(*imitation)
		says, derived string
	}{
		"the Metal3Machine is another Machine's": {owners(object{"uid": "uid-b"}), notOwned, "-"},
		"no controller":                          {owners(object{"controller": false}), notOwned, ""},
		"controlled by another kind":             {owners(object{"kind": "MachineSet"}), notOwned, "-"},
		"controlled by another group":            {owners(object{"apiVersion": "example.com/v1"}), notOwned, "-"},
		"controlled by the core group":           {owners(object{"apiVersion": "v1"}), notOwned, "-"},
		"controlled by an older version":         {owners(object{"apiVersion": "cluster.x-k8s.io/v1beta1"}), "known", "known"},
		"no Metal3Machine":                       {func(i *imitation) { i.remove("metal3machines", "m3m-a") }, "", ""},
		"no BareMetalHost":                       {func(i *imitation) { i.remove("baremetalhosts", "host-a") }, "", ""},
		"no consumer":                            {func(i *imitation) { i.change("baremetalhosts", "host-a", func(o object) { o["spec"] = object{} }) }, notConsumed, ""},
		"consumed by another Metal3Machine":      {consumed(object{"name": "m3m-b"}), notConsumed, ""},
		"consumed by another kind":               {consumed(object{"kind": "Cluster"}), notConsumed, ""},
		"consumed by another group":              {consumed(object{"apiVersion": "example.com/v1beta2"}), notConsumed, ""},
		"consumed from another namespace":        {consumed(object{"namespace": "other"}), notConsumed, ""},
		"consumed by an older version":           {consumed(object{"apiVersion": infraGroup + "/v1beta1"}), "known", "known"},
		"invalid annotation": {func(i *imitation) {
			i.change("baremetalhosts", "host-a", func(o object) {
				o["metadata"].(object)["annotations"] = object{attestation.AnnotationEK: "revoked"}
			})
		}, `BareMetalHost fleet/host-a: the annotation ` + attestation.AnnotationEK + ` has "revoked"`, "-"},
		"no annotation": {func(i *imitation) {
			i.change("baremetalhosts", "host-a", func(o object) { delete(o["metadata"].(object), "annotations") })
		}, "BareMetalHost fleet/host-a has no annotation " + attestation.AnnotationEK, "-"},
		"not provisioned yet":        {state("provisioning"), "known", ""},
		"being deprovisioned":        {state("deprovisioning"), "known", ""},
		"restored, without a status": {state(""), "known", ""},
		"the BareMetalHost has no label": {func(i *imitation) {
			i.change("baremetalhosts", "host-a", func(o object) { delete(o["metadata"].(object), "labels") })
		}, "", ""},
		"the Metal3Machine is another Cluster's": {func(i *imitation) {
			i.change("metal3machines", "m3m-a", func(o object) { o["metadata"].(object)["labels"] = object{clusterv1.ClusterNameLabel: "red"} })
		}, "", ""},
		"an external cloud provider":                      {clusterSpec(object{"cloudProviderEnabled": true}), cloud, "-"},
		"an external cloud provider, v1beta1":             {clusterSpec(object{"noCloudProvider": false}), cloud, "-"},
		"nothing said about it":                           {clusterSpec(object{}), cloud, "-"},
		"both said about it":                              {clusterSpec(object{"cloudProviderEnabled": false, "noCloudProvider": false}), cloud, "-"},
		"no external cloud provider, v1beta1":             {clusterSpec(object{"noCloudProvider": true}), "known", "known"},
		"no Metal3Cluster":                                {func(i *imitation) { i.remove("metal3clusters", "m3c") }, "Metal3Cluster fleet/m3c does not exist", "-"},
		"the Cluster has another kind of infrastructure":  {infrastructure(infraGroup, "DockerCluster", "m3c"), "is no Metal3Cluster", "-"},
		"the Cluster has another group of infrastructure": {infrastructure("example.com", clusterKind, "m3c"), "is no Metal3Cluster", "-"},
		"the Cluster has no infrastructure":               {infrastructure("", "", ""), "is no Metal3Cluster", "-"},
	} {
		for _, derived := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, derived: %t", name, derived), func(t *testing.T) {
				t.Parallel()
				a := ask(t, derived)
				eks, _ := a.Launch("a", platformkittest.TPM{Number: 1})
				a.known(t, a.Machine("a"), eks[0])
				says := row.says
				if derived && row.derived != "-" {
					says = row.derived
				}
				row.change(a.imitation)
				if says == "known" {
					a.known(t, a.Machine("a"), eks[0])
					return
				}
				a.refused(t, a.Machine("a"), says)
			})
		}
	}
}

// The answer has the provider ID that CAPM3 will set.
func TestProviderID(t *testing.T) {
	t.Parallel()
	for _, derived := range []bool{false, true} {
		a := ask(t, derived)
		a.Launch("a", platformkittest.TPM{Number: 1})
		if answer, err := a.answer(t, a.Machine("a")); answer.ProviderID != "metal3://fleet/host-a/m3m-a" {
			t.Errorf("%+v %s", answer, err)
		}
		if _, ok := a.trust.(clusterapi.ProviderIDs); !ok {
			t.Error("Machines without a provider ID are not asked about")
		}
	}
}

// A host keeps its annotation. Its next Metal3Machine has the answer, and the one before has none.
func TestHostIsReused(t *testing.T) {
	t.Parallel()
	for _, derived := range []bool{false, true} {
		a := ask(t, derived)
		eks, _ := a.Launch("a", platformkittest.TPM{Number: 1})
		a.known(t, a.Machine("a"), eks[0])
		a.Launch("b", platformkittest.TPM{Number: 2})
		a.remove("baremetalhosts", "host-b")
		a.change("baremetalhosts", "host-a", func(o object) { o["spec"] = object{"consumerRef": consumer("m3m-b")} })
		b := a.Machine("b")
		if !derived {
			b.ProviderID = "metal3://fleet/host-a/m3m-b"
		}
		answers, err := a.trust.EndorsementKeys(t.Context(), []clusterapi.PlatformMachine{a.Machine("a"), b})
		if got := answers[b]; got.Unknown || !slices.Equal(got.EKs, eks) {
			t.Errorf("the next one: %+v %v", got, err)
		}
		if got, ok := answers[a.Machine("a")]; !ok || !got.Unknown || len(got.EKs) > 0 {
			t.Errorf("the one before: %+v %v", got, err)
		}
	}
}

// Another annotation counts at once.
func TestAnnotationChanges(t *testing.T) {
	t.Parallel()
	a := ask(t, false)
	eks, _ := a.Launch("a", platformkittest.TPM{Number: 1})
	a.known(t, a.Machine("a"), eks[0])
	eks, _ = a.Change("a", platformkittest.TPM{Number: 2})
	a.known(t, a.Machine("a"), eks[0])
}

// No call is made while the budget allows none.
func TestBudget(t *testing.T) {
	t.Parallel()
	i, budget := newImitation(t, false), platformkit.NewBudget(1000, 1000)
	budget.Pause(time.Minute)
	limited, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := i.open(t, budget).Find(limited, blue, []string{"a//b"}); !errors.Is(err, platformkit.ErrPaused) || i.server.Calls() > 0 {
		t.Error(err)
	}
}

// Two hosts say that one Metal3Machine consumes them, or the provider ID names another one.
func TestTwoHosts(t *testing.T) {
	t.Parallel()
	for _, derived := range []bool{false, true} {
		a := ask(t, derived)
		a.Launch("a", platformkittest.TPM{Number: 1})
		a.Launch("b", platformkittest.TPM{Number: 2})
		a.change("baremetalhosts", "host-b", func(o object) { o["spec"] = object{"consumerRef": consumer("m3m-a")} })
		a.refused(t, a.Machine("a"), "is the consumer of 2 BareMetalHosts")
		m := a.Machine("a")
		if m.ProviderID = "metal3://fleet/host-a/m3m-a"; derived {
			continue
		}
		a.remove("baremetalhosts", "host-a")
		a.refused(t, m, "is the consumer of the BareMetalHost host-b, and the provider ID names host-a")
	}
}

// Objects of other namespaces and Clusters do not count, and neither disturbs.
func TestNamespaces(t *testing.T) {
	t.Parallel()
	a := ask(t, false)
	eks, _ := a.Launch("a", platformkittest.TPM{Number: 1})
	a.mu.Lock()
	for _, o := range slices.Clone(a.lists["baremetalhosts"]) {
		other, m := maps.Clone(o), maps.Clone(o["metadata"].(object))
		m["namespace"], m["uid"], other["metadata"] = "other", "uid-of-other", m
		a.lists["baremetalhosts"] = append(a.lists["baremetalhosts"], other)
	}
	a.mu.Unlock()
	a.known(t, a.Machine("a"), eks[0])
	other := a.Machine("a")
	other.Cluster.Name = "red"
	answers, err := a.trust.EndorsementKeys(t.Context(), []clusterapi.PlatformMachine{other})
	if err == nil || len(answers) > 0 {
		t.Errorf("of a Cluster that does not exist: %+v %v", answers, err)
	}
}

// An answer of another form is an error: nothing follows from it.
func TestInvalidAnswers(t *testing.T) {
	t.Parallel()
	const good = `{"apiVersion":"infrastructure.cluster.x-k8s.io/v1beta2","kind":"Metal3ClusterList","metadata":{},"items":[]}`
	for name, body := range map[string]string{
		"empty object":       `{}`,
		"no JSON":            `<html>`,
		"another kind":       `{"apiVersion":"v1","kind":"Status","status":"Success"}`,
		"another namespace":  strings.Replace(good, "[]", `[{"metadata":{"name":"m3c","namespace":"other","uid":"x"}}]`, 1),
		"no name":            strings.Replace(good, "[]", `[{"metadata":{"namespace":"fleet","uid":"x"}}]`, 1),
		"twice":              strings.Replace(good, "[]", `[{"metadata":{"name":"m3c","namespace":"fleet"}},{"metadata":{"name":"m3c","namespace":"fleet"}}]`, 1),
		"without an end":     strings.Replace(good, `"metadata":{}`, `"metadata":{"continue":"x"}`, 1),
		"fields of no case":  strings.Replace(good, "kind", "KIND", 1),
		"another type":       strings.Replace(good, "[]", `[{"metadata":{"name":"m3c","namespace":"fleet","uid":"x"},"spec":{"cloudProviderEnabled":"no"}}]`, 1),
		"text after the end": good + "x",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			i := newImitation(t, false)
			server := platformkittest.NewServer(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(body)) }))
			i.server = server
			m := i.Machine("a")
			answers, err := i.Trust(t, platformkit.Options{}, platformkit.NewBudget(1000, 1000)).EndorsementKeys(t.Context(), []clusterapi.PlatformMachine{m})
			if _, answered := answers[m]; answered || err == nil {
				t.Errorf("%+v %v", answers, err)
			}
		})
	}
}

// No other server can answer in the API server's place.
func TestUnverifiedServer(t *testing.T) {
	t.Parallel()
	for _, config := range []*rest.Config{
		{Host: "http://192.0.2.1"}, {Host: "192.0.2.1:80"}, {Host: "https://192.0.2.1", TLSClientConfig: rest.TLSClientConfig{Insecure: true}},
	} {
		if _, err := newAPI(config, mapper(), platformkit.NewBudget(1, 1)); err == nil || !strings.Contains(err.Error(), "does not verify") {
			t.Errorf("%s: %v", config.Host, err)
		}
	}
}

// A kind that is not installed is an error that names the kind.
func TestMissingKinds(t *testing.T) {
	t.Parallel()
	i := newImitation(t, false)
	p := i.open(t, platformkit.NewBudget(1000, 1000))
	p.api.kinds = apimeta.NewDefaultRESTMapper(nil)
	if _, err := p.Find(t.Context(), blue, []string{"a//b"}); err == nil || !strings.Contains(err.Error(), clusterKind) {
		t.Error(err)
	}
}
