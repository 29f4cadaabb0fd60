// SPDX-License-Identifier: Apache-2.0

// Package command is the command line of kubelet-authenticator. An infrastructure provider calls
// Program.Main from a binary of its own, with a provider of its own.
package command

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/outputformat"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/terminal"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
)

// Run executes a command line and returns the exit code (docs/node.md). It prints an error on
// stderr, once.
func (p Program) Run(ctx context.Context, with Process) int {
	return with.Run(ctx, p.invocation(with).root, asFailure)
}

// asFailure returns an error with its exit code and its hint.
func asFailure(err error) *cli.Failure {
	if usage, ok := errors.AsType[*cli.Failure](err); ok {
		return usage
	}
	failure := reason.AsFailure(err)
	return cli.Fail(failure.Reason.Code(), failure.Hint, failure)
}

// invocation builds only the commands that the command line needs.
func (p Program) invocation(with Process) *invocation {
	i := &invocation{Program: p, Process: with}
	i.root = i.rootCommand()
	if !settingsOnly(with.Args) {
		i.addCommands()
	}
	return i
}

// Command returns the tree of commands with their flags, for documentation. Run executes them.
func (p Program) Command() *cobra.Command {
	i := &invocation{Program: p}
	i.root = i.rootCommand()
	i.addCommands()
	return i.root
}

// settingsOnly reports whether a command line has only flags with values, as the kubelet's has.
// Then the commands, and everything else for people, need not be built.
func settingsOnly(args []string) bool {
	for _, arg := range args {
		if !strings.HasPrefix(arg, "--") || !strings.Contains(arg, "=") || strings.HasPrefix(arg, "--help") {
			return false
		}
	}
	return true
}

func (i *invocation) rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   i.Name,
		Short: "Print the node's client certificate as an ExecCredential, and get one by attestation if there is none",
		Long: i.Name + ` is a client-go exec credential plugin: the kubelet's kubeconfig names it. It prints the node's client
certificate as an ExecCredential. Where there is none, or it is due, a detached worker requests one through the
Kubernetes CSR API, with evidence of which machine this is.

On a terminal it does not print the key. Run status, doctor or --dry-run instead.`,
		RunE: i.run,
	}
	i.Init(root)
	i.config = authenticator.DefaultConfig()
	i.config.Provider = i.DefaultProvider
	flags := root.PersistentFlags()
	bind(flags, &i.config)
	flags.StringVar(&i.file, "config", authenticator.DefaultConfigFile, "configuration file; only the default one may be missing")
	// Setting it sets klog's level. klog.InitFlags would add twenty flags for this one.
	flags.AddGoFlag(&flag.Flag{
		Name: "v", Value: new(klog.Level), DefValue: "0", Usage: "log verbosity, to stderr; a worker logs to a file in the certificate directory",
	})
	flags.Lookup("v").Shorthand = "v"
	root.Flags().BoolVar(&i.dryRun, "dry-run", false, "for debugging: show the request and the API server's answer to it; change nothing")
	root.Flags().BoolVar(&i.version, "version", false, "print the version, like the command version")
	root.Flags().StringVarP(&i.output, "output", "o", "", "json or yaml: with --dry-run, the CertificateSigningRequest; with --version, the protocol versions, too")
	return root
}

// addCommands adds the subcommands. The kubelet calls only the root command.
func (i *invocation) addCommands() {
	i.root.Example = example(i.Name, `
# what a run would send, and whether the API server accepts it
{} --dry-run

# the certificate, its renewal, and the last attempt
{} status

# what keeps this node from its certificate
{} doctor`)
	i.root.AddCommand(i.workerCommand(), i.versionCommand(), i.identifyCommand(), i.prepareCommand(), i.kubeconfigCommand(), i.renewCommand(), i.rehearseCommand(), i.resetCommand(),
		i.doctorCommand(), i.statusCommand())
	for _, p := range i.Providers {
		if p.Inspects {
			i.root.AddCommand(i.deviceCommand(p.Name))
		}
	}
	i.completeValues()
}

// run is what the kubelet calls.
func (i *invocation) run(cmd *cobra.Command, _ []string) error {
	switch {
	case i.output != "" && (!i.dryRun && !i.version || !outputformat.Valid(i.output)):
		return cli.Usage(fmt.Errorf("--output %q: goes with --dry-run or --version, and must be json or yaml", i.output))
	case i.version:
		return i.PrintVersion(i.Name, i.buildInfo(), i.output)
	case !i.dryRun && i.Getenv(authenticator.ExecInfoVariable) == "" && terminal.Is(i.Stdout):
		return i.explain()
	}
	a, err := i.load()
	if a == nil {
		return err // there is no answer that client-go would understand; else Run returns err, too
	}
	if i.dryRun {
		return i.printDryRun(cmd.Context(), a)
	}
	answer, err := a.Run(cmd.Context())
	for _, remark := range answer.Remarks {
		i.say(remark)
	}
	if err != nil {
		return err
	}
	_, err = i.Stdout.Write(answer.Credential)
	return err
}

// explain says what to run instead of a bare call, which would print the private key. It returns a
// Failure, since exit code 0 means that a credential is on standard output.
func (i *invocation) explain() error {
	_, _ = fmt.Fprintf(i.Stderr, `%[1]s is run by the kubelet. It prints this node's certificate and private key,
so it does not print them on a terminal. Run one of these instead:

  %[1]s status      the certificate, its renewal, and the last attempt
  %[1]s doctor      what keeps this node from its certificate
  %[1]s --dry-run   what a run would send, and whether the API server accepts it
  %[1]s --help      all commands and flags

`, i.Name)
	return &reason.Failure{
		Reason: reason.Usage, Hint: "to get the credential all the same, send it through a pipe",
		Err: errors.New("standard output is a terminal: no credential is printed"),
	}
}

func (i *invocation) versionCommand() *cobra.Command {
	c := i.VersionCommand(i.Name, i.buildInfo())
	c.Example = example(i.Name, "{} version --output=json")
	return c
}

// buildInfo describes this binary.
func (i *invocation) buildInfo() cli.BuildInfo {
	info := cli.BuildInfo{Version: i.Version, Commit: i.Commit, ExecAPI: authenticator.ExecAPIVersions(), Protocols: map[string][]string{}}
	for _, p := range i.Providers {
		info.Protocols[p.Name] = p.Versions
	}
	return info
}
