// SPDX-License-Identifier: Apache-2.0

package controller

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
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

// The ClusterRoles whose holders' requests kube-controller-manager approves by itself: whoever has the first joins as any node, and with the
// second a node renews, without evidence.
const (
	roleNodeClient     = "system:certificates.k8s.io:certificatesigningrequests:nodeclient"
	roleSelfNodeClient = "system:certificates.k8s.io:certificatesigningrequests:selfnodeclient"
)

// Reasons of Events on ClusterRoleBindings.
const (
	ReasonBinding        = "AutoApprovingBinding"
	ReasonBindingRemoved = "AutoApprovingBindingRemoved"
)

const (
	// bindingsRemind is how soon a binding that is still there is reported again.
	bindingsRemind = telemetry.DedupInterval + time.Minute
	// bindingsRetry is how soon it is tried again to remove one that may not be removed.
	bindingsRetry = time.Minute
)

// BindingsConfig is what AddBindings is told. The zero value reports.
type BindingsConfig struct {
	// Remove deletes what is found; otherwise it is reported only.
	Remove bool
	// Audit never deletes.
	Audit bool
	// Remind is how soon a binding that is still there is reported again. Default: 15 minutes. telemetry.NewDedupRecorder drops Events that come sooner.
	Remind time.Duration
	// Metrics gauge what is found. Optional.
	Metrics *telemetry.ClusterMetrics
}

// bindings finds ClusterRoleBindings that have kube-controller-manager approve without attestation.
type bindings struct {
	BindingsConfig
	known  cache.Cache
	reader client.Reader // known
	writer client.Writer
	events events.EventRecorder
	log    logr.Logger
	// said is when each binding was last reported. There is one worker, and it alone uses it.
	said map[string]reported
}

type reported struct {
	uid types.UID
	at  time.Time
}

// AddBindings adds a controller to a manager, whose scheme has rbac.authorization.k8s.io/v1, that finds ClusterRoleBindings with which
// kube-controller-manager approves without attestation. `kubeadm upgrade` brings them back. It goes by their role, not by their name. Only
// the leader does it.
//
// It needs list and watch on clusterrolebindings. Where that is forbidden it says so from time to time, and begins when it no longer is.
// It has a cache of its own for that: all that a manager runs waits for everything in the manager's, and the manager ends when the wait is too
// long.
func AddBindings(m ctrl.Manager, config BindingsConfig) error {
	b, err := newBindings(config, BindingsClients{
		Config: m.GetConfig(), Cache: cache.Options{HTTPClient: m.GetHTTPClient(), Scheme: m.GetScheme(), Mapper: m.GetRESTMapper()},
		Writer: m.GetClient(), Events: m.GetEventRecorder(Name), Log: m.GetLogger().WithName("bindings"),
	})
	if err != nil {
		return err
	}
	// A cache of its own is for replicas that stand by, too, unless it is wrapped.
	if err := m.Add(manager.RunnableFunc(b.known.Start)); err != nil {
		return err
	}
	return ctrl.NewControllerManagedBy(m).Named(Name + bindingsSuffix).WatchesRawSource(b.source()).WithOptions(b.options()).Complete(b)
}

const bindingsSuffix = "-bindings"

const unwatchedBindings = "bindings that approve without attestation go unnoticed: list and watch on clusterrolebindings are needed"

// BindingsClients are how the bindings of a cluster are reached.
type BindingsClients struct {
	Config *rest.Config
	// Cache has, at least, the scheme.
	Cache  cache.Options
	Writer client.Writer
	Events events.EventRecorder
	Log    logr.Logger
}

// RunBindings does what AddBindings does without a manager, until ctx ends.
func RunBindings(ctx context.Context, config BindingsConfig, clients BindingsClients) error {
	b, err := newBindings(config, clients)
	if err != nil {
		return err
	}
	options := b.options()
	options.Reconciler, options.SkipNameValidation = b, new(true) // there is one for each cluster
	options.LogConstructor = func(*reconcile.Request) logr.Logger { return clients.Log }
	c, err := controller.NewUnmanaged(Name+bindingsSuffix, options)
	if err != nil {
		return err
	}
	if err := c.Watch(b.source()); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- b.known.Start(ctx) }()
	err = c.Start(ctx)
	cancel() // one does not go on without the other
	return errors.Join(err, <-done)
}

