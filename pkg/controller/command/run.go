// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"crypto/fips140"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/decisionlog"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/intake"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/preflight"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/sources"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

// shutdownTimeout bounds the time for pending work to end. It is less than a pod's grace period.
const shutdownTimeout = 20 * time.Second

// run runs the controller.
func (i *invocation) run(cmd *cobra.Command, _ []string) error {
	if fips140.Enforced() {
		// crypto/cipher would panic at the first hello, and again after each restart.
		return cli.Fail(codeFIPS, "run it with GODEBUG=fips140=on: that uses Go's FIPS 140-3 module, and forbids nothing",
			errors.New("GODEBUG=fips140=only forbids AES-CFB, which TPM 2.0 prescribes for TPM2_MakeCredential"))

	}
	settings, err := i.settings()
	if err != nil {
		return err
	}
	api, err := i.apiConfig(i.kubeconfig)
	if err != nil {
		return cli.Fail(CodeConfiguration, "name an existing kubeconfig with --kubeconfig, or run it in a pod", err)
	}
	logger := klog.Background()
	ctrl.SetLogger(logger)
	if err := telemetry.RegisterBuildInfo(i.Version, i.Commit); err != nil {
		return err
	}
	decisions, err := i.openDecisionLog(settings, logger)
	if err != nil {
		return err
	}
	lookups, err := telemetry.NewLookupMetrics()
	if err != nil {
		return err
	}
	if err := settings.CountLookups(lookups); err != nil {
		return err
	}
	defer decisions.Close() // the manager has stopped by then, so no decision follows
	if settings.Config().ClusterAPI != nil {
		return i.manage(cmd.Context(), api, settings, logger)
	}
	gate, err := newPreflight(api, settings, logger)
	if err != nil {
		return err
	}
	if err := open(cmd.Context(), gate); err != nil || cmd.Context().Err() != nil {
		return err
	}
	lock, err := i.lock(api, settings.Config())
	if err != nil {
		return err
	}
	m, err := i.newManager(cmd.Context(), api, settings, gate, lock, logger)
	if err != nil {
		return err
	}
	logger.Info("starting", "version", i.Version, "commit", i.Commit, "config", i.file, "cluster", settings.Config().ClusterUID, "audit", settings.Config().Audit)
	return m.Start(cmd.Context())
}

// openDecisionLog opens the decision log of the configuration.
func (i *invocation) openDecisionLog(settings *config.Settings, logger klog.Logger) (*decisionlog.Log, error) {
	metrics, err := telemetry.NewDecisionLogMetrics()
	if err != nil {
		return nil, err
	}
	identity := i.leaderIdentity
	if identity == "" {
		if identity, err = os.Hostname(); err != nil {
			return nil, err
		}
	}
	process := decisionlog.Controller{Version: i.Version, Commit: i.Commit, Identity: identity}
	return settings.OpenDecisionLog(process, logger.WithName("decisions"), metrics), nil
}

// newPreflight makes the Preflight with a client of its own. A manager's client fails at once while
// the API server does not answer.
func newPreflight(api *rest.Config, settings *config.Settings, logger klog.Logger) (*preflight.Preflight, error) {
	scheme, err := newScheme()
	if err != nil {
		return nil, err
	}
	live, err := client.New(api, client.Options{Scheme: scheme})
	if err != nil {
		return nil, err
	}
	metrics, err := telemetry.NewClusterMetrics()
	if err != nil {
		return nil, err
	}
	return settings.Preflight(settings.Keys(live, live), live, metrics.For(settings.Config().ClusterUID), logger.WithName("preflight"), settings.PolicyCheck(live, api)), nil
}

// open checks whether enforcement may start. The end of ctx is not an error.
func open(ctx context.Context, gate *preflight.Preflight) error {
	err := gate.Await(ctx)
	if refused, ok := errors.AsType[*preflight.Error](err); ok {
		return cli.Fail(CodeConfiguration, refused.Hint, err)
	}
	if ctx.Err() == nil {
		return err
	}
	return nil
}

// apiConfig returns the configuration of clients of the API server.
func (i *invocation) apiConfig(kubeconfig string) (*rest.Config, error) {
	load := rest.InClusterConfig
	if kubeconfig != "" {
		load = func() (*rest.Config, error) { return clientcmd.BuildConfigFromFlags("", kubeconfig) }
	}
	api, err := load()
	if err != nil {
		return nil, err
	}
	api.QPS = -1 // no client-side limit: the API server has priority and fairness
	api.UserAgent = controller.Name + "/" + i.Version
	return api, nil
}

func newScheme() (*runtime.Scheme, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		admissionv1.AddToScheme, authenticationv1.AddToScheme, certificatesv1.AddToScheme, corev1.AddToScheme, rbacv1.AddToScheme, v1alpha1.AddToScheme,
	} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	return scheme, nil
}

