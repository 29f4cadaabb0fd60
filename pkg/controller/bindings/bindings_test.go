// SPDX-License-Identifier: Apache-2.0

package bindings

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

func newBinding(name, role string) *rbacv1.ClusterRoleBinding {
	return &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: "uid-1", ResourceVersion: "1"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: "system:nodes"}},
	}
}

func TestApprovesByItself(t *testing.T) {
	const kubeadms = "kubeadm:node-autoapprove-bootstrap"
	for name, c := range map[string]struct {
		binding *rbacv1.ClusterRoleBinding
		change  func(*rbacv1.ClusterRoleBinding)
		want    bool
	}{
		"kubeadm's first":    {newBinding(kubeadms, roleNodeClient), nil, true},
		"kubeadm's second":   {newBinding("kubeadm:node-autoapprove-certificate-rotation", roleSelfNodeClient), nil, true},
		"another name":       {newBinding("harmless", roleNodeClient), nil, true},
		"another role":       {newBinding(kubeadms, "view"), nil, false},
		"a longer role":      {newBinding(kubeadms, roleNodeClient+"s"), nil, false},
		"the serving role":   {newBinding(kubeadms, strings.TrimSuffix(roleNodeClient, "nodeclient")+"selfnodeserver"), nil, false},
		"a Role of the name": {newBinding(kubeadms, roleNodeClient), func(b *rbacv1.ClusterRoleBinding) { b.RoleRef.Kind = "Role" }, false},
		"another API group":  {newBinding(kubeadms, roleNodeClient), func(b *rbacv1.ClusterRoleBinding) { b.RoleRef.APIGroup = "example.com" }, false},
		"nobody":             {newBinding(kubeadms, roleNodeClient), func(b *rbacv1.ClusterRoleBinding) { b.Subjects = nil }, false},
	} {
		t.Run(name, func(t *testing.T) {
			if c.change != nil {
				c.change(c.binding)
			}
			if got := ApprovesByItself(c.binding); got != c.want {
				t.Errorf("%t", got)
			}
		})
	}
}

// bindingAPI is an API server with one binding.
type bindingAPI struct {
	client.Client
	binding *rbacv1.ClusterRoleBinding
}

func (a *bindingAPI) Get(_ context.Context, key client.ObjectKey, into client.Object, _ ...client.GetOption) error {
	if a.binding == nil {
		return apierrors.NewNotFound(bindingResource, key.Name)
	}
	a.binding.DeepCopyInto(into.(*rbacv1.ClusterRoleBinding))
	return nil
}

var bindingResource = schema.GroupResource{Group: rbacv1.GroupName, Resource: "clusterrolebindings"}

// eventList collects Events.
type eventList struct{ all []string }

func (h *eventList) Eventf(_, _ runtime.Object, kind, reason, _, _ string, args ...any) {
	h.all = append(h.all, kind+" "+reason+" "+args[0].(string))
}

func fakeBindings(api *bindingAPI, config Config) (*finder, *eventList, *[]string) {
	h, lines := &eventList{}, &[]string{}
	log := funcr.New(func(_, args string) { *lines = append(*lines, args) }, funcr.Options{})
	return &finder{Config: config, reader: api, events: h, log: log, lastReported: map[string]reported{}}, h, lines
}

// A binding is reported once, again after a while, and at once when it is another or has somebody
// again.
func TestBindingIsReportedAndReminded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := &bindingAPI{binding: newBinding("b", roleNodeClient)}
		b, events, lines := fakeBindings(api, Config{Remind: remindInterval, Audit: true})
		look := func(events int, again time.Duration) {
			t.Helper()
			result, err := b.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKey{Name: "b"}})
			if err != nil || result.RequeueAfter != again || len(b.events.(*eventList).all) != events || len(*lines) != events {
				t.Errorf("%v, %v, %q, %q", result, err, b.events.(*eventList).all, *lines)
			}
		}
		look(1, 15*time.Minute)
		look(1, 15*time.Minute)
		time.Sleep(4 * time.Minute)
		look(1, 11*time.Minute)
		time.Sleep(11 * time.Minute)
		look(2, 15*time.Minute)
		api.binding.UID = "uid-2"
		look(3, 15*time.Minute)
		subjects := api.binding.Subjects
		api.binding.Subjects = nil
		look(3, 0)
		api.binding.Subjects = subjects
		look(4, 15*time.Minute)
		for _, want := range []string{"Warning AutoApprovingBinding ", `kubectl delete clusterrolebinding "b"`} {
			if !strings.Contains(events.all[0], want) {
				t.Errorf("%q is not in %q", want, events.all[0])
			}
		}
	})
}

// The administrators of a cluster choose the names, and somebody else may copy the command.
func TestNameIsNoCommand(t *testing.T) {
	for name, says := range map[string]string{"a:b": `clusterrolebinding "a:b"`, "$(reboot)": `clusterrolebinding "NAME"`, "a`b": "NAME", "a; b": "NAME", "--all": "NAME"} {
		if got := message(newBinding(name, roleNodeClient)); !strings.Contains(got, says) {
			t.Errorf("%q: %s", name, got)
		}
	}
}

func TestBindingThatAFinalizerKeeps(t *testing.T) {
	binding := newBinding("b", roleSelfNodeClient)
	binding.DeletionTimestamp = &metav1.Time{Time: time.Now()}
	b, events, _ := fakeBindings(&bindingAPI{binding: binding}, Config{Remind: remindInterval})
	result, err := b.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKey{Name: "b"}})
	if err != nil || result.RequeueAfter != remindInterval || len(events.all) != 1 || !strings.Contains(events.all[0], "finalizer") {
		t.Errorf("%v, %v, %q", result, err, events.all)
	}
}

// What cannot be watched is said once in a while, however often it is tried.
func TestForbiddenWatchIsSaid(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, _, lines := fakeBindings(&bindingAPI{}, Config{})
		failures := &telemetry.WatchErrors{Log: b.log, Message: unwatched, Remind: time.Minute}
		err := apierrors.NewForbidden(bindingResource, "", errors.New("RBAC says no"))
		for range 10 {
			failures.Handle(t.Context(), nil, err)
		}
		time.Sleep(time.Minute)
		failures.Handle(t.Context(), nil, err)
		if len(*lines) != 2 || !strings.Contains((*lines)[0], "packaging/kubernetes/rbac.yaml") {
			t.Errorf("%q", *lines)
		}
	})
}

func TestBindingsAreTrimmed(t *testing.T) {
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "b", UID: "u", ResourceVersion: "7", Finalizers: []string{"f"}, Annotations: map[string]string{"a": "b"}},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: roleNodeClient}, Subjects: make([]rbacv1.Subject, 1000),
	}
	if !ApprovesByItself(binding) {
		t.Fatal("it is not one that matters")
	}
	out, err := trimBinding(binding)
	got, ok := out.(*rbacv1.ClusterRoleBinding)
	if err != nil || !ok || len(got.Subjects) != 1 || got.Annotations != nil || !ApprovesByItself(got) || got.UID != "u" || got.ResourceVersion != "7" {
		t.Errorf("%+v, %v", got, err)
	}
}
