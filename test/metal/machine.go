// SPDX-License-Identifier: Apache-2.0

package metal

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal/infrav1"
)

const (
	// Finalizer keeps a MetalMachine until its host is off. Cluster API waits for the MetalMachine
	// before it deletes the Machine, and the record is deleted with the Machine. While the host is
	// on, its record must stay.
	Finalizer = "metalmachine.infrastructure.cluster.x-k8s.io"
	// providerIDScheme begins each provider ID. The rest is the host's ID, which is also
	// cloud-init's instance ID: the plugin's providerID is metal://{{ ds.meta_data.instance_id }}.
	providerIDScheme = "metal://"
)

// machineReconciler boots a host for each Machine. It first stores which host and which TPM that
// is, then powers the host on. Each step is stored before the next one, and can be repeated after a
// crash.
type machineReconciler struct {
	client client.Client
	live   client.Reader
	hosts  Hosts
}

// Reconcile is called for each change of a MetalMachine, its Machine, or its Cluster.
func (r *machineReconciler) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	m := &infrav1.MetalMachine{}
	if err := r.client.Get(ctx, request.NamespacedName, m); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	cluster, err := clusterOf(ctx, r.client, m)
	if cluster == nil || err != nil {
		return ctrl.Result{}, err
	}
	if !m.DeletionTimestamp.IsZero() {
		return ctrl.Result{}, r.delete(ctx, m)
	}
	if ptr.Deref(m.Status.Initialization.Provisioned, false) {
		// A Machine never changes. What goes wrong from now on is for a MachineHealthCheck.
		return ctrl.Result{}, nil
	}
	// 1. Wait for what a host needs to boot.
	machine, err := util.GetOwnerMachine(ctx, r.client, m.ObjectMeta)
	if machine == nil || err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if !ptr.Deref(cluster.Status.Initialization.InfrastructureProvisioned, false) {
		return ctrl.Result{}, nil
	}
	userData, err := r.userData(ctx, machine)
	if userData == nil || err != nil {
		return ctrl.Result{}, err
	}
	// 2. The finalizer comes before anything that has to be undone.
	if err := patch(ctx, r.client, m, func() { controllerutil.AddFinalizer(m, Finalizer) }); err != nil {
		return ctrl.Result{}, err
	}
	// 3. Store which host and which TPM it is, before the host can ask for a certificate.
	if err := r.identify(ctx, m); err != nil {
		return ctrl.Result{}, err
	}
	// 4. Boot. The Node gets the Machine's name. Its provider ID comes from cloud-init's instance
	// ID. After clusterctl move the status is lost but the host is on: PowerOn does nothing then.
	id := strings.TrimPrefix(m.Spec.ProviderID, providerIDScheme)
	if err := r.hosts.PowerOn(ctx, id, Metadata{InstanceID: id, LocalHostname: machine.Name}, userData); err != nil {
		return ctrl.Result{}, fmt.Errorf("power on %s: %w", id, err)
	}
	// 5. Once this is stored, Cluster API copies provider ID and addresses to the Machine. There
	// node-attestation-controller reads them.
	before := m.DeepCopy()
	m.Status = infrav1.MetalMachineStatus{
		Initialization: infrav1.Initialization{Provisioned: ptr.To(true)},
		Addresses:      m.Spec.Addresses,
		FailureDomain:  machine.Spec.FailureDomain,
	}
	return ctrl.Result{}, client.IgnoreNotFound(r.client.Status().Patch(ctx, m, client.MergeFrom(before)))
}

// identify allocates a host, and stores its ID, addresses and EKs in the MetalMachine. The EKs must
// come from the platform: the TPM with an EK in the annotation gets the Machine's certificate.
//
// A host is allocated once, by the UID. clusterctl move gives the MetalMachine another UID, but
// keeps spec and annotations. So a provider ID in the spec means that there is a host already.
func (r *machineReconciler) identify(ctx context.Context, m *infrav1.MetalMachine) error {
	if m.Spec.ProviderID != "" {
		return nil
	}
	host, err := r.hosts.Allocate(ctx, m.UID, m.Name)
	if err != nil {
		return fmt.Errorf("allocate a host: %w", err)
	}
	if host.ID == "" || len(host.EKs) == 0 {
		return errors.New("allocate a host: the platform names no ID or no EK")
	}
	eks := make([]string, len(host.EKs))
	for i, ek := range host.EKs {
		eks[i] = "sha256:" + ek
	}
	return patch(ctx, r.client, m, func() {
		m.Spec.ProviderID = providerIDScheme + host.ID
		m.Spec.Addresses = host.Addresses
		if m.Annotations == nil {
			m.Annotations = map[string]string{}
		}
		m.Annotations[attestation.AnnotationEK] = strings.Join(eks, ",")
	})
}

// delete powers the host off and wipes its disk, which has keys. Then it removes the finalizer. A
// MetalMachine without a provider ID has no host that is on. A crash between Allocate and the patch
// can leave a host allocated for a MetalMachine that is deleted later. The platform has to find
// hosts whose owner no longer exists.
func (r *machineReconciler) delete(ctx context.Context, m *infrav1.MetalMachine) error {
	if !controllerutil.ContainsFinalizer(m, Finalizer) {
		return nil
	}
	if id := strings.TrimPrefix(m.Spec.ProviderID, providerIDScheme); id != "" {
		if err := r.hosts.Release(ctx, id); err != nil {
			return fmt.Errorf("release %s: %w", id, err)
		}
	}
	return client.IgnoreNotFound(patch(ctx, r.client, m, func() { controllerutil.RemoveFinalizer(m, Finalizer) }))
}

// userData returns a Machine's bootstrap data, nil if the bootstrap provider has not made it yet.
// Machines of a MachinePool share one Secret. Its bootstrap token is rotated: a host that boots
// later gets the new token.
func (r *machineReconciler) userData(ctx context.Context, machine *clusterv1.Machine) ([]byte, error) {
	name := machine.Spec.Bootstrap.DataSecretName
	if _, ok := machine.Labels[clusterv1.MachinePoolNameLabel]; ok {
		pool, err := util.GetMachinePoolByLabels(ctx, r.client, machine.Namespace, machine.Labels)
		if pool == nil || err != nil {
			return nil, err
		}
		name = pool.Spec.Template.Spec.Bootstrap.DataSecretName
	}
	if ptr.Deref(name, "") == "" {
		return nil, nil
	}
	data, err := secretValue(ctx, r.live, machine.Namespace, *name)
	if err == nil && data == nil {
		err = fmt.Errorf("the bootstrap Secret %s is missing or empty", *name) // tried again
	}
	return data, err
}
