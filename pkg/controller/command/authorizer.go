// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/bounded"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/authorizer"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

// authorizerFlags are the flags of the command authorizer.
type authorizerFlags struct {
	kubeconfig, listen, healthListen string
	tls                              authorizer.TLSFiles
	stateFile                        string
	namespace, cluster               string
	strict, unattestedFrom           string
}

func (i *invocation) authorizerCommand() *cobra.Command {
	f := &authorizerFlags{}
	c := &cobra.Command{
		Use:   "authorizer",
		Short: "Answer API servers whether a node's certificate is revoked: a webhook authorizer",
		Long: `authorizer answers SubjectAccessReviews of the API server on the same host. It denies each request with a revoked certificate, also reads,
except those by which a node attests again. It denies each request of a suspended machine, and with the tokens of its pods. For all
other requests it has no opinion. It never allows a request.

It answers from memory. Its lists come from the API server, and from the state file until the API server can be read. It reads no
configuration file of the controller, except for --unattested-nodes-from.`,
		Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return i.authorize(c.Context(), f) },
	}
	flags := c.Flags()
	flags.StringVar(&f.kubeconfig, "kubeconfig", "", "kubeconfig file, to read NodeAttestations, NodeSuspensions and RevocationSlices. It may be written later, and is read again when it changes")
	flags.StringVar(&f.listen, "listen", "127.0.0.1:10360", "address where the API server sends SubjectAccessReviews")
	flags.StringVar(&f.healthListen, "health-listen", "127.0.0.1:10361", "address for /healthz, /readyz and /metrics, without TLS, or 0 for none")
	flags.StringVar(&f.tls.Certificate, "tls-cert-file", "", "serving certificate, read again when it changes")
	flags.StringVar(&f.tls.Key, "tls-private-key-file", "", "key of the serving certificate")
	flags.StringVar(&f.tls.ClientCA, "client-ca-file", "", "CA that issued the API server's client certificate for this webhook. Each client with a certificate of this CA gets an answer")
	flags.StringVar(&f.stateFile, "state-file", "", "file that keeps the lists across a restart")
	flags.StringVar(&f.namespace, "namespace", config.Default().Namespace, "Namespace of the records")
	flags.StringVar(&f.cluster, "cluster", "", "cluster UID, if the Namespace has records of several clusters")
	flags.StringVar(&f.strict, "strict", string(authorizer.StrictOff), "whether to deny nodes whose certificate no record names: off, rehearse (count and log them), or on")
	flags.StringVar(&f.unattestedFrom, "unattested-nodes-from", "", "copy of the controller's configuration file: the nodes in its unattestedNodes need no record. Read again when it changes")
	return c
}

func (f *authorizerFlags) check() error {
	for _, required := range []struct{ flag, value string }{
		{"kubeconfig", f.kubeconfig}, {"tls-cert-file", f.tls.Certificate}, {"tls-private-key-file", f.tls.Key},
		{"client-ca-file", f.tls.ClientCA}, {"state-file", f.stateFile}, {"namespace", f.namespace},
	} {
		if required.value == "" {
			return cli.Usage(fmt.Errorf("--%s is required", required.flag))
		}
	}
	if modes := []authorizer.Strict{authorizer.StrictOff, authorizer.StrictRehearse, authorizer.StrictOn}; !slices.Contains(modes, authorizer.Strict(f.strict)) {
		return cli.Usage(fmt.Errorf("--strict: %.32q is none of off, rehearse, on", f.strict))
	}
	return nil
}

