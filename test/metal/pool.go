// SPDX-License-Identifier: Apache-2.0

package metal

import (
	"context"
	"fmt"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/labels/format"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal/infrav1"
)

// PoolFinalizer keeps a MetalMachinePool until its MetalMachines are gone.
const PoolFinalizer = "metalmachinepool.infrastructure.cluster.x-k8s.io"

// poolReconciler makes a MetalMachine for each replica of a MachinePool. Cluster API makes a
// Machine for each MetalMachine, and machineReconciler boots it. So instances of pools have EKs and
// finalizers as other Machines have.
type poolReconciler struct{ client client.Client }

// Reconcile is called for each change of a MetalMachinePool, its MachinePool, its MetalMachines, or
// its Cluster.
func (r *poolReconciler) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	p := &infrav1.MetalMachinePool{}
	if err := r.client.Get(ctx, request.NamespacedName, p); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	cluster, err := clusterOf(ctx, r.client, p)
	if cluster == nil || err != nil {
		return ctrl.Result{}, err
	}
	pool, err := util.GetOwnerMachinePool(ctx, r.client, p.ObjectMeta)
	if pool == nil || err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	labels := client.MatchingLabels{clusterv1.ClusterNameLabel: cluster.Name, clusterv1.MachinePoolNameLabel: format.MustFormatValue(pool.Name)}
	list := &infrav1.MetalMachineList{}
	if err := r.client.List(ctx, list, client.InNamespace(p.Namespace), labels); err != nil {
		return ctrl.Result{}, err
	}
	if !p.DeletionTimestamp.IsZero() {
		return ctrl.Result{}, r.delete(ctx, p, list.Items)
	}
	// Without bootstrap data there is nothing to boot with.
	if ptr.Deref(pool.Spec.Template.Spec.Bootstrap.DataSecretName, "") == "" || !ptr.Deref(cluster.Status.Initialization.InfrastructureProvisioned, false) {
		return ctrl.Result{}, nil
	}
	if err := patch(ctx, r.client, p, func() { controllerutil.AddFinalizer(p, PoolFinalizer) }); err != nil {
		return ctrl.Result{}, err
	}
	if err := r.scale(ctx, p, labels, int(ptr.Deref(pool.Spec.Replicas, 1)), list.Items); err != nil {
		return ctrl.Result{}, err
	}
	return ctrl.Result{}, client.IgnoreNotFound(r.report(ctx, p, list.Items))
}

// scale creates missing MetalMachines and deletes surplus ones. Names are numbered, so that a stale
// cache cannot make it create one twice.
func (r *poolReconciler) scale(ctx context.Context, p *infrav1.MetalMachinePool, labels map[string]string, replicas int, all []infrav1.MetalMachine) error {
	wanted := map[string]bool{}
	for i := range replicas {
		wanted[fmt.Sprintf("%s-%d", p.Name, i)] = true
	}
	for i := range all {
		if !wanted[all[i].Name] {
			if err := r.remove(ctx, &all[i]); err != nil {
				return err
			}
		}
		delete(wanted, all[i].Name)
	}
	for name := range wanted {
		m := &infrav1.MetalMachine{ObjectMeta: metav1.ObjectMeta{
			Name: name, Namespace: p.Namespace, Labels: labels,
			// Not a controller reference: Cluster API makes the Machine the controller.
			// clusterctl move follows both references.
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: infrav1.GroupVersion.String(), Kind: "MetalMachinePool", Name: p.Name, UID: p.UID,
			}},
		}}
		if err := r.client.Create(ctx, m); err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
	}
	return nil
}

// remove deletes the Machine of a MetalMachine, so that Cluster API drains the node before it
// deletes the MetalMachine. Without a Machine it deletes the MetalMachine itself.
func (r *poolReconciler) remove(ctx context.Context, m *infrav1.MetalMachine) error {
	if !m.DeletionTimestamp.IsZero() {
		return nil
	}
	machine, err := util.GetOwnerMachine(ctx, r.client, m.ObjectMeta)
	if client.IgnoreNotFound(err) != nil {
		return err
	}
	var object client.Object = m
	if machine != nil {
		object = machine
	}
	return client.IgnoreNotFound(r.client.Delete(ctx, object))
}

// report lists the pool's hosts in its spec. It takes them from the MetalMachines' specs, which
// clusterctl move keeps, and not from a status. Cluster API deletes the Nodes of hosts that are
// missing in the list.
func (r *poolReconciler) report(ctx context.Context, p *infrav1.MetalMachinePool, all []infrav1.MetalMachine) error {
	ids := []string{}
	for _, m := range all {
		if m.Spec.ProviderID != "" {
			ids = append(ids, m.Spec.ProviderID)
		}
	}
	slices.Sort(ids)
	if err := patch(ctx, r.client, p, func() { p.Spec.ProviderIDList = ids }); err != nil {
		return err
	}
	before := p.DeepCopy()
	p.Status = infrav1.MetalMachinePoolStatus{
		Ready: true, Initialization: infrav1.Initialization{Provisioned: ptr.To(true)},
		Replicas: int32(len(ids)), InfrastructureMachineKind: "MetalMachine", //nolint:gosec // as many as MetalMachines
	}
	return r.client.Status().Patch(ctx, p, client.MergeFrom(before))
}

// delete removes all hosts, then the pool's finalizer.
func (r *poolReconciler) delete(ctx context.Context, p *infrav1.MetalMachinePool, all []infrav1.MetalMachine) error {
	for i := range all {
		if err := r.remove(ctx, &all[i]); err != nil {
			return err
		}
	}
	if len(all) > 0 {
		return nil // each deletion calls Reconcile again
	}
	return client.IgnoreNotFound(patch(ctx, r.client, p, func() { controllerutil.RemoveFinalizer(p, PoolFinalizer) }))
}
