// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/spf13/cobra"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
)

// shutdownTimeout is how long what is under way may take to end; it is less than a pod's grace period.
const shutdownTimeout = 20 * time.Second

// run is the controller.
func (i *invocation) run(cmd *cobra.Command, _ []string) error {
	settings, err := i.settings()
	if err != nil {
		return err
	}
	api, err := i.apiConfig()
	if err != nil {
		return &failure{CodeConfiguration, "name an existing kubeconfig with --kubeconfig, or run it in a pod", err}
	}
	logger := klog.Background()
	ctrl.SetLogger(logger)
	gate, err := newGate(api, settings, logger)
	if err != nil {
		return err
	}
	if err := open(cmd.Context(), gate); err != nil || cmd.Context().Err() != nil {
		return err
	}
	m, err := newManager(cmd.Context(), api, settings, gate, logger)
	if err != nil {
		return err
	}
	logger.Info("starting", "version", i.Version, "commit", i.Commit, "config", i.file, "cluster", settings.Config().ClusterUID, "audit", settings.Config().Audit)
	return m.Start(cmd.Context())
}

// newGate makes the gate with a client of its own: the first of a manager fails at once where the API server does not answer yet.
func newGate(api *rest.Config, settings *config.Settings, logger klog.Logger) (*controller.Gate, error) {
	scheme, err := newScheme()
	if err != nil {
		return nil, err
	}
	live, err := client.New(api, client.Options{Scheme: scheme})
	if err != nil {
		return nil, err
	}
	metrics, err := controller.NewClusterMetrics()
	if err != nil {
		return nil, err
	}
	return settings.Gate(settings.Keys(live, live), metrics, logger.WithName("gate")), nil
}

// open has the gate judge whether enforcement may start. Nothing is wrong if it was told to end meanwhile.
func open(ctx context.Context, gate *controller.Gate) error {
	err := gate.Open(ctx)
	if refused, ok := errors.AsType[*controller.GateError](err); ok {
		return &failure{CodeConfiguration, refused.Hint, err}
	}
	if ctx.Err() == nil {
		return err
	}
	return nil
}

// apiConfig returns how to reach the API server.
func (i *invocation) apiConfig() (*rest.Config, error) {
	load := rest.InClusterConfig
	if i.kubeconfig != "" {
		load = func() (*rest.Config, error) { return clientcmd.BuildConfigFromFlags("", i.kubeconfig) }
	}
	api, err := load()
	if err != nil {
		return nil, err
	}
	api.QPS = -1 // the API server has a queue of its own, and knows better
	api.UserAgent = controller.Name + "/" + i.Version
	return api, nil
}

func newScheme() (*runtime.Scheme, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{certificatesv1.AddToScheme, corev1.AddToScheme, rbacv1.AddToScheme, v1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	return scheme, nil
}

// newManager assembles the controller and what goes with it.
func newManager(ctx context.Context, api *rest.Config, settings *config.Settings, gate *controller.Gate, logger klog.Logger) (manager.Manager, error) {
	c := settings.Config()
	scheme, err := newScheme()
	if err != nil {
		return nil, err
	}
	graceful := shutdownTimeout
	m, err := ctrl.NewManager(api, ctrl.Options{
		Scheme: scheme, Logger: logger,
		Metrics:                metricsserver.Options{BindAddress: c.MetricsBindAddress},
		HealthProbeBindAddress: c.HealthBindAddress,
		LeaderElection:         c.LeaderElection.Enabled, LeaderElectionID: c.LeaderElection.LeaseName, LeaderElectionNamespace: c.Namespace,
		// The process ends as soon as the manager has stopped: nothing is decided after the lease was given back.
		LeaderElectionReleaseOnCancel: true,
		GracefulShutdownTimeout:       &graceful,
	})
	if err != nil {
		return nil, err
	}
	parts, keys := settings.Controller(m.GetAPIReader(), m.GetClient())
	if parts.Metrics, err = controller.NewMetrics(); err != nil {
		return nil, err
	}
	if err := controller.Add(m, parts); err != nil {
		return nil, err
	}
	if err := controller.AddBindings(m, settings.Bindings(gate.Metrics)); err != nil {
		return nil, err
	}
	if err := m.Add(gate); err != nil {
		return nil, err
	}
	if err := m.Add(keys); err != nil {
		return nil, err
	}
	if err := m.Add(&watch{sources: sourcesOf(parts, keys), log: logger.WithName("sources"), said: map[string]string{}}); err != nil {
		return nil, err
	}
	// A replica that stands by has its cache filled.
	if _, err := m.GetCache().GetInformer(ctx, &certificatesv1.CertificateSigningRequest{}, cache.BlockUntilSynced(false)); err != nil {
		return nil, err
	}
	for name, check := range map[string]func(context.Context) error{
		"ca": func(ctx context.Context) error {
			if parts.CA == nil {
				return nil
			}
			_, err := parts.CA.CA(ctx, time.Now())
			return err
		},
		"inventory": func(ctx context.Context) error {
			_, err := parts.Machines.Machines(ctx, time.Now())
			return err
		},
		"challenge-keys": func(context.Context) error {
			if keys.Verifier() == nil {
				return keys.Problem()
			}
			return nil
		},
		"cache": func(ctx context.Context) error {
			if !m.GetCache().WaitForCacheSync(ctx) {
				return errors.New("not filled yet")
			}
			return nil
		},
	} {
		if err := m.AddReadyzCheck(name, checker(check)); err != nil {
			return nil, err
		}
	}
	return m, m.AddHealthzCheck("ping", healthz.Ping)
}

// checkTimeout bounds a check; probes wait a second.
const checkTimeout = 800 * time.Millisecond

func checker(check func(context.Context) error) healthz.Checker {
	return func(request *http.Request) error {
		ctx, cancel := context.WithTimeout(request.Context(), checkTimeout)
		defer cancel()
		return check(ctx)
	}
}

// watch logs what keeps a CA, an inventory or the challenge keys from being used, each time that it changes: the last good ones stay
// in use, and so nobody would notice.
type watch struct {
	sources map[string]config.Source
	log     klog.Logger
	said    map[string]string
}

func sourcesOf(parts controller.Config, keys *controller.KeyStore) map[string]config.Source {
	sources := map[string]config.Source{"challenge keys": keys}
	if ca, ok := parts.CA.(config.Source); ok {
		sources["CA"] = ca
	}
	if machines, ok := parts.Machines.(config.Source); ok {
		sources["inventory"] = machines
	}
	return sources
}

// Start looks every now and then until ctx ends.
func (w *watch) Start(ctx context.Context) error {
	ticker := time.NewTicker(5 * time.Second)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
			w.look()
		}
	}
}

// NeedLeaderElection has replicas that stand by say it, too.
func (*watch) NeedLeaderElection() bool { return false }

func (w *watch) look() {
	for name, source := range w.sources {
		problem := ""
		if err := source.Problem(); err != nil {
			problem = text.Line(err.Error(), maxLine)
		}
		if problem == w.said[name] {
			continue
		}
		if problem == "" {
			w.log.Info(fmt.Sprintf("%s: in use again", name))
		} else {
			w.log.Info(fmt.Sprintf("%s: cannot be used, the last good one is if there was one", name), "problem", problem)
		}
		w.said[name] = problem
	}
}
