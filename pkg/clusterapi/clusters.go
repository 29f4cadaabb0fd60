// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/util/workqueue"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/controllers/clustercache"
	"sigs.k8s.io/cluster-api/util/annotations"
	"sigs.k8s.io/cluster-api/util/labels"
	"sigs.k8s.io/cluster-api/util/secret"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	runtimecontroller "sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
)

// annotationUnattestedNodes is on a Cluster, with the names of its unattested nodes, separated by
// commas.
const annotationUnattestedNodes = "attestation.cluster.x-k8s.io/unattested-nodes"

const (
	// maxConcurrentPlans is how many Clusters are reconciled at a time.
	maxConcurrentPlans = 10
	// planInterval is how often a Cluster is reconciled without an event. No event says whether its
	// CA has a key.
	planInterval = time.Minute
	// planRetry is the longest back-off after an error.
	planRetry = 10 * time.Second
	// maxUnattested limits the unattested nodes of a cluster.
	maxUnattested = 1000
)

// clusterReconciler runs an engine for each Cluster that is served. It runs on the leader.
type clusterReconciler struct {
	engineDeps
	connections clustercache.ClusterCache
	log         logr.Logger

	mu      sync.Mutex
	engines map[types.NamespacedName]*engine
	// engineContext is the context of engines. It is nil before Start and after it.
	engineContext context.Context //nolint:containedctx // engines outlive the call that starts them
}

// clusterChanged drops the events of a Cluster whose spec, labels and annotations have not changed:
// no plan depends on its other fields. Cluster API writes its status several times for each Machine
// of a rollout, and each plan reads two Secrets.
var clusterChanged = predicate.Or[client.Object](
	predicate.GenerationChangedPredicate{}, predicate.LabelChangedPredicate{}, predicate.AnnotationChangedPredicate{},
)

// watch adds the reconciler to a manager.
func (c *clusterReconciler) watch(mgr manager.Manager) error {
	itself := func(_ context.Context, cluster client.Object) []ctrl.Request {
		return []ctrl.Request{{NamespacedName: client.ObjectKeyFromObject(cluster)}}
	}
	b := ctrl.NewControllerManagedBy(mgr).Named(controller.Name+"-clusters").
		For(&clusterv1.Cluster{}, builder.WithPredicates(clusterChanged)).
		// once it is connected, and once it no longer is
		WatchesRawSource(c.connections.GetClusterSource(controller.Name, itself)).
		WithOptions(runtimecontroller.Options{
			MaxConcurrentReconciles: maxConcurrentPlans,
			UsePriorityQueue:        new(false), // as in pkg/controller/bindings
			// The cause of a failure may be fixed in a Secret, for which there is no event. So the
			// back-off stays short.
			RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[ctrl.Request](50*time.Millisecond, planRetry),
		})
	if c.settings.Config().ClusterAPI.UnattestedControlPlanes {
		b = b.Watches(&clusterv1.Machine{}, handler.EnqueueRequestsFromMapFunc(clusterOfControlPlane))
	}
	return b.Complete(c)
}

// clusterOfControlPlane returns the Cluster of a control plane Machine.
func clusterOfControlPlane(_ context.Context, object client.Object) []ctrl.Request {
	machine, ok := object.(*clusterv1.Machine)
	if _, controlPlane := object.GetLabels()[clusterv1.MachineControlPlaneLabel]; !ok || !controlPlane {
		return nil
	}
	return []ctrl.Request{{NamespacedName: types.NamespacedName{Namespace: machine.Namespace, Name: machine.Spec.ClusterName}}}
}

// Start lets engines run until ctx ends, and returns once all have ended.
func (c *clusterReconciler) Start(ctx context.Context) error {
	c.mu.Lock()
	c.engineContext = ctx
	c.mu.Unlock()
	<-ctx.Done()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.engineContext = nil
	for _, e := range c.engines { // their contexts have ended
		<-e.done
	}
	c.engines = nil
	return nil
}

var (
	errNotStarted = errors.New("engines have not been started, or are shutting down")
	errNotEnded   = errors.New("the engine that served the cluster has not ended yet")
)

