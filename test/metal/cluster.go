// SPDX-License-Identifier: Apache-2.0

package metal

import (
	"context"
	"time"

	"k8s.io/utils/ptr"
	"sigs.k8s.io/cluster-api/util/secret"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/contract"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal/controlplanev1"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal/infrav1"
)

// clusterReconciler sets a MetalCluster's status: provisioned, and the signers of the nodes'
// certificates.
type clusterReconciler struct {
	client  client.Client
	signers contract.Signers
}

// Reconcile is called for each change of a MetalCluster or its Cluster. A deletion has nothing to
// undo, so there is no finalizer.
func (r *clusterReconciler) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	m := &infrav1.MetalCluster{}
	if err := r.client.Get(ctx, request.NamespacedName, m); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	cluster, err := clusterOf(ctx, r.client, m)
	if cluster == nil || err != nil || !m.DeletionTimestamp.IsZero() {
		return ctrl.Result{}, err
	}
	if !ptr.Deref(m.Status.Initialization.Provisioned, false) {
		before := m.DeepCopy()
		m.Status.Initialization.Provisioned = ptr.To(true)
		if err := r.client.Status().Patch(ctx, m, client.MergeFrom(before)); err != nil {
			return ctrl.Result{}, client.IgnoreNotFound(err)
		}
	}
	return ctrl.Result{}, contract.SetSigners(ctx, r.client, m, r.signers)
}

// controlPlaneReconciler sets a control plane to initialized once its kubeconfig's Secret is there.
type controlPlaneReconciler struct {
	client client.Client
	live   client.Reader
}

// kubeconfigWait is the time between two reads of the kubeconfig's Secret.
const kubeconfigWait = time.Second

// Reconcile is called for each change of a HostedControlPlane or its Cluster.
func (r *controlPlaneReconciler) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	h := &controlplanev1.HostedControlPlane{}
	if err := r.client.Get(ctx, request.NamespacedName, h); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	cluster, err := clusterOf(ctx, r.client, h)
	if cluster == nil || err != nil || !h.DeletionTimestamp.IsZero() {
		return ctrl.Result{}, err
	}
	kubeconfig, err := secretValue(ctx, r.live, cluster.Namespace, secret.Name(cluster.Name, secret.Kubeconfig))
	if err != nil {
		return ctrl.Result{}, err
	}
	before := h.DeepCopy()
	h.Status.ExternalManagedControlPlane = ptr.To(true)
	h.Status.Version = h.Spec.Version
	if len(kubeconfig) > 0 {
		h.Status.Initialization.ControlPlaneInitialized = ptr.To(true)
	}
	if err := r.client.Status().Patch(ctx, h, client.MergeFrom(before)); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if len(kubeconfig) == 0 {
		return ctrl.Result{RequeueAfter: kubeconfigWait}, nil
	}
	return ctrl.Result{}, nil
}
