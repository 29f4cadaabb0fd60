// SPDX-License-Identifier: Apache-2.0

// Package attestctl is the command line of kubectl-attest, for operators. It reads records,
// requests and the objects that the controller depends on. It revokes, suspends and deletes only
// after a confirmation, and writes nothing else. docs/kubectl-attest.md has the commands.
//
// Requests say what their requesters want: they are shown as claims, bounded and made printable.
package attestctl

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	appsv1 "k8s.io/api/apps/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/cli-runtime/pkg/genericclioptions"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/outputformat"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/terminal"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

// Name is the program's name.
const Name = "kubectl-attest"

// displayName is how help shows the program.
const displayName = "kubectl attest"

// Exit codes. Codes up to 31 mean the same as in the plugin, those above do not.
const (
	codeUnexpected     = cli.CodeUnexpected
	codeUsage          = cli.CodeUsage
	codeAPIUnreachable = 19
	codeAPIRefused     = 20
	// codeCheckFailed says that a check failed, codeCheckUnknown that none failed, but not all
	// could be made.
	codeCheckFailed  = 31
	codeCheckUnknown = 33
	codeNotFound     = 34
	codeNotConfirmed = 35
	// codeTimeout says that a wait ended early, codeNotInForce that a revocation or suspension is
	// recorded and nothing refuses it.
	codeTimeout    = 36
	codeNotInForce = 37
)

// Program is a binary's own part of the command line.
type Program struct {
	// Version and Commit say which build it is.
	Version, Commit string

	// access and now replace the kubeconfig and the clock in tests.
	access *access
	now    func() time.Time
}

// Process has the parts of the process that main passes on.
type Process = cli.Process

// invocation is one call of the command line.
type invocation struct {
	Program
	Process
	flags *genericclioptions.ConfigFlags
	// workloadCluster, workloadKubeconfig and controllerNamespace are flags.
	workloadCluster, workloadKubeconfig, controllerNamespace string
	// now is the time of the call.
	now time.Time
}

// Run executes a command line, and returns the exit code. It reports an error on stderr, once.
func (p Program) Run(ctx context.Context, process Process) int {
	i := &invocation{Program: p, Process: process, flags: genericclioptions.NewConfigFlags(true), now: time.Now()}
	if p.now != nil {
		i.now = p.now()
	}
	return process.Run(ctx, i.rootCommand(), classifyError)
}

// Command returns the tree of commands with their flags, for documentation. Run executes them.
func (p Program) Command() *cobra.Command {
	return (&invocation{Program: p, flags: genericclioptions.NewConfigFlags(true)}).rootCommand()
}

// classifyError gives an error of the API its exit code and hint.
func classifyError(err error) *cli.Failure {
	if f, ok := errors.AsType[*cli.Failure](err); ok {
		return f
	}
	var status apierrors.APIStatus
	switch {
	case apierrors.IsForbidden(err):
		return cli.Fail(codeAPIRefused, "the rights are in packaging/kubernetes/optional/operators.yaml: node-attestation-viewer reads, node-attestation-operator resets and revokes, node-attestation-suspender suspends, node-attestation-evictor evicts", err)
	case apierrors.IsUnauthorized(err):
		return cli.Fail(codeAPIRefused, "log in again: the API server does not know the credential of the kubeconfig", err)
	case lacksRevocation(err):
		return cli.Fail(codeNotFound, "apply "+overlay+": it switches revocation on (docs/revocation.md)", fmt.Errorf("revocation is switched off in this cluster: %w", err))
	case meta.IsNoMatchError(err):
		return cli.Fail(codeNotFound, "apply packaging/kubernetes, or name another cluster with --context", fmt.Errorf("the API server has no NodeAttestation: %w", err))
	case errors.As(err, &status):
		return cli.Fail(codeUnexpected, "", err)
	case errors.Is(err, errUnreachable):
		return cli.Fail(codeAPIUnreachable, "is it the right cluster? See kubectl cluster-info, and --context", err)
	}
	return cli.Fail(codeUnexpected, "", err)
}

// say prints a line on standard error. Its arguments may come from peers.
func (i *invocation) say(format string, arguments ...any) {
	_, _ = fmt.Fprintln(i.Stderr, text.Line(sprintf(format, arguments...), cli.MaxLine))
}

