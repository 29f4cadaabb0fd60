// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/bindings"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	nodeClient     = "system:certificates.k8s.io:certificatesigningrequests:nodeclient"
	selfNodeClient = "system:certificates.k8s.io:certificatesigningrequests:selfnodeclient"

	kubeadmFirst  = "kubeadm:node-autoapprove-bootstrap"
	kubeadmSecond = "kubeadm:node-autoapprove-certificate-rotation"

	// soon is the longest time until the controller notices a binding.
	soon = 2 * time.Second
)

// clusterMetrics are registered once in a process.
var clusterMetrics = sync.OnceValues(telemetry.NewClusterMetrics)

// journal collects the log of managers.
type journal struct {
	mu  sync.Mutex
	all strings.Builder
}

func (j *journal) write(_, args string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.all.WriteString(args + "\n")
}

func (j *journal) says(what string) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return strings.Contains(j.all.String(), what)
}

// runManager runs a manager until the test ends, and gives up early on what it cannot watch.
func runManager(t *testing.T, rest *rest.Config, add func(ctrl.Manager) error) *journal {
	t.Helper()
	skip, said := true, &journal{}
	manager, err := ctrl.NewManager(rest, ctrl.Options{
		Scheme: newScheme(), Metrics: server.Options{BindAddress: "0"}, Logger: funcr.New(said.write, funcr.Options{}),
		Controller: config.Controller{SkipNameValidation: &skip, CacheSyncTimeout: 5 * time.Second},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := add(manager); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- manager.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("manager: %v", err)
		}
	})
	return said
}

func (b *bed) watchBindings(t *testing.T, rest *rest.Config, config bindings.Config) *journal {
	t.Helper()
	var err error
	if config.Metrics, err = clusterMetrics(); err != nil {
		t.Fatal(err)
	}
	return runManager(t, rest, func(m ctrl.Manager) error { return bindings.Add(m, config) })
}

// bind makes a binding of a ClusterRole to nodes, which is gone when the test ends.
func (b *bed) bind(t *testing.T, name, role string) *rbacv1.ClusterRoleBinding {
	t.Helper()
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: "system:nodes"}},
	}
	if err := b.client.Create(t.Context(), binding); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.unbind(t, name) })
	return binding
}

func (b *bed) unbind(t *testing.T, name string) {
	t.Helper()
	binding := &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if err := client.IgnoreNotFound(b.client.Delete(context.WithoutCancel(t.Context()), binding)); err != nil {
		t.Error(err)
	}
}

func (b *bed) bound(t *testing.T, name string) bool {
	t.Helper()
	err := b.client.Get(t.Context(), client.ObjectKey{Name: name}, &rbacv1.ClusterRoleBinding{})
	if client.IgnoreNotFound(err) != nil {
		t.Fatal(err)
	}
	return err == nil
}

// kubeadms restores kubeadm's bindings now, and when the test ends.
func (b *bed) kubeadms(t *testing.T) {
	t.Helper()
	restore := func() {
		for _, k := range []struct{ name, role, group string }{{kubeadmFirst, nodeClient, testbed.BootstrapGroup}, {kubeadmSecond, selfNodeClient, "system:nodes"}} {
			b.unbind(t, k.name)
			if err := b.BindGroup(context.WithoutCancel(t.Context()), k.name, k.role, k.group); err != nil {
				t.Error(err)
			}
		}
	}
	restore()
	t.Cleanup(restore)
}

// eventOn returns the note of an Event on that very binding, empty if there is none.
func (b *bed) eventOn(t *testing.T, binding *rbacv1.ClusterRoleBinding, reason string) string {
	t.Helper()
	for _, e := range b.eventsOn(t, binding, reason) {
		return e.Note
	}
	return ""
}