// authorize runs the authorizer until ctx ends.
func (i *invocation) authorize(ctx context.Context, f *authorizerFlags) error {
	if err := f.check(); err != nil {
		return err
	}
	logger := klog.Background()
	ctrl.SetLogger(logger)
	unattested, err := f.unattested(logger)
	if err != nil {
		return misconfigured(fmt.Errorf("--unattested-nodes-from: %w", err))
	}
	// no build info: an alert fires if no controller has it
	counters, err := telemetry.NewAuthorizerMetrics()
	if err != nil {
		return err
	}
	a, err := authorizer.New(authorizer.Config{
		Namespace: f.namespace, Cluster: f.cluster, StateFile: f.stateFile, Strict: authorizer.Strict(f.strict),
		Connect:    func() (client.WithWatch, error) { return i.connect(f.kubeconfig) },
		Unattested: unattested, Metrics: counters, Log: logger.WithName("authorizer"),
	})
	if err != nil {
		return err
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", f.listen)
	if err != nil {
		return cli.Fail(CodeConfiguration, "name a free address of this host with --listen", err)
	}
	logger.Info("starting the authorizer", "version", i.Version, "commit", i.Commit, "listen", listener.Addr().String(), "strict", f.strict)

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() {
		for ctx.Err() == nil {
			unchanged, stop := untilChanged(ctx, f.kubeconfig, kubeconfigInterval)
			a.Run(unchanged) // with a new client
			stop()
		}
	})
	if f.healthListen != "0" {
		if err := serveAuthorizerHealth(ctx, &running, f.healthListen); err != nil {
			return cli.Fail(CodeConfiguration, "name a free address of this host with --health-listen", err)
		}
	}
	if err := a.Serve(ctx, listener, f.tls); err != nil {
		return cli.Fail(CodeConfiguration, "check the files of --tls-cert-file, --tls-private-key-file and --client-ca-file", err)
	}
	return nil
}

// connect returns a client for the watches of the authorizer.
func (i *invocation) connect(kubeconfig string) (client.WithWatch, error) {
	api, err := i.apiConfig(kubeconfig)
	if err != nil {
		return nil, err
	}
	scheme, err := newScheme()
	if err != nil {
		return nil, err
	}
	return client.NewWithWatch(api, client.Options{Scheme: scheme})
}

// kubeconfigInterval is the time between two reads of the kubeconfig. maxKubeconfig bounds it, in
// bytes.
const kubeconfigInterval, maxKubeconfig = 10 * time.Second, 1 << 20

// untilChanged returns a context that ends when the content of a file has changed. It reads the
// file at each interval.
func untilChanged(ctx context.Context, path string, interval time.Duration) (context.Context, context.CancelFunc) {
	before, _ := bounded.ReadFile(path, maxKubeconfig) // may be written later
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		defer cancel()
		for {
			select {
			case <-ctx.Done():
				return
			case <-time.After(interval):
			}
			if now, err := bounded.ReadFile(path, maxKubeconfig); err == nil && !bytes.Equal(now, before) {
				return
			}
		}
	}()
	return ctx, cancel
}

// unattestedInterval is the time between two reads of the configuration file.
const unattestedInterval = 10 * time.Second

// unattested returns a function that reports whether a node is in the configuration file's
// unattestedNodes. While the file is invalid or missing, its last valid list stays in force.
func (f *authorizerFlags) unattested(log klog.Logger) (func(node string) bool, error) {
	if f.unattestedFrom == "" {
		return nil, nil
	}
	file := config.UnattestedFile(f.unattestedFrom, unattestedInterval)
	if _, err := file.Get(time.Now()); err != nil {
		return nil, err
	}
	var problems telemetry.Once
	return func(node string) bool {
		names, _ := file.Get(time.Now()) // it has been valid
		if problem := file.Problem(); problem != nil && problems.MarkReported("", problem.Error(), time.Now(), 0) {
			log.Error(nil, "the last valid unattestedNodes stay in force", "cause", text.Line(problem.Error(), telemetry.MaxLogged))
		}
		return slices.Contains(names, node)
	}, nil
}

// serveAuthorizerHealth serves health and metrics until ctx ends. The authorizer is always ready:
// an API server must ask it, however old its lists are.
func serveAuthorizerHealth(ctx context.Context, running *sync.WaitGroup, address string) error {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return err
	}
	ok := func(answer http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprint(answer, "ok") }
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", ok)
	mux.HandleFunc("/readyz", ok)
	mux.Handle("/metrics", promhttp.HandlerFor(metrics.Registry, promhttp.HandlerOpts{}))
	server := &http.Server{Handler: mux, ReadTimeout: clientTimeout, WriteTimeout: clientTimeout, IdleTimeout: clientTimeout}
	running.Go(func() { _ = server.Serve(listener) }) // ends with Close
	running.Go(func() {
		<-ctx.Done()
		_ = server.Close()
	})
	return nil
}