func (i *invocation) rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:         Name,
		Annotations: map[string]string{cobra.CommandDisplayNameAnnotation: displayName},
		Short:       "See which nodes have attested, which wait and why, and what is wrong with the cluster; revoke certificates",
		Long: `See which nodes have attested, which wait and why, and what keeps the cluster from attesting its nodes. Revoke certificates, and suspend
machines.

Where one controller serves the cluster that it runs in, no flag is needed. In a management cluster of Cluster API name the
workload cluster: --workload-cluster=NAME --namespace=NAMESPACE. Its kubeconfig is read from the Secret NAME-kubeconfig,
unless --workload-kubeconfig names a file.`,
		Example: `  kubectl attest check
  kubectl attest status
  kubectl attest pending
  kubectl attest status --workload-cluster=prod-1 --namespace=clusters`,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	i.Init(root)
	root.CompletionOptions.HiddenDefaultCmd = true
	flags := root.PersistentFlags()
	i.flags.AddFlags(flags)
	flags.Lookup("namespace").Usage = "namespace of the records: the controller's, or with --workload-cluster the Cluster's"
	flags.StringVar(&i.controllerNamespace, "controller-namespace", "", "namespace of the controller (default: --namespace, or "+defaultNamespace+")")
	flags.StringVar(&i.workloadCluster, "workload-cluster", "", "with Cluster API: name of the Cluster object")
	flags.StringVar(&i.workloadKubeconfig, "workload-kubeconfig", "", "with Cluster API: kubeconfig file of the workload cluster (default: the Secret <cluster>-kubeconfig)")
	root.AddCommand(i.statusCommand(), i.explainCommand(), i.pendingCommand(), i.describeCommand(), i.resetCommand(),
		i.revokeCommand(), i.rotateCommand(), i.suspendCommand(), i.resumeCommand(), i.revocationsCommand(), i.checkCommand(), i.versionCommand())
	for _, c := range append(root.Commands(), root) {
		if args := c.Args; args != nil {
			c.Args = func(c *cobra.Command, given []string) error {
				if err := args(c, given); err != nil {
					return cli.Usage(err)
				}
				return nil
			}
		}
	}
	return root
}

func (i *invocation) versionCommand() *cobra.Command {
	c := i.VersionCommand(Name, cli.BuildInfo{Version: i.Version, Commit: i.Commit, Protocols: map[string][]string{tpm.Provider: {attestation.VersionTPM}}})
	var clientOnly bool
	c.Flags().BoolVar(&clientOnly, "client", false, "ask no cluster for the controller's image")
	c.Short = "Print version, commit, Go version and protocol versions, and the controller's image"
	printInfo := c.RunE
	c.RunE = func(c *cobra.Command, args []string) error {
		if err := printInfo(c, args); err != nil || clientOnly || c.Flags().Changed("output") {
			return err
		}
		return i.printController(c.Context())
	}
	return c
}

// printController prints the image of the controller. It does not fail if it cannot be read: a
// person may ask for the version without a cluster.
func (i *invocation) printController(ctx context.Context) error {
	a, err := i.open(ctx)
	if err == nil {
		var deployment *appsv1.Deployment
		if deployment, err = a.readDeployment(ctx); err == nil {
			for _, container := range deployment.Spec.Template.Spec.Containers {
				if err := i.printf("%s %s, %d of %d pods updated to it", telemetry.Component, container.Image, deployment.Status.UpdatedReplicas, deployment.Status.Replicas); err != nil {
					return err
				}
			}
		}
	}
	if err != nil {
		i.say("warning: the controller's version is not known: %v", err)
	}
	return nil
}

// outputFlag adds the flag --output to a command. more are formats beside json and yaml.
func outputFlag(c *cobra.Command, format *string, more ...string) {
	formats := append(more, outputformat.JSON, outputformat.YAML)
	cli.OptionalOutputFlag(c, format, fmt.Sprintf("one of %v; default: text", formats), formats...)
}

// colors reports whether standard output may have colours.
func (i *invocation) colors() bool { return terminal.Colors(i.Stdout, i.Getenv) }