// Reconcile gives a Cluster the engine that it needs. It waits for nothing in the workload cluster.
func (c *clusterReconciler) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	cluster := &clusterv1.Cluster{}
	if err := c.cached.Get(ctx, request.NamespacedName, cluster); client.IgnoreNotFound(err) != nil {
		return ctrl.Result{}, err
	} else if err != nil {
		c.decisionMetrics.For(request.String()).Forget()
		return ctrl.Result{}, c.ensureEngine(request.NamespacedName, nil)
	} else if !c.isServed(cluster) {
		return ctrl.Result{}, c.ensureEngine(request.NamespacedName, nil)
	}
	p, err := c.planFor(ctx, cluster)
	if errors.Is(err, clustercache.ErrClusterNotConnected) {
		// reconciled again once the cluster is connected
		return ctrl.Result{}, c.ensureEngine(request.NamespacedName, nil)
	}
	if err != nil {
		return ctrl.Result{}, err // a running engine keeps its plan
	}
	return ctrl.Result{RequeueAfter: planInterval}, c.ensureEngine(request.NamespacedName, p)
}

// isServed reports whether a Cluster is one to serve.
func (c *clusterReconciler) isServed(cluster *clusterv1.Cluster) bool {
	filter := c.settings.Config().ClusterAPI.WatchFilter
	return (filter == "" || labels.HasWatchLabel(cluster, filter)) && !annotations.IsPaused(cluster, cluster)
}

// enginePlan returns what the cluster's engine has to be made of.
func (c *clusterReconciler) planFor(ctx context.Context, cluster *clusterv1.Cluster) (*enginePlan, error) {
	key := client.ObjectKeyFromObject(cluster)
	connection, err := c.connections.GetRESTConfig(ctx, key)
	if err != nil {
		return nil, err
	}
	p := &enginePlan{connection: connection}
	// A copy with the immutable parts of the object.
	p.cluster = &clusterv1.Cluster{}
	p.cluster.SetGroupVersionKind(clusterv1.GroupVersion.WithKind("Cluster"))
	p.cluster.Namespace, p.cluster.Name, p.cluster.UID = cluster.Namespace, cluster.Name, cluster.UID
	p.cluster.CreationTimestamp = cluster.CreationTimestamp
	if p.uid, err = loadClusterUID(ctx, c.live, cluster); err != nil {
		return nil, err
	}
	if p.approveOnly, err = c.approvesOnly(ctx, key); err != nil {
		return nil, err
	}
	if p.unattestedNodes, err = c.unattestedNodes(ctx, cluster); err != nil {
		return nil, err
	}
	if len(c.settings.Config().Serving.Signers) > 0 {
		if p.forbiddenAddresses, err = forbiddenAddresses(cluster); err != nil {
			c.events.Eventf(cluster, nil, corev1.EventTypeWarning, "AddressesInvalid", "Plan", "%s", err.Error())
			return nil, err
		}
	}
	return p, nil
}

// equal reports whether an engine of p is also an engine of other.
func (p *enginePlan) equal(other *enginePlan) bool {
	return p.connection == other.connection && p.uid == other.uid && p.cluster.UID == other.cluster.UID && p.approveOnly == other.approveOnly &&
		reflect.DeepEqual(p.unattestedNodes, other.unattestedNodes) && reflect.DeepEqual(p.forbiddenAddresses, other.forbiddenAddresses)
}

// ensureEngine makes sure that the cluster's engine is one of the plan, or that there is none if p
// is nil. One worker at a time reconciles a Cluster.
func (c *clusterReconciler) ensureEngine(key types.NamespacedName, p *enginePlan) error {
	c.mu.Lock()
	old := c.engines[key]
	if old != nil && p != nil && !old.stopping && old.plan.equal(p) || old == nil && p == nil {
		c.mu.Unlock()
		return nil
	}
	if old != nil {
		old.stopping = true
	}
	c.mu.Unlock()
	log := c.log.WithValues("cluster", key)
	if old != nil {
		if !old.stop() {
			return errNotEnded
		}
		log.Info("the cluster is no longer served as it was")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.engines, key)
	if p == nil {
		return nil
	}
	if c.engineContext == nil {
		return errNotStarted
	}
	c.engines[key] = startEngine(c.engineContext, c.engineDeps, *p, log)
	return nil
}