func (b *bed) eventsOn(t *testing.T, binding *rbacv1.ClusterRoleBinding, reason string) (all []eventsv1.Event) {
	t.Helper()
	list := &eventsv1.EventList{}
	if err := b.client.List(t.Context(), list, client.InNamespace(corev1.NamespaceDefault)); err != nil {
		t.Fatal(err)
	}
	for _, e := range list.Items {
		if e.Regarding.UID == binding.UID && e.Regarding.Kind == "ClusterRoleBinding" && e.Reason == reason && e.Type == corev1.EventTypeWarning {
			all = append(all, e)
		}
	}
	return all
}

// reported waits until a binding is reported, and returns the hint.
func (b *bed) reported(t *testing.T, limit time.Duration, binding *rbacv1.ClusterRoleBinding) (note string) {
	t.Helper()
	began := time.Now()
	harness.Eventually(t, limit, "reported: "+binding.Name, func() bool {
		note = b.eventOn(t, binding, bindings.ReasonAutoApproving)
		return note != ""
	})
	t.Logf("%s: reported after %s", binding.Name, time.Since(began).Round(time.Millisecond))
	return note
}

// gauged returns the ClusterRole of a binding in the gauge, "" if the gauge does not have the
// binding.
func gauged(t *testing.T, binding string) string {
	t.Helper()
	families, err := metrics.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		if family.GetName() != "node_attestation_auto_approving_bindings" {
			continue
		}
		for _, metric := range family.GetMetric() {
			labels := map[string]string{}
			for _, pair := range metric.GetLabel() {
				labels[pair.GetName()] = pair.GetValue()
			}
			if labels["binding"] == binding && metric.GetGauge().GetValue() == 1 {
				return labels["cluster_role"]
			}
		}
	}
	return ""
}

func (b *bed) binding(t *testing.T, name string) *rbacv1.ClusterRoleBinding {
	t.Helper()
	binding := &rbacv1.ClusterRoleBinding{}
	if err := b.client.Get(t.Context(), client.ObjectKey{Name: name}, binding); err != nil {
		t.Fatal(err)
	}
	return binding
}

// The controller reports existing and later bindings, by their role and not by their name. It
// changes none of them.
func TestBindingsAreReported(t *testing.T) {
	shared.kubeadms(t)
	said := shared.watchBindings(t, shared.AdminConfig(), bindings.Config{})
	for _, name := range []string{kubeadmFirst, kubeadmSecond} {
		shared.reported(t, 10*time.Second, shared.binding(t, name))
	}
	harmless := shared.bind(t, "kubeadm:node-autoapprove", "view")
	other := shared.bind(t, "team-a-viewers", nodeClient)
	if note := shared.reported(t, soon, other); !strings.Contains(note, `kubectl delete clusterrolebinding "team-a-viewers"`) || !strings.Contains(note, nodeClient) {
		t.Errorf("the Event says %q", note)
	}
	if role := gauged(t, other.Name); role != nodeClient {
		t.Errorf("in the gauge with %q", role)
	}
	// A binding without subjects does not count until it has one.
	empty := &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "nobody-yet"}, RoleRef: other.RoleRef}
	if err := shared.client.Create(t.Context(), empty); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { shared.unbind(t, empty.Name) })
	// A binding that was created again is another one.
	shared.unbind(t, other.Name)
	harness.Eventually(t, soon, "it leaves the gauge", func() bool { return gauged(t, other.Name) == "" })
	again := shared.bind(t, other.Name, selfNodeClient)
	shared.reported(t, soon, again)
	if role := gauged(t, again.Name); role != selfNodeClient {
		t.Errorf("in the gauge with %q", role)
	}
	if shared.eventOn(t, harmless, bindings.ReasonAutoApproving) != "" || gauged(t, harmless.Name) != "" {
		t.Error("kubeadm's name makes a binding of another role count")
	}
	if shared.eventOn(t, empty, bindings.ReasonAutoApproving) != "" || gauged(t, empty.Name) != "" {
		t.Error("a binding of nobody counts")
	}
	empty.Subjects = other.Subjects
	if err := shared.client.Update(t.Context(), empty); err != nil {
		t.Fatal(err)
	}
	shared.reported(t, soon, empty)
	for _, name := range []string{kubeadmFirst, kubeadmSecond, again.Name, empty.Name} {
		if !shared.bound(t, name) || !said.says(name) {
			t.Errorf("%s is gone, or not in the log", name)
		}
	}
}

