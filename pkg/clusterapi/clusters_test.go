// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/controllers/clustercache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
)

// settingsOf returns those of a management cluster.
func settingsOf(t *testing.T, section string) *config.Settings {
	t.Helper()
	c, err := config.Parse([]byte("apiVersion: " + config.APIVersion + "\nkind: " + config.Kind + "\nsigning: {mode: Sign}\ntpm: {pcrs: {bank: sha256, indexes: [7]}}\n" +
		"clusterAPI: {" + section + "}\n"))
	if err != nil {
		t.Fatal(err)
	}
	settings, err := config.New(c)
	if err != nil {
		t.Fatal(err)
	}
	return settings
}

func clustersOf(t *testing.T, settings *config.Settings, objects ...client.Object) *clusterReconciler {
	t.Helper()
	scheme, err := Management{}.Scheme()
	if err != nil {
		t.Fatal(err)
	}
	builder := fake.NewClientBuilder().WithScheme(scheme)
	for _, object := range objects { // the fake writes into them, and tests in parallel share some
		builder.WithObjects(object.DeepCopyObject().(client.Object))
	}
	api := builder.Build()
	return &clusterReconciler{engineDeps: engineDeps{settings: settings, cached: api, live: api}}
}

func workloadCluster(change func(*clusterv1.Cluster)) *clusterv1.Cluster {
	c := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "c", UID: "u", Labels: map[string]string{}, Annotations: map[string]string{}}}
	change(c)
	return c
}

type noPlatform struct{}

func (noPlatform) EndorsementKeys(context.Context, []PlatformMachine) (map[PlatformMachine]PlatformAnswer, error) {
	return nil, nil
}

func TestPlatformIsOneOfTheProgram(t *testing.T) {
	t.Parallel()
	open := func(context.Context, manager.Manager) (EKTrust, error) { return noPlatform{}, nil }
	two := map[string]OpenPlatform{"acme": open, "metal3": open}
	for name, c := range map[string]struct {
		section   string
		platforms map[string]OpenPlatform
		says      string
	}{
		"none":               {"ekSources: [Annotation]", nil, ""},
		"none of two":        {"ekSources: [Annotation]", two, ""},
		"one of two":         {"ekSources: [Annotation, Platform], platform: acme", two, ""},
		"in another program": {"ekSources: [Platform], platform: acme", nil, `does not know "acme", but no platform`},
		"mistyped":           {"ekSources: [Platform], platform: metal", two, `does not know "metal", but acme, metal3; did you mean metal3?`},
	} {
		err := Management{Platforms: c.platforms}.Check(settingsOf(t, c.section))
		if (err == nil) != (c.says == "") || err != nil && (!strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), "clusterAPI.platform")) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestWhichClustersAreServed(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		section string
		change  func(*clusterv1.Cluster)
		want    bool
	}{
		"any":                  {"", func(*clusterv1.Cluster) {}, true},
		"paused":               {"", func(c *clusterv1.Cluster) { c.Spec.Paused = new(true) }, false},
		"not paused":           {"", func(c *clusterv1.Cluster) { c.Spec.Paused = new(false) }, true},
		"paused by annotation": {"", func(c *clusterv1.Cluster) { c.Annotations[clusterv1.PausedAnnotation] = "" }, false},
		"a filter":             {", watchFilter: mine", func(*clusterv1.Cluster) {}, false},
		"another's":            {", watchFilter: mine", func(c *clusterv1.Cluster) { c.Labels[clusterv1.WatchLabel] = "yours" }, false},
		"mine":                 {", watchFilter: mine", func(c *clusterv1.Cluster) { c.Labels[clusterv1.WatchLabel] = "mine" }, true},
	} {
		if got := clustersOf(t, settingsOf(t, "ekSources: [Annotation]"+c.section)).isServed(workloadCluster(c.change)); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestNodesLeftAlone(t *testing.T) {
	t.Parallel()
	controlPlane := func(name, cluster string) client.Object {
		return &clusterv1.Machine{
			ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: name, Labels: map[string]string{clusterv1.MachineControlPlaneLabel: ""}},
			Spec:       clusterv1.MachineSpec{ClusterName: cluster},
			Status:     clusterv1.MachineStatus{Addresses: clusterv1.MachineAddresses{{Type: clusterv1.MachineHostName, Address: "host-" + name}}},
		}
	}
	worker := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "worker"}, Spec: clusterv1.MachineSpec{ClusterName: "c"}}
	objects := []client.Object{controlPlane("cp-1", "c"), controlPlane("cp-2", "c"), controlPlane("cp-x", "another"), worker}
	for name, c := range map[string]struct {
		section, annotation string
		want                []string
		says                string
	}{
		"none":                          {"", "", nil, ""},
		"named":                         {"", " b,a , b,,", []string{"a", "b"}, ""},
		"control planes":                {", unattestedControlPlanes: true", "", []string{"cp-1", "cp-2"}, ""},
		"both":                          {", unattestedControlPlanes: true", "a,cp-1", []string{"a", "cp-1", "cp-2"}, ""},
		"control planes by host name":   {", unattestedControlPlanes: true, nodeNames: [ExternalDNS, Hostname, MachineName]", "", []string{"host-cp-1", "host-cp-2"}, ""},
		"a pattern":                     {"", "a,*", []string{"a"}, "1 entries"},
		"more than anybody lists":       {"", strings.Repeat("a,", 10) + manyNames(maxUnattested+1), nil, "2 entries"},
		"as many as somebody may list":  {"", manyNames(maxUnattested), nil, ""},
		"white space is not a name":     {"", " , ,", nil, ""},
		"upper case is no node's name":  {"", "A,b", []string{"b"}, "1 entries"},
		"control planes, and a pattern": {", unattestedControlPlanes: true", "*", []string{"cp-1", "cp-2"}, "1 entries"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cluster := workloadCluster(func(o *clusterv1.Cluster) { o.Annotations[annotationUnattestedNodes] = c.annotation })
			clusters, said := clustersOf(t, settingsOf(t, "ekSources: [Annotation]"+c.section), objects...), events.NewFakeRecorder(2)
			clusters.events = said
			got, err := clusters.unattestedNodes(t.Context(), cluster)
			if err != nil || c.want != nil && !slices.Equal(got, c.want) || len(got) > maxUnattested {
				t.Errorf("%q, %v", got, err)
			}
			if len(said.Events) != min(len(c.says), 1) {
				t.Fatalf("%d Events", len(said.Events))
			}
			if c.says != "" {
				if note := <-said.Events; !strings.Contains(note, c.says) {
					t.Error(note)
				}
			}
		})
	}
}