func caSecret(cluster types.NamespacedName) types.NamespacedName {
	return types.NamespacedName{Namespace: cluster.Namespace, Name: secret.Name(cluster.Name, secret.ClusterCA)}
}

// approvesOnly reports whether another signer issues: by the configuration, or because the
// cluster's CA key is kept elsewhere. While there is no CA at all, the engine waits for one.
func (c *clusterReconciler) approvesOnly(ctx context.Context, cluster types.NamespacedName) (bool, error) {
	if c.settings.Config().Signing.Mode != config.Sign {
		return true, nil
	}
	ca := &corev1.Secret{}
	if err := c.live.Get(ctx, caSecret(cluster), ca); client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("secret %s: %w", caSecret(cluster), err)
	}
	return len(ca.Data[secret.TLSCrtDataName]) > 0 && len(ca.Data[secret.TLSKeyDataName]) == 0, nil
}

// unattestedNodes returns the unattested nodes: those in the Cluster's annotation, and those of its
// control plane Machines if the configuration says so. An Event reports entries that are not node
// names, and they are left out.
func (c *clusterReconciler) unattestedNodes(ctx context.Context, cluster *clusterv1.Cluster) ([]string, error) {
	var names []string
	for name := range strings.SplitSeq(cluster.Annotations[annotationUnattestedNodes], ",") {
		if name = strings.TrimSpace(name); name != "" {
			names = append(names, name)
		}
	}
	if c.settings.Config().ClusterAPI.UnattestedControlPlanes {
		list := &clusterv1.MachineList{}
		if err := c.cached.List(ctx, list, client.InNamespace(cluster.Namespace), client.HasLabels{clusterv1.MachineControlPlaneLabel}); err != nil {
			return nil, fmt.Errorf("control plane machines: %w", err)
		}
		for i := range list.Items {
			if list.Items[i].Spec.ClusterName == cluster.Name {
				names = append(names, entryOf(&list.Items[i]).machine.NodeNames(c.settings.Config().ClusterAPI.NodeNames)...)
			}
		}
	}
	slices.Sort(names)
	names = slices.Compact(names)
	valid := slices.DeleteFunc(slices.Clone(names), func(name string) bool { return len(validation.IsDNS1123Subdomain(name)) > 0 })
	valid = valid[:min(len(valid), maxUnattested)]
	if left := len(names) - len(valid); left > 0 {
		c.events.Eventf(cluster, nil, corev1.EventTypeWarning, "UnattestedNodesInvalid", "Plan",
			"annotation %s: %d entries are no node's name, or more than %d, and are left out", annotationUnattestedNodes, left, maxUnattested)
	}
	return valid, nil
}

// kubeadmServices is kubeadm's default service range.
const kubeadmServices = "10.96.0.0/12"

// forbiddenAddresses returns what no node of the cluster serves under: services, and the API
// server's endpoint. An entry that cannot be parsed is an error. Otherwise it would be allowed.
func forbiddenAddresses(cluster *clusterv1.Cluster) ([]string, error) {
	addresses := slices.Clone(cluster.Spec.ClusterNetwork.Services.CIDRBlocks)
	if len(addresses) == 0 {
		addresses = []string{kubeadmServices}
	}
	for _, block := range addresses {
		if _, err := netip.ParsePrefix(block); err != nil {
			return nil, fmt.Errorf("cluster %s: clusterNetwork.services: %.64q is not a CIDR", cluster.Name, block)
		}
	}
	host := strings.TrimSuffix(strings.ToLower(cluster.Spec.ControlPlaneEndpoint.Host), ".")
	if host == "" {
		return addresses, nil
	}
	if _, err := netip.ParseAddr(host); err != nil && len(validation.IsDNS1123Subdomain(host)) > 0 {
		return nil, fmt.Errorf("cluster %s: controlPlaneEndpoint.host: %.253q is neither an IP nor a DNS name", cluster.Name, host)
	}
	return append(addresses, host), nil
}
