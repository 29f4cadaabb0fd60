// SPDX-License-Identifier: Apache-2.0

// Package bindings finds ClusterRoleBindings that make kube-controller-manager approve requests of
// kubelets without attestation, and reports them.
package bindings

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	runtimeconfig "sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

// kube-controller-manager approves the requests of users with one of these ClusterRoles, without
// evidence. With the first, a user joins as any node. With the second, a node renews.
const (
	roleNodeClient     = "system:certificates.k8s.io:certificatesigningrequests:nodeclient"
	roleSelfNodeClient = "system:certificates.k8s.io:certificatesigningrequests:selfnodeclient"
)

// ReasonAutoApproving is the reason of Events on ClusterRoleBindings.
const ReasonAutoApproving = "AutoApprovingBinding"

// remindInterval is the time until a binding that still exists is reported again.
const remindInterval = telemetry.DedupInterval + time.Minute

// Config configures Add and Run.
type Config struct {
	// Audit says that the controller is in audit mode, where kubelets need the bindings. So they
	// are no errors in the log.
	Audit bool
	// Remind is the time until a binding that still exists is reported again. Default: 15 minutes,
	// which is longer than telemetry.DedupInterval.
	Remind time.Duration
	// Metrics gauge the bindings. Optional.
	Metrics *telemetry.ClusterMetrics
}

// finder reconciles ClusterRoleBindings.
type finder struct {
	Config
	cache  cache.Cache
	reader client.Reader // the cache
	events events.EventRecorder
	log    logr.Logger
	// lastReported has the time of each binding's last report. Only the one worker uses it.
	lastReported map[string]reported
}

type reported struct {
	uid types.UID
	at  time.Time
}

// Add adds a controller to a manager. It finds the bindings by their role, since names may differ.
// It keeps watching, since `kubeadm upgrade` creates them again. Only the leader runs it. The
// manager's scheme must have rbac.authorization.k8s.io/v1.
//
// It needs list and watch on clusterrolebindings. While these are forbidden, it logs that from time
// to time. For that it has a cache of its own, since a manager ends if its cache cannot sync.
func Add(m ctrl.Manager, config Config) error {
	clients := Clients{
		Config: m.GetConfig(), Cache: cache.Options{HTTPClient: m.GetHTTPClient(), Scheme: m.GetScheme(), Mapper: m.GetRESTMapper()},
		Events: m.GetEventRecorder(telemetry.Component), Log: m.GetLogger().WithName("bindings"),
	}
	return m.Add(manager.RunnableFunc(func(ctx context.Context) error { return run(ctx, config, clients, m.GetControllerOptions()) }))
}

const suffix = "-bindings"

const unwatched = "bindings that approve without attestation go unnoticed: list and watch on clusterrolebindings are needed"

// Clients reach the cluster of the bindings.
type Clients struct {
	Config *rest.Config
	// Cache must have the scheme.
	Cache  cache.Options
	Events events.EventRecorder
	Log    logr.Logger
}

// Run finds and reports the bindings until ctx ends. Add runs it in a manager.
func Run(ctx context.Context, config Config, clients Clients) error {
	// each cluster has a controller of this name
	return run(ctx, config, clients, runtimeconfig.Controller{SkipNameValidation: new(true)})
}

func run(ctx context.Context, config Config, clients Clients, defaults runtimeconfig.Controller) error {
	f, err := newFinder(config, clients)
	if err != nil {
		return err
	}
	options := f.options()
	options.Reconciler = f
	options.LogConstructor = func(request *reconcile.Request) logr.Logger {
		if request == nil {
			return clients.Log
		}
		return clients.Log.WithValues("binding", request.Name)
	}
	options.DefaultFromConfig(defaults)
	c, err := controller.NewUnmanaged(telemetry.Component+suffix, options)
	if err != nil {
		return err
	}
	if err := c.Watch(f.source()); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- f.cache.Start(ctx) }()
	err = c.Start(ctx)
	cancel() // the cache must not outlive the controller
	return errors.Join(err, <-done)
}

