// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	bootstrapv1 "sigs.k8s.io/cluster-api/api/bootstrap/kubeadm/v1beta2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/controllers/clustercache"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	runtimecontroller "sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/preflight"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/sources"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

const (
	// maxConcurrentConnections limits how many connection attempts to workload clusters run at a
	// time. One to a cluster that does not answer takes long.
	maxConcurrentConnections = 100
	// inventoryAge is how stale the inventory may be. While it is read again, it may be two seconds
	// older.
	inventoryAge = 500 * time.Millisecond
	// managementName is the management cluster's name in metrics. Names of workload clusters have a
	// slash.
	managementName = "management"
)

// Management serves the workload clusters of a management cluster. The zero value is ready to use.
type Management struct {
	// Platforms are the platforms that clusterAPI.platform can select, by name. Optional.
	Platforms map[string]OpenPlatform
	// PlatformInterval is how often the platform is asked. Default: 30 s.
	PlatformInterval time.Duration
}

// OpenPlatform returns a platform's API. It is called once, at the start, for the platform of the
// configuration. It must not wait for the platform. The manager is that of the management cluster.
// An error ends the program with the exit code of a wrong configuration.
type OpenPlatform func(ctx context.Context, mgr manager.Manager) (EKTrust, error)

// Scheme returns a scheme with the kinds that are used.
func (Management) Scheme() (*runtime.Scheme, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		admissionv1.AddToScheme, authenticationv1.AddToScheme, certificatesv1.AddToScheme, corev1.AddToScheme, rbacv1.AddToScheme, v1alpha1.AddToScheme,
		clusterv1.AddToScheme, bootstrapv1.AddToScheme,
	} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	return scheme, nil
}

// Check returns an error that names the field if this program does not know the platform of the
// settings.
func (m Management) Check(settings *config.Settings) error {
	name := settings.Config().ClusterAPI.Platform
	if _, known := m.Platforms[name]; known || name == "" {
		return nil
	}
	names := slices.Sorted(maps.Keys(m.Platforms))
	return fmt.Errorf("clusterAPI.platform: this program does not know %.64q, but %s%s", name, cmp.Or(strings.Join(names, ", "), "no platform"), text.DidYouMean(name, "", names))
}

// CacheOptions returns the options for the manager's cache. It caches no other namespaces, and no
// secrets of bootstrap data.
func (Management) CacheOptions(settings *config.Settings) cache.Options {
	options := cache.Options{
		DefaultTransform: cache.TransformStripManagedFields(),
		ByObject:         map[client.Object]cache.ByObject{&bootstrapv1.KubeadmConfig{}: {Transform: stripKubeadmConfig}},
	}
	for _, namespace := range settings.Config().ClusterAPI.Namespaces {
		if options.DefaultNamespaces == nil {
			options.DefaultNamespaces = map[string]cache.Config{}
		}
		options.DefaultNamespaces[namespace] = cache.Config{}
	}
	return options
}

// Add adds the reconciler of Clusters to a manager with this Scheme and these CacheOptions.
// userAgent has the program's version.
func (m Management) Add(ctx context.Context, mgr manager.Manager, settings *config.Settings, userAgent string) error {
	if err := m.Check(settings); err != nil {
		return err
	}
	c := settings.Config()
	live, err := client.New(mgr.GetConfig(), client.Options{Scheme: mgr.GetScheme(), Mapper: mgr.GetRESTMapper(), HTTPClient: mgr.GetHTTPClient()})
	if err != nil {
		return err
	}
	clusters := &clusterReconciler{
		engineDeps: engineDeps{settings: settings, management: mgr.GetConfig(), cached: mgr.GetClient(), live: live, events: telemetry.NewDedupRecorder(mgr.GetEventRecorder(controller.Name))},
		log:        mgr.GetLogger().WithName("clusters"),
		engines:    map[types.NamespacedName]*engine{},
	}
	if clusters.decisionMetrics, err = telemetry.NewMetrics(); err != nil {
		return err
	}
	if clusters.clusterMetrics, err = telemetry.NewClusterMetrics(); err != nil {
		return err
	}
	if err := clusters.addPolicies(mgr); err != nil {
		return err
	}
	if err := m.addSources(ctx, mgr, &clusters.engineDeps); err != nil {
		return err
	}
	clusters.connections, err = clustercache.SetupWithManager(ctrl.LoggerInto(ctx, mgr.GetLogger()), mgr, clustercache.Options{
		SecretClient:     impersonatingReader{live, c.ClusterAPI.User},
		WatchFilterValue: c.ClusterAPI.WatchFilter,
		ClusterFilter:    initialized,
		// no rate limit of the client: the API server has priority and fairness
		Client: clustercache.ClientOptions{UserAgent: userAgent, QPS: -1, Burst: 1},
	}, runtimecontroller.Options{MaxConcurrentReconciles: maxConcurrentConnections, UsePriorityQueue: new(false)})
	if err != nil {
		return fmt.Errorf("connections to workload clusters: %w", err)
	}
	if err := mgr.Add(clusters); err != nil {
		return err
	}
	if err := fillCache(ctx, mgr.GetCache()); err != nil {
		return err
	}
	return clusters.watch(mgr)
}

// addPolicies watches the management cluster's own admission policies. Without them, enforcement
// starts for no cluster.
func (c *clusterReconciler) addPolicies(mgr manager.Manager) error {
	c.policies = c.settings.ManagementPolicyCheck(c.live, mgr.GetConfig())
	_, err := preflight.AddPolicyWatch(mgr, c.settings.PolicyWatch(c.policies, c.clusterMetrics.For(managementName)))
	return err
}

// initialized reports whether there are an API server to connect to, and a kubeconfig. A failed
// connection is tried again after 30 s only, and no node that may attest joins earlier.
func initialized(cluster *clusterv1.Cluster) bool {
	return isTrue(cluster.Status.Initialization.ControlPlaneInitialized)
}

// fillCache starts the informers on replicas that do not lead, too, so that a new leader has a
// filled cache.
func fillCache(ctx context.Context, informers cache.Cache) error {
	for _, object := range []client.Object{&clusterv1.Cluster{}, &clusterv1.Machine{}, &clusterv1.MachinePool{}, &bootstrapv1.KubeadmConfig{}} {
		_, err := informers.GetInformer(ctx, object, cache.BlockUntilSynced(false))
		// another bootstrap provider's management cluster has no KubeadmConfigs
		if meta.IsNoMatchError(err) {
			err = nil
		}
		if err != nil {
			return fmt.Errorf("cache: %T: %w", object, err)
		}
	}
	return nil
}

// addSources adds the sources of endorsement keys.
func (m Management) addSources(ctx context.Context, mgr manager.Manager, to *engineDeps) error {
	c := to.settings.Config()
	if slices.Contains(c.ClusterAPI.EKSources, verifier.EKAnnotation) {
		to.infra = newInfraAnnotations(to.live, mgr.GetRESTMapper())
	}
	if slices.Contains(c.ClusterAPI.EKSources, verifier.EKInventory) {
		to.inventory = sources.NewFileInventory(c.Inventory.Paths(), inventoryAge)
	}
	if c.ClusterAPI.Platform == "" {
		return nil
	}
	trust, err := m.Platforms[c.ClusterAPI.Platform](ctx, mgr)
	if err != nil {
		return cli.Fail(cli.CodeConfiguration, "see docs/platforms.md for what the platform needs", fmt.Errorf("clusterAPI.platform: %s: %w", c.ClusterAPI.Platform, err))
	}
	to.platform = newPlatformPoller(trust, m.PlatformInterval)
	return mgr.Add(to.platform)
}
