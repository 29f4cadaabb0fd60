// SPDX-License-Identifier: Apache-2.0

// node-attestation-controller-acme is the controller of an imaginary infrastructure provider: its
// own evidence and its own policy, everything else from the library. It has an identity of its own
// in the cluster (docs/providers.md).
package main

import (
	"context"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"flag"
	"fmt"
	"os"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/kubelet-authenticator/kubelet-authenticator/docs/examples/acme/identity"
	"github.com/kubelet-authenticator/kubelet-authenticator/docs/examples/node-attestation-controller-acme/acme"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/bindings"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/intake"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/sources"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// name is the binary's, and the lease's.
const name = "node-attestation-controller-acme"

// options are the flags. controller-runtime adds --kubeconfig; in a pod it is not needed.
type options struct {
	cluster, namespace, inventory, caCertificate, caKey, platformKey, metrics, health string
}

func main() {
	var o options
	flag.StringVar(&o.cluster, "cluster-uid", "", "UID of the cluster, as it is in records")
	flag.StringVar(&o.namespace, "namespace", "node-attestation-acme-system", "namespace of the records and the lease")
	flag.StringVar(&o.inventory, "inventory", "/etc/acme/inventory/machines.yaml", "inventory of machines")
	flag.StringVar(&o.caCertificate, "ca-certificate", "/etc/acme/ca/tls.crt", "certificate of the CA that signs for nodes")
	flag.StringVar(&o.caKey, "ca-key", "/etc/acme/ca/tls.key", "its key")
	flag.StringVar(&o.platformKey, "platform-key", "/etc/acme/platform/key.pem", "public key of the platform (Ed25519, PEM)")
	flag.StringVar(&o.metrics, "metrics-bind-address", "127.0.0.1:8080", `where metrics are served; "0": nowhere`)
	flag.StringVar(&o.health, "health-bind-address", ":8081", `where /healthz and /readyz are served; "0": nowhere`)
	flag.Parse()
	if err := run(ctrl.SetupSignalHandler(), o); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
		os.Exit(1)
	}
}

// run is the controller, until ctx ends.
func run(ctx context.Context, o options) error {
	ctrl.SetLogger(klog.Background())
	config, err := o.controller()
	if err != nil {
		return err
	}
	api, err := ctrl.GetConfig()
	if err != nil {
		return err
	}
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{certificatesv1.AddToScheme, corev1.AddToScheme, rbacv1.AddToScheme, v1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			return err
		}
	}
	options := ctrl.Options{
		Scheme: scheme, Metrics: server.Options{BindAddress: o.metrics}, HealthProbeBindAddress: o.health,
		LeaderElection: true, LeaderElectionID: name, LeaderElectionNamespace: o.namespace,
		LeaderElectionReleaseOnCancel: true, // the process ends as soon as the manager has
	}
	// It bounds the memory of pending requests, and tells the queue what they claim.
	config.Requests = intake.NewRequestCache(config.Rules)
	config.Requests.Configure(&options.Cache)
	manager, err := ctrl.NewManager(api, options)
	if err != nil {
		return err
	}
	if config.Metrics, err = telemetry.NewMetrics(); err != nil {
		return err
	}
	if err := controller.Add(manager, config); err != nil {
		return err
	}
	// With some bindings kube-controller-manager approves without evidence. Events report them.
	if err := bindings.Add(manager, bindings.Config{}); err != nil {
		return err
	}
	if err := errors.Join(manager.AddHealthzCheck("ping", healthz.Ping), manager.AddReadyzCheck("ping", healthz.Ping)); err != nil {
		return err
	}
	return manager.Start(ctx)
}

// controller returns the policy and the parts. What is missing is an error at the start.
func (o options) controller() (controller.Config, error) {
	key, err := readKey(o.platformKey)
	if err != nil {
		return controller.Config{}, fmt.Errorf("--platform-key: %w", err)
	}
	if o.cluster == "" {
		return controller.Config{}, errors.New("--cluster-uid: must be set")
	}
	rules, err := verifier.New(verifier.Policy{
		Cluster:   o.cluster,
		Providers: []verifier.Provider{{Name: identity.Provider}},
		Signers:   []verifier.Signer{{Name: identity.SignerName, Providers: []string{identity.Provider}}},
		// A first request comes with the token that was made for this machine, a renewal with a
		// certificate that is in its record.
		Token: verifier.Required, Credential: verifier.Required,
		BootCounters: verifier.Off,                              // there is no TPM
		EKSources:    []verifier.EKSource{verifier.EKInventory}, // nor an EK
		NameSources:  []verifier.NameSource{verifier.NameInventory},
	})
	if err != nil {
		return controller.Config{}, err
	}
	machines := sources.NewInventory(o.inventory, time.Second)
	return controller.Config{
		Rules:     rules,
		Providers: []evidence.Provider{evidence.FromSigner(identity.Provider, acme.Signer{PlatformKey: key, Machines: machines})},
		Machines:  machines,
		CA:        signing.NewFiles(o.caCertificate, o.caKey),
		Limits:    signing.DefaultLimits(),
		Namespace: o.namespace,
	}, nil
}

// readKey reads one public key.
func readKey(path string) (ed25519.PublicKey, error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	block, rest := pem.Decode(content)
	if block == nil || block.Type != "PUBLIC KEY" || len(rest) > 0 {
		return nil, fmt.Errorf("%s: is not one PEM block of type PUBLIC KEY", path)
	}
	parsed, err := x509.ParsePKIXPublicKey(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	key, ok := parsed.(ed25519.PublicKey)
	if !ok {
		return nil, fmt.Errorf("%s: is %T, not Ed25519", path, parsed)
	}
	return key, nil
}
