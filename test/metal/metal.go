// SPDX-License-Identifier: Apache-2.0

package metal

import (
	"context"
	"embed"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	clusterctlv1 "sigs.k8s.io/cluster-api/cmd/clusterctl/api/v1alpha3"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/annotations"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/contract"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal/controlplanev1"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal/infrav1"
)

// Options configure the provider.
type Options struct {
	// Hosts is the platform.
	Hosts Hosts
	// Signers are written into the status of each MetalCluster, for bootstrap providers. They may
	// be empty.
	Signers contract.Signers
}

// workers is how many objects of a kind are reconciled at once, since Hosts.Release may take long.
const workers = 10

// Add adds the provider's reconcilers to a manager, whose scheme has corev1, clusterv1 and
// AddToScheme.
func Add(ctx context.Context, m ctrl.Manager, o Options) error {
	if o.Hosts == nil {
		return errors.New("metal: no hosts")
	}
	c := m.GetClient()
	machineKind, poolKind := infrav1.GroupVersion.WithKind("MetalMachine"), infrav1.GroupVersion.WithKind("MetalMachinePool")
	// When a Cluster changes, for example is no longer paused, all of its objects are reconciled.
	ofCluster := func(list client.ObjectList) handler.MapFunc {
		mapper, err := util.ClusterToTypedObjectsMapper(c, list, m.GetScheme())
		if err != nil {
			panic(err) // the scheme does not have the kind
		}
		return mapper
	}
	build := func(name string, object client.Object, list client.ObjectList) *ctrl.Builder {
		return ctrl.NewControllerManagedBy(m).Named(name).For(object).
			// Tests have several managers in a process, one after the other or for two management
			// clusters.
			WithOptions(controller.Options{MaxConcurrentReconciles: workers, SkipNameValidation: ptr.To(true)}).
			Watches(&clusterv1.Cluster{}, handler.EnqueueRequestsFromMapFunc(ofCluster(list)))
	}
	return errors.Join(
		build("metalcluster", &infrav1.MetalCluster{}, &infrav1.MetalClusterList{}).
			Complete(&clusterReconciler{c, o.Signers}),
		build("hostedcontrolplane", &controlplanev1.HostedControlPlane{}, &controlplanev1.HostedControlPlaneList{}).
			Complete(&controlPlaneReconciler{c, m.GetAPIReader()}),
		build("metalmachine", &infrav1.MetalMachine{}, &infrav1.MetalMachineList{}).
			Watches(&clusterv1.Machine{}, handler.EnqueueRequestsFromMapFunc(util.MachineToInfrastructureMapFunc(machineKind))).
			Complete(&machineReconciler{c, m.GetAPIReader(), o.Hosts}),
		build("metalmachinepool", &infrav1.MetalMachinePool{}, &infrav1.MetalMachinePoolList{}).
			Watches(&clusterv1.MachinePool{}, handler.EnqueueRequestsFromMapFunc(util.MachinePoolToInfrastructureMapFunc(ctx, poolKind))).
			// their controller is the Machine
			Owns(&infrav1.MetalMachine{}, builder.MatchEveryOwner).
			Complete(&poolReconciler{c}),
	)
}

// clusterOf returns the Cluster of an object. It returns nil if the provider must not touch the
// object: the Cluster is not there, or the Cluster or the object is paused.
//
// clusterctl move depends on this. It deletes the objects that it has copied while their Cluster is
// paused, and their hosts must stay on. The Cluster may be gone before we reconcile, so an object
// without a Cluster is not touched, either. Cluster API itself never deletes a Cluster before its
// Machines, nor a Machine before its host.
func clusterOf(ctx context.Context, c client.Client, object client.Object) (*clusterv1.Cluster, error) {
	if _, moved := object.GetAnnotations()[clusterctlv1.DeleteForMoveAnnotation]; moved {
		return nil, nil
	}
	name := object.GetLabels()[clusterv1.ClusterNameLabel]
	if name == "" {
		return nil, nil // Cluster API has not set the label yet
	}
	cluster, err := util.GetClusterByName(ctx, c, object.GetNamespace(), name)
	if apierrors.IsNotFound(err) || (err == nil && annotations.IsPaused(cluster, object)) {
		return nil, nil
	}
	return cluster, err
}

// AddToScheme makes the provider's types known to a scheme.
func AddToScheme(scheme *runtime.Scheme) error {
	return errors.Join(infrav1.AddToScheme(scheme), controlplanev1.AddToScheme(scheme))
}

//go:embed crds/*.yaml
var crds embed.FS

// CRDs returns the provider's CustomResourceDefinitions. Their labels say that version v1beta1
// fulfils the contract v1beta2, and that clusterctl moves their objects.
func CRDs() ([]*apiextensionsv1.CustomResourceDefinition, error) {
	files, err := crds.ReadDir("crds")
	if err != nil {
		return nil, err
	}
	all := make([]*apiextensionsv1.CustomResourceDefinition, len(files))
	for i, file := range files {
		content, err := crds.ReadFile("crds/" + file.Name())
		if err != nil {
			return nil, err
		}
		all[i] = &apiextensionsv1.CustomResourceDefinition{}
		if err := yaml.UnmarshalStrict(content, all[i]); err != nil {
			return nil, fmt.Errorf("%s: %w", file.Name(), err)
		}
	}
	return all, nil
}

// secretValue reads a Secret's key "value" from the API server, since a cached Secret may have an
// old bootstrap token. It returns nil if the Secret is not there yet.
func secretValue(ctx context.Context, live client.Reader, namespace, name string) ([]byte, error) {
	secret := &corev1.Secret{}
	err := live.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, secret)
	return secret.Data["value"], client.IgnoreNotFound(err)
}

// patch stores a change of metadata and spec. It fails if somebody wrote the object after we read
// it, for example to pause or delete it.
func patch[T client.Object](ctx context.Context, c client.Client, object T, change func()) error {
	before := object.DeepCopyObject().(client.Object)
	change()
	if equality.Semantic.DeepEqual(before, object) {
		return nil
	}
	return c.Patch(ctx, object, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
}