func newFinder(config Config, clients Clients) (*finder, error) {
	f := &finder{Config: config, events: telemetry.NewDedupRecorder(clients.Events), log: clients.Log, lastReported: map[string]reported{}}
	if f.Remind <= 0 {
		f.Remind = remindInterval
	}
	options := clients.Cache
	failures := &telemetry.WatchErrors{Log: clients.Log, Message: unwatched, Remind: f.Remind}
	options.DefaultTransform, options.DefaultWatchErrorHandler = trimBinding, failures.Handle
	var err error
	if f.cache, err = cache.New(clients.Config, options); err != nil {
		return nil, fmt.Errorf("bindings: %w", err)
	}
	f.reader = f.cache
	return f, nil
}

// source returns the cache's events as a Func. A Func has no WaitForSync, whose failure would end
// the manager.
func (f *finder) source() source.Source {
	kind := source.Kind(f.cache, &rbacv1.ClusterRoleBinding{}, &handler.TypedEnqueueRequestForObject[*rbacv1.ClusterRoleBinding]{})
	return source.Func(kind.Start)
}

func (f *finder) options() controller.Options {
	// The priority queue of v0.24.1 can hang when it is stopped while requests are in it
	// (kubernetes-sigs/controller-runtime#3538).
	return controller.Options{MaxConcurrentReconciles: 1, UsePriorityQueue: new(false)}
}

// Reconcile reports one ClusterRoleBinding.
func (f *finder) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	binding := &rbacv1.ClusterRoleBinding{}
	if err := f.reader.Get(ctx, request.NamespacedName, binding); client.IgnoreNotFound(err) != nil {
		return ctrl.Result{}, err
	}
	if !ApprovesByItself(binding) { // or it is gone
		delete(f.lastReported, request.Name)
		f.Metrics.BindingGone(request.Name)
		return ctrl.Result{}, nil
	}
	f.Metrics.BindingFound(binding.Name, binding.RoleRef.Name)
	return f.report(binding), nil
}

// ApprovesByItself reports whether a binding gives anybody one of the two roles with which
// kube-controller-manager approves without attestation.
func ApprovesByItself(binding *rbacv1.ClusterRoleBinding) bool {
	role := binding.RoleRef
	return len(binding.Subjects) > 0 && role.APIGroup == rbacv1.GroupName && role.Kind == "ClusterRole" &&
		(role.Name == roleNodeClient || role.Name == roleSelfNodeClient)
}

// report reports a binding, at most once per Remind.
func (f *finder) report(binding *rbacv1.ClusterRoleBinding) ctrl.Result {
	now := time.Now()
	if last := f.lastReported[binding.Name]; last.uid == binding.UID && now.Sub(last.at) < f.Remind {
		return ctrl.Result{RequeueAfter: f.Remind - now.Sub(last.at)}
	}
	f.lastReported[binding.Name] = reported{binding.UID, now}
	message := message(binding)
	if f.Audit {
		f.log.Info(message, "binding", binding.Name, "reason", ReasonAutoApproving, "audit", true)
	} else {
		f.log.Error(nil, message, "binding", binding.Name, "reason", ReasonAutoApproving)
	}
	f.events.Eventf(binding, nil, corev1.EventTypeWarning, ReasonAutoApproving, "Report", "%s", message)
	return ctrl.Result{RequeueAfter: f.Remind}
}

func message(binding *rbacv1.ClusterRoleBinding) string {
	what := fmt.Sprintf("with the role %s kube-controller-manager approves requests of kubelets without attestation; ", binding.RoleRef.Name)
	if !binding.DeletionTimestamp.IsZero() {
		return what + "it is being deleted, and a finalizer keeps it"
	}
	return what + fmt.Sprintf("remove it: kubectl delete clusterrolebinding %q", text.Arguments([]string{binding.Name}))
}

// trimBinding is a transform for a cache of ClusterRoleBindings. It keeps one subject, since only
// the existence of subjects matters.
func trimBinding(object any) (any, error) {
	binding, ok := object.(*rbacv1.ClusterRoleBinding)
	if !ok {
		return object, nil
	}
	binding.ManagedFields, binding.Annotations, binding.Labels = nil, nil, nil
	if len(binding.Subjects) > 1 {
		binding.Subjects = []rbacv1.Subject{binding.Subjects[0]}
	}
	return binding, nil
}