// manyNames returns so many names, separated by commas.
func manyNames(n int) string {
	names := make([]string, n)
	for i := range names {
		names[i] = "n" + strings.Repeat("x", i%60) + "-" + string(rune('a'+i/60%26)) + string(rune('a'+i/60/26))
	}
	return strings.Join(names, ",")
}

func TestWhoSigns(t *testing.T) {
	t.Parallel()
	ca := func(data map[string][]byte) []client.Object {
		return []client.Object{&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "c-ca"}, Data: data}}
	}
	for name, c := range map[string]struct {
		objects []client.Object
		want    bool
	}{
		"a CA":                    {ca(map[string][]byte{"tls.crt": {1}, "tls.key": {1}}), false},
		"an external CA":          {ca(map[string][]byte{"tls.crt": {1}}), true},
		"none yet: is waited for": {nil, false},
		"an empty one, too":       {ca(nil), false},
	} {
		clusters := clustersOf(t, settingsOf(t, "ekSources: [Annotation]"), c.objects...)
		if got, err := clusters.approvesOnly(t.Context(), client.ObjectKey{Namespace: "n", Name: "c"}); err != nil || got != c.want {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}

func TestForbiddenAddresses(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		services []string
		host     string
		want     []string
		says     string
	}{
		"all of it":            {[]string{"10.1.0.0/16", "fd00::/108"}, "API.example.com", []string{"10.1.0.0/16", "fd00::/108", "api.example.com"}, ""},
		"nothing is said":      {nil, "", []string{kubeadmServices}, ""},
		"an IP":                {nil, "192.0.2.1", []string{kubeadmServices, "192.0.2.1"}, ""},
		"a root's dot":         {nil, "api.example.com.", []string{kubeadmServices, "api.example.com"}, ""},
		"not a range":          {[]string{"10.1.0.0"}, "", nil, "CIDR"},
		"a host that is none":  {nil, "api_1.example.com", nil, "controlPlaneEndpoint"},
		"a host with its port": {nil, "api.example.com:6443", nil, "controlPlaneEndpoint"},
	} {
		got, err := forbiddenAddresses(workloadCluster(func(o *clusterv1.Cluster) {
			o.Spec.ClusterNetwork.Services.CIDRBlocks, o.Spec.ControlPlaneEndpoint.Host = c.services, c.host
		}))
		if !slices.Equal(got, c.want) || (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}

// An engine is replaced if a part of its plan changes.
func TestPlansDiffer(t *testing.T) {
	t.Parallel()
	connection := &rest.Config{}
	base := func() *enginePlan {
		return &enginePlan{cluster: workloadCluster(func(*clusterv1.Cluster) {}), uid: "u", connection: connection, unattestedNodes: []string{"a"}, forbiddenAddresses: []string{"b"}}
	}
	if !base().equal(base()) {
		t.Error("a plan is not itself")
	}
	for name, change := range map[string]func(*enginePlan){
		"another connection":      func(p *enginePlan) { p.connection = &rest.Config{} },
		"another identity":        func(p *enginePlan) { p.uid = "v" },
		"another object":          func(p *enginePlan) { p.cluster.UID = "v" },
		"another signs":           func(p *enginePlan) { p.approveOnly = true },
		"others are left alone":   func(p *enginePlan) { p.unattestedNodes = []string{"a", "c"} },
		"others are no addresses": func(p *enginePlan) { p.forbiddenAddresses = nil },
	} {
		p := base()
		change(p)
		if base().equal(p) || p.equal(base()) {
			t.Errorf("%s: the engine stays", name)
		}
	}
}

// connected is a ClusterCache whose Clusters are connected.
type connected struct {
	clustercache.ClusterCache

	workload client.Client
}

func (connected) GetRESTConfig(context.Context, client.ObjectKey) (*rest.Config, error) {
	return &rest.Config{}, nil
}

func (c connected) GetUncachedClient(context.Context, client.ObjectKey) (client.Client, error) {
	return c.workload, nil
}

// The engine's machines have the types of addresses that the operator configured.
func TestServingAddressesAreTheOperators(t *testing.T) {
	t.Parallel()
	settings := settingsOf(t, "ekSources: [Annotation], servingAddresses: [ExternalIP, InternalDNS]}\nserving: {signers: [kubernetes.io/kubelet-serving], forbiddenAddresses: [a.example.com]")
	e := &engine{engineDeps: engineDeps{settings: settings}, plan: enginePlan{cluster: workloadCluster(func(*clusterv1.Cluster) {}), uid: "u"}}
	want := []clusterv1.MachineAddressType{clusterv1.MachineExternalIP, clusterv1.MachineInternalDNS}
	if got := e.machineSourceConfig().ServingAddresses; !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
}

// A cluster that has another identity than its object was moved, or restored.
func TestWhenAClusterWasMoved(t *testing.T) {
	t.Parallel()
	made := metav1.NewTime(start)
	for uid, want := range map[string]time.Time{"u": {}, "older": start} {
		cluster := workloadCluster(func(c *clusterv1.Cluster) { c.CreationTimestamp = made })
		secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "c-node-attestation", Annotations: map[string]string{annotationClusterUID: uid}}}
		clusters := clustersOf(t, settingsOf(t, "ekSources: [Annotation]"), secret)
		clusters.connections = connected{workload: clusters.live}
		p, err := clusters.planFor(t.Context(), cluster)
		if err != nil {
			t.Fatal(err)
		}
		if got := (&engine{engineDeps: clusters.engineDeps, plan: *p}).machineSourceConfig().MovedAt; !got.Equal(want) {
			t.Errorf("%s: moved at %s, want %s", uid, got, want)
		}
	}
}