func newBindings(config BindingsConfig, clients BindingsClients) (*bindings, error) {
	b := &bindings{BindingsConfig: config, writer: clients.Writer, events: telemetry.NewDedupRecorder(clients.Events), log: clients.Log, said: map[string]reported{}}
	if b.Remind <= 0 {
		b.Remind = bindingsRemind
	}
	options := clients.Cache
	failures := &telemetry.WatchErrors{Log: clients.Log, Message: unwatchedBindings, Remind: b.Remind}
	options.DefaultTransform, options.DefaultWatchErrorHandler = trimBinding, failures.Handle
	var err error
	if b.known, err = cache.New(clients.Config, options); err != nil {
		return nil, fmt.Errorf("bindings: %w", err)
	}
	b.reader = b.known
	return b, nil
}

// source is, as a Func, one without WaitForSync, which would end the manager.
func (b *bindings) source() source.Source {
	kind := source.Kind(b.known, &rbacv1.ClusterRoleBinding{}, &handler.TypedEnqueueRequestForObject[*rbacv1.ClusterRoleBinding]{})
	return source.Func(kind.Start)
}

func (b *bindings) options() controller.Options {
	// The priority queue of v0.24.1 can hang when it is stopped while requests are in it (kubernetes-sigs/controller-runtime#3538).
	return controller.Options{MaxConcurrentReconciles: 1, UsePriorityQueue: new(false)}
}

// Reconcile looks at one ClusterRoleBinding.
func (b *bindings) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	binding := &rbacv1.ClusterRoleBinding{}
	if err := b.reader.Get(ctx, request.NamespacedName, binding); client.IgnoreNotFound(err) != nil {
		return ctrl.Result{}, err
	}
	if !approvesByItself(binding) { // or it is gone
		delete(b.said, request.Name)
		b.Metrics.BindingGone(request.Name)
		return ctrl.Result{}, nil
	}
	b.Metrics.BindingFound(binding.Name, binding.RoleRef.Name)
	if !b.Remove || b.Audit || !binding.DeletionTimestamp.IsZero() {
		return b.report(binding, nil), nil
	}
	switch err := b.remove(ctx, binding); {
	case err == nil || apierrors.IsNotFound(err):
		return ctrl.Result{}, nil // the watch tells that it is gone
	case apierrors.IsConflict(err):
		return ctrl.Result{RequeueAfter: lookAgain / 10}, nil // it is not the one that was looked at
	case apierrors.IsForbidden(err):
		return b.report(binding, err), nil
	default:
		return ctrl.Result{}, err
	}
}

// approvesByItself reports whether a binding gives anybody one of the two roles.
func approvesByItself(binding *rbacv1.ClusterRoleBinding) bool {
	role := binding.RoleRef
	return len(binding.Subjects) > 0 && role.APIGroup == rbacv1.GroupName && role.Kind == "ClusterRole" &&
		(role.Name == roleNodeClient || role.Name == roleSelfNodeClient)
}

// remove deletes exactly what was looked at.
func (b *bindings) remove(ctx context.Context, binding *rbacv1.ClusterRoleBinding) error {
	err := b.writer.Delete(ctx, binding, client.Preconditions{UID: &binding.UID, ResourceVersion: &binding.ResourceVersion})
	if err != nil {
		return err
	}
	b.say(binding, ReasonBindingRemoved, "Remove", fmt.Sprintf(
		"removed: with the role %s kube-controller-manager approved requests of kubelets without attestation", binding.RoleRef.Name))
	return nil
}

// report says that a binding is there, and what to do, if it was not just said. forbidden is why it could not be removed, or nil.
func (b *bindings) report(binding *rbacv1.ClusterRoleBinding, forbidden error) ctrl.Result {
	again := b.Remind
	now := time.Now()
	last := b.said[binding.Name]
	if last.uid == binding.UID && now.Sub(last.at) < b.Remind {
		again = b.Remind - now.Sub(last.at)
	} else {
		b.said[binding.Name] = reported{binding.UID, now}
		b.say(binding, ReasonBinding, "Report", bindingMessage(binding, forbidden))
	}
	if forbidden != nil {
		again = min(again, bindingsRetry)
	}
	return ctrl.Result{RequeueAfter: again}
}

func bindingMessage(binding *rbacv1.ClusterRoleBinding, forbidden error) string {
	what := fmt.Sprintf("with the role %s kube-controller-manager approves requests of kubelets without attestation; ", binding.RoleRef.Name)
	byHand := fmt.Sprintf("kubectl delete clusterrolebinding %.253q", binding.Name)
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

func (b *bindings) say(binding *rbacv1.ClusterRoleBinding, reason, action, message string) {
	b.log.Info(message, "binding", binding.Name, "reason", reason, "audit", b.Audit)
	b.events.Eventf(binding, nil, corev1.EventTypeWarning, reason, action, "%s", telemetry.Message(message))
}