// A binding that still exists is reported again after a while.
func TestBindingsAreReportedAgain(t *testing.T) {
	binding := shared.bind(t, "stays", nodeClient)
	said := shared.watchBindings(t, shared.AdminConfig(), bindings.Config{Remind: time.Second})
	shared.reported(t, 10*time.Second, binding)
	lines := func() int {
		said.mu.Lock()
		defer said.mu.Unlock()
		n := 0
		for line := range strings.Lines(said.all.String()) {
			if strings.Contains(line, `"binding"="stays"`) {
				n++
			}
		}
		return n
	}
	before, began := lines(), time.Now()
	harness.Eventually(t, harness.Soon, "said twice more", func() bool { return lines() >= before+2 })
	if took := time.Since(began); took < time.Second {
		t.Errorf("said twice more within %s", took)
	}
	// The controller has no right to change Events.
	if all := shared.eventsOn(t, binding, bindings.ReasonAutoApproving); len(all) != 1 || all[0].Series != nil {
		t.Errorf("it is in the log again and again, and in Events: %+v", all)
	}
}

// may grants a user rights until the test ends. It returns a credential of the user when the
// authorizer applies them.
func (b *bed) may(t *testing.T, user, binding string, rules ...rbacv1.PolicyRule) *rest.Config {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: binding}, Rules: rules}
	bound := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: binding}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: binding},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}},
	}
	for _, object := range []client.Object{role, bound} {
		if err := b.client.Create(ctx, object); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = b.client.Delete(ctx, object) })
	}
	for _, rule := range rules {
		harness.Eventually(t, harness.Soon, "the rights of "+binding, func() bool {
			review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
				User:               user,
				ResourceAttributes: &authorizationv1.ResourceAttributes{Group: rule.APIGroups[0], Resource: rule.Resources[0], Verb: rule.Verbs[0]},
			}}
			if err := b.client.Create(ctx, review); err != nil {
				t.Fatal(err)
			}
			return review.Status.Allowed
		})
	}
	as := b.AdminConfig()
	as.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: []string{"system:authenticated"}}
	return as
}

func rule(groups, resources, verbs string) rbacv1.PolicyRule {
	split := func(s string) []string { return strings.Split(s, ",") }
	return rbacv1.PolicyRule{APIGroups: split(groups), Resources: split(resources), Verbs: split(verbs)}
}

// A controller that may not watch bindings still decides requests, also after a manager's timeout
// for its caches. It sees bindings as soon as it may watch them.
func TestBindingsThatMayNotBeSeen(t *testing.T) {
	f := newFleet(t, nil)
	f.stop()
	as := f.may(t, "embedder", "embedder", rule(",certificates.k8s.io,attestation.cluster.x-k8s.io,events.k8s.io", "*", "*"))
	binding := f.bind(t, "unseen", nodeClient)
	var config bindings.Config
	said := runManager(t, as, func(m ctrl.Manager) error {
		return errors.Join(controller.Add(m, f.config), bindings.Add(m, config))
	})
	// A manager that failed would have ended after 5 s.
	time.Sleep(7 * time.Second)
	m := f.newMachine(t, "beside-it")
	f.inventoried(t, m)
	m.enrols(t)
	if !said.says("packaging/kubernetes/rbac.yaml") {
		t.Error("the log does not say what is missing")
	}
	if f.eventOn(t, binding, bindings.ReasonAutoApproving) != "" {
		t.Error("it was seen without the right to")
	}
	f.may(t, "embedder", "embedder-sees", rule(rbacv1.GroupName, "clusterrolebindings", "list,watch"))
	f.reported(t, time.Minute, binding)
}