// newManager returns a manager that serves the cluster and answers health probes.
func (i *invocation) newManager(ctx context.Context, api *rest.Config, settings *config.Settings, gate *preflight.Preflight, lock resourcelock.Interface, logger klog.Logger) (manager.Manager, error) {
	c := settings.Config()
	scheme, err := newScheme()
	if err != nil {
		return nil, err
	}
	options := managerOptions(c, scheme, lock, logger)
	requests := intake.NewRequestCache(settings.Rules())
	requests.Configure(&options.Cache)
	m, err := ctrl.NewManager(api, options)
	if err != nil {
		return nil, err
	}
	parts, keys := settings.Controller(m.GetAPIReader(), m.GetClient())
	metrics, err := telemetry.NewMetrics()
	if err != nil {
		return nil, err
	}
	parts.Metrics, parts.ClusterMetrics, parts.Requests = metrics.For(c.ClusterUID), gate.Metrics, requests
	clients, err := controller.ManagerClients(m)
	if err != nil {
		return nil, err
	}
	runnables, err := settings.Runnables(config.Cluster{
		Controller: parts, Keys: keys, Preflight: gate, Clients: clients, API: clients.Joined,
		Cache: m.GetCache(), Connection: m.GetConfig(), CacheOptions: cache.Options{HTTPClient: m.GetHTTPClient(), Scheme: scheme, Mapper: m.GetRESTMapper()},
		Log: logger, Configuration: settings.NewReloader(i.file, logger.WithName("configuration")), Leads: m.Elected(),
	})
	if err != nil {
		return nil, err
	}
	for _, r := range runnables {
		if err := m.Add(r); err != nil {
			return nil, err
		}
	}
	// This makes a standby replica fill its cache, too.
	if _, err := m.GetCache().GetInformer(ctx, &certificatesv1.CertificateSigningRequest{}, cache.BlockUntilSynced(false)); err != nil {
		return nil, err
	}
	return m, addHealthServer(m, c.HealthBindAddress, cacheCheck(m),
		newCheck("ca", once, func(ctx context.Context) error {
			if parts.CA == nil {
				return nil
			}
			_, err := sources.Uncompared(parts.CA).CA(ctx, time.Now())
			return err
		}),
		newCheck("challenge-keys", once, func(context.Context) error {
			if keys.Verifier() == nil {
				return keys.Problem()
			}
			return nil
		}),
		newCheck("inventory", once, func(ctx context.Context) error {
			_, err := parts.Machines.Machines(ctx, time.Now())
			return err
		}),
	)
}

// cacheCheck returns the check of a manager's cache.
func cacheCheck(m manager.Manager) check {
	return newCheck("cache", always, func(ctx context.Context) error {
		if !m.GetCache().WaitForCacheSync(ctx) {
			return errors.New("not filled yet")
		}
		return nil
	})
}

// renewDeadline is the default of controller-runtime.
const renewDeadline = 10 * time.Second

// lock returns the Lease for a replica with --leader-identity. It returns nil if controller-runtime
// should make one.
//
// When a killed leader restarts, it finds its own identity in the Lease and leads at once.
// Otherwise all replicas would wait until the Lease has expired. A pod has one process at a time.
// If there were two for a moment, the resourceVersions of records would prevent conflicting writes.
func (i *invocation) lock(api *rest.Config, c config.Config) (resourcelock.Interface, error) {
	if i.leaderIdentity == "" || !c.LeaderElection.Enabled {
		return nil, nil
	}
	identity := resourcelock.ResourceLockConfig{Identity: i.leaderIdentity}
	lock, err := resourcelock.NewFromKubeconfig(resourcelock.LeasesResourceLock, c.Namespace, c.LeaderElection.LeaseName, identity, api, renewDeadline)
	if err != nil {
		return nil, fmt.Errorf("leader election: %w", err)
	}
	return lock, nil
}

func managerOptions(c config.Config, scheme *runtime.Scheme, lock resourcelock.Interface, logger klog.Logger) ctrl.Options {
	graceful := shutdownTimeout
	return ctrl.Options{
		Scheme: scheme, Logger: logger,
		Metrics:                metricsserver.Options{BindAddress: c.MetricsBindAddress},
		HealthProbeBindAddress: "0", // addHealthServer
		LeaderElection:         c.LeaderElection.Enabled, LeaderElectionResourceLockInterface: lock, LeaderElectionID: c.LeaderElection.LeaseName, LeaderElectionNamespace: c.Namespace,
		// The process ends when the manager has stopped, so nothing is decided after the Lease was
		// released.
		LeaderElectionReleaseOnCancel: true,
		GracefulShutdownTimeout:       &graceful,
	}
}

// Management serves the workload clusters of a management cluster. Package clusterapi implements
// it, so that this package does not depend on Cluster API.
type Management interface {
	// Check returns an error that names the field if this program does not support the settings.
	Check(settings *config.Settings) error
	// Scheme and CacheOptions return the scheme and the cache options of the manager.
	Scheme() (*runtime.Scheme, error)
	CacheOptions(settings *config.Settings) cache.Options
	// Add adds everything that serves workload clusters to the manager.
	Add(ctx context.Context, m manager.Manager, settings *config.Settings, userAgent string) error
}

// manage runs the controller in a management cluster.
func (i *invocation) manage(ctx context.Context, api *rest.Config, settings *config.Settings, logger klog.Logger) error {
	scheme, err := i.Management.Scheme()
	if err != nil {
		return err
	}
	lock, err := i.lock(api, settings.Config())
	if err != nil {
		return err
	}
	options := managerOptions(settings.Config(), scheme, lock, logger)
	options.Cache = i.Management.CacheOptions(settings)
	m, err := ctrl.NewManager(api, options)
	if err != nil {
		return err
	}
	if err := i.Management.Add(ctx, m, settings, api.UserAgent); err != nil {
		return err
	}
	if err := addHealthServer(m, settings.Config().HealthBindAddress, cacheCheck(m)); err != nil {
		return err
	}
	logger.Info("starting in a management cluster", "version", i.Version, "commit", i.Commit, "config", i.file, "audit", settings.Config().Audit)
	return m.Start(ctx)
}
