// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	bootstrapv1 "sigs.k8s.io/cluster-api/api/bootstrap/kubeadm/v1beta2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal/nspawn"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// bed is the test bed that all stories share: a management cluster with Cluster API, the provider
// Metal, and packaging/cluster-api/management.
type bed struct {
	*testbed.ControlPlane
	clusterAPI *testbed.ClusterAPI
	client     client.Client
	hosts      *platform

	stopMetal func() error
}

var shared *bed

func newBed(ctx context.Context) (_ *bed, err error) {
	b := &bed{}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.stop())
		}
	}()
	image, err := nspawn.Bake(ctx, built.node)
	if err != nil {
		return nil, err
	}
	if b.ControlPlane, err = testbed.Start(ctx, testbed.Options{Progress: os.Stderr, AuditPolicy: []byte(managementAudit)}); err != nil {
		return nil, err
	}
	if b.hosts, err = newPlatform(image, b.KubernetesVersion()); err != nil {
		return nil, err
	}
	if err := b.start(ctx); err != nil {
		return nil, err
	}
	return b, install(ctx, b.ControlPlane, "management")
}

// start installs Cluster API and the provider Metal, but not node attestation.
func (b *bed) start(ctx context.Context) (err error) {
	if b.clusterAPI, err = testbed.StartClusterAPI(ctx, b.ControlPlane, testbed.ClusterAPIOptions{Components: &built.clusterAPI}); err != nil {
		return err
	}
	if b.client, err = client.New(b.AdminConfig(), client.Options{Scheme: scheme()}); err != nil {
		return err
	}
	if err := b.installMetal(ctx); err != nil {
		return err
	}
	b.stopMetal, err = b.startMetal(ctx)
	return err
}

// stop ends the machines before the API servers that they use.
func (b *bed) stop() error {
	var errs []error
	if b.stopMetal != nil {
		errs = append(errs, b.stopMetal())
	}
	if b.hosts != nil {
		errs = append(errs, b.hosts.Close())
	}
	if b.clusterAPI != nil {
		errs = append(errs, b.clusterAPI.Stop())
	}
	if b.ControlPlane != nil {
		errs = append(errs, b.Stop())
	}
	return errors.Join(errs...)
}

func scheme() *runtime.Scheme {
	all := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		clientgoscheme.AddToScheme, v1alpha1.AddToScheme, clusterv1.AddToScheme, bootstrapv1.AddToScheme, apiextensionsv1.AddToScheme, metal.AddToScheme,
	} {
		if err := add(all); err != nil {
			panic(err) // two Go types for one kind
		}
	}
	return all
}

// install creates the objects of a kustomization in packaging/cluster-api.
func install(ctx context.Context, cp *testbed.ControlPlane, kustomization string) error {
	objects, err := cp.Kustomize(ctx, filepath.Join(module, "packaging", "cluster-api", kustomization))
	if err != nil {
		return err
	}
	return cp.CreateObjects(ctx, objects)
}

// managementAudit logs all requests of our controller.
const managementAudit = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: Metadata, userGroups: ["system:serviceaccounts:node-attestation-system"]}
- {level: None}
`

// metalRights are the rights that a provider gives to Cluster API's managers. The kubeadm bootstrap
// provider's own ClusterRole covers the kind KubeadmControlPlane alone.
const metalRights = `
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: metal-aggregated
  labels: {cluster.x-k8s.io/aggregate-to-manager: "true"}
rules:
- apiGroups: [infrastructure.cluster.x-k8s.io, controlplane.cluster.x-k8s.io]
  resources: ["*"]
  verbs: [create, delete, get, list, patch, update, watch]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: metal-control-planes}
rules:
- {apiGroups: [controlplane.cluster.x-k8s.io], resources: [hostedcontrolplanes], verbs: [get, list, watch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: metal-control-planes}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: metal-control-planes}
subjects: [{kind: ServiceAccount, name: capi-kubeadm-bootstrap-manager, namespace: capi-kubeadm-bootstrap-system}]
`

func (b *bed) installMetal(ctx context.Context) error {
	crds, err := metal.CRDs()
	if err != nil {
		return err
	}
	rights, err := testbed.ReadObjects([]byte(metalRights))
	if err != nil {
		return err
	}
	return errors.Join(b.InstallCRDs(ctx, crds...), b.CreateObjects(ctx, rights))
}

// startMetal runs the provider in this process. The function that it returns stops the provider.
func (b *bed) startMetal(ctx context.Context) (stop func() error, err error) {
	manager, err := ctrl.NewManager(b.AdminConfig(), ctrl.Options{Scheme: scheme(), Metrics: server.Options{BindAddress: "0"}})
	if err != nil {
		return nil, err
	}
	if err := metal.Add(ctx, manager, metal.Options{Hosts: b.hosts}); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- manager.Start(ctx) }()
	return func() error {
		cancel()
		return <-ended
	}, nil
}
