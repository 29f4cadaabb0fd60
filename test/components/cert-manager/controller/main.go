// SPDX-License-Identifier: Apache-2.0

// Command controller runs cert-manager's own controllers, as its cmd/controller does by default.
// That command is a module of its own, which the Go module proxy cannot serve. The controllers for
// ACME, Vault, Venafi and ingresses are left out, and so is leader election.
package main

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/cert-manager/cert-manager/pkg/controller"
	"github.com/cert-manager/cert-manager/pkg/controller/certificaterequests/approver"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificaterequests/ca"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/issuing"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/keymanager"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/readiness"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/requestmanager"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/revisionmanager"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/trigger"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificatesigningrequests/ca"
	_ "github.com/cert-manager/cert-manager/pkg/controller/clusterissuers"
	_ "github.com/cert-manager/cert-manager/pkg/controller/issuers"
	_ "github.com/cert-manager/cert-manager/pkg/issuer/ca"
	logf "github.com/cert-manager/cert-manager/pkg/logs"
	"github.com/cert-manager/cert-manager/pkg/util/feature"
)

// workers for each controller: cert-manager's default.
const workers = 5

func main() {
	kubeconfig := flag.String("kubeconfig", "", "credential for the API server")
	namespace := flag.String("cluster-resource-namespace", "cert-manager", "namespace of the Secrets that a ClusterIssuer names")
	controllers := flag.String("controllers", "*", "\"*\", or \"*,-certificaterequests-approver\"")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *kubeconfig, *namespace, *controllers); err != nil {
		fmt.Fprintf(os.Stderr, "cert-manager: %v\n", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, kubeconfig, namespace, enabled string) error {
	logf.InitLogs()
	defer logf.FlushLogs()
	ctx = logf.NewContext(ctx, logf.Log, "controller")
	// Without it cert-manager issues for no CertificateSigningRequest.
	if err := feature.DefaultMutableFeatureGate.Set("ExperimentalCertificateSigningRequestControllers=true"); err != nil {
		return err
	}
	names := slices.Sorted(maps.Keys(controller.Known()))
	switch enabled {
	case "*":
	case "*,-" + approver.ControllerName:
		names = slices.DeleteFunc(names, func(name string) bool { return name == approver.ControllerName })
	default:
		return fmt.Errorf("--controllers=%s is not known here", enabled)
	}

	factory, err := controller.NewContextFactory(ctx, controller.ContextOptions{
		Kubeconfig:    kubeconfig,
		IssuerOptions: controller.IssuerOptions{ClusterResourceNamespace: namespace},
		CertificateOptions: controller.CertificateOptions{
			CopiedAnnotationPrefixes:                 []string{"*", "-kubectl.kubernetes.io/", "-fluxcd.io/", "-argocd.argoproj.io/"},
			CertificateRequestMinimumBackoffDuration: time.Hour,
			CertificateRequestMaximumBackoffDuration: 32 * time.Hour,
		},
	})
	if err != nil {
		return err
	}
	base, err := factory.Build()
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	for _, name := range names {
		c, err := controller.Known()[name](factory)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		group.Go(func() error { return c.Run(workers, ctx) })
	}
	base.SharedInformerFactory.Start(ctx.Done())
	base.KubeSharedInformerFactory.Start(ctx.Done())
	fmt.Fprintf(os.Stderr, "cert-manager: started %s\n", strings.Join(names, " "))
	return group.Wait()
}
