// SPDX-License-Identifier: Apache-2.0

// Package bindings finds ClusterRoleBindings that make kube-controller-manager approve requests of
// kubelets without attestation. It reports them and, if configured, removes them.
package bindings

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
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

// Reasons of Events on ClusterRoleBindings.
const (
	ReasonAutoApproving = "AutoApprovingBinding"
	ReasonRemoved       = "AutoApprovingBindingRemoved"
)

const (
	// remindInterval is the time until a binding that still exists is reported again.
	remindInterval = telemetry.DedupInterval + time.Minute
	// forbiddenRetry is the time until a forbidden removal is retried.
	forbiddenRetry = time.Minute
	// conflictRetry is the time until a binding is read again that changed before its removal.
	conflictRetry = 100 * time.Millisecond
)

// Config configures Add and Run. The zero value reports.
type Config struct {
	// Remove deletes the bindings that are found. Otherwise they are only reported.
	Remove bool
	// Audit never deletes.
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
	writer client.Writer
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
		Writer: m.GetClient(), Events: m.GetEventRecorder(telemetry.Component), Log: m.GetLogger().WithName("bindings"),
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
	Writer client.Writer
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
	f := &finder{Config: config, writer: clients.Writer, events: telemetry.NewDedupRecorder(clients.Events), log: clients.Log, lastReported: map[string]reported{}}
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

// Reconcile reports or removes one ClusterRoleBinding.
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
	if !f.Remove || f.Audit || !binding.DeletionTimestamp.IsZero() {
		return f.report(binding, nil), nil
	}
	switch err := f.remove(ctx, binding); {
	case err == nil || apierrors.IsNotFound(err):
		return ctrl.Result{}, nil // the delete event reconciles the binding again
	case apierrors.IsConflict(err):
		return ctrl.Result{RequeueAfter: conflictRetry}, nil // the binding has changed
	case apierrors.IsForbidden(err):
		return f.report(binding, err), nil
	default:
		return ctrl.Result{}, err
	}
}

// ApprovesByItself reports whether a binding gives anybody one of the two roles with which
// kube-controller-manager approves without attestation.
func ApprovesByItself(binding *rbacv1.ClusterRoleBinding) bool {
	role := binding.RoleRef
	return len(binding.Subjects) > 0 && role.APIGroup == rbacv1.GroupName && role.Kind == "ClusterRole" &&
		(role.Name == roleNodeClient || role.Name == roleSelfNodeClient)
}

// remove deletes exactly the version that was read.
func (f *finder) remove(ctx context.Context, binding *rbacv1.ClusterRoleBinding) error {
	err := f.writer.Delete(ctx, binding, client.Preconditions{UID: &binding.UID, ResourceVersion: &binding.ResourceVersion})
	if err != nil {
		return err
	}
	f.record(binding, ReasonRemoved, "Remove", fmt.Sprintf(
		"removed: with the role %s kube-controller-manager approved requests of kubelets without attestation", binding.RoleRef.Name))
	return nil
}

// report reports a binding, at most once per Remind. forbidden is the error of its removal, nil if
// there was none.
func (f *finder) report(binding *rbacv1.ClusterRoleBinding, forbidden error) ctrl.Result {
	again := f.Remind
	now := time.Now()
	last := f.lastReported[binding.Name]
	if last.uid == binding.UID && now.Sub(last.at) < f.Remind {
		again = f.Remind - now.Sub(last.at)
	} else {
		f.lastReported[binding.Name] = reported{binding.UID, now}
		f.record(binding, ReasonAutoApproving, "Report", message(binding, forbidden))
	}
	if forbidden != nil {
		again = min(again, forbiddenRetry)
	}
	return ctrl.Result{RequeueAfter: again}
}

func message(binding *rbacv1.ClusterRoleBinding, forbidden error) string {
	what := fmt.Sprintf("with the role %s kube-controller-manager approves requests of kubelets without attestation; ", binding.RoleRef.Name)
	byHand := fmt.Sprintf("kubectl delete clusterrolebinding %q", text.Arguments([]string{binding.Name}))
	switch {
	case forbidden != nil:
		return what + "the controller may not remove it: apply packaging/kubernetes/optional/remove-bindings.yaml, which is for the two " +
			"of kubeadm, or " + byHand
	case !binding.DeletionTimestamp.IsZero():
		return what + "it is being deleted, and a finalizer keeps it"
	default:
		return what + "remove it: " + byHand + ", or set autoApprovingBindings: Remove"
	}
}

func (f *finder) record(binding *rbacv1.ClusterRoleBinding, reason, action, message string) {
	if reason == ReasonAutoApproving && !f.Audit {
		f.log.Error(nil, message, "binding", binding.Name, "reason", reason)
	} else {
		f.log.Info(message, "binding", binding.Name, "reason", reason, "audit", f.Audit)
	}
	f.events.Eventf(binding, nil, corev1.EventTypeWarning, reason, action, "%s", message)
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