// Cluster API writes a Cluster's status several times for each Machine of a rollout. Only what a
// plan is made of makes a new one.
func TestChangesOfAClusterThatCount(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change func(*clusterv1.Cluster)
		counts bool
	}{
		"status": {func(c *clusterv1.Cluster) { c.Status.Phase = "Provisioned" }, false},
		"resync": {func(*clusterv1.Cluster) {}, false},
		"spec":   {func(c *clusterv1.Cluster) { c.Generation++ }, true}, // as the API server counts
		"filter": {func(c *clusterv1.Cluster) { c.Labels[clusterv1.WatchLabel] = "a" }, true},
		"nodes":  {func(c *clusterv1.Cluster) { c.Annotations[annotationUnattestedNodes] = "a" }, true},
		"paused": {func(c *clusterv1.Cluster) { c.Annotations[clusterv1.PausedAnnotation] = "" }, true},
	} {
		before := workloadCluster(func(c *clusterv1.Cluster) { c.Generation = 1 })
		after := before.DeepCopy()
		after.ResourceVersion = "2"
		c.change(after)
		if clusterChanged.Update(event.UpdateEvent{ObjectOld: before, ObjectNew: after}) != c.counts {
			t.Errorf("%s: counts: %t", name, !c.counts)
		}
	}
	if c := workloadCluster(func(*clusterv1.Cluster) {}); !clusterChanged.Create(event.CreateEvent{Object: c}) || !clusterChanged.Delete(event.DeleteEvent{Object: c}) {
		t.Error("a Cluster that comes or goes does not count")
	}
}
