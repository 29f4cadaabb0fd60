// SPDX-License-Identifier: Apache-2.0

// Package command is the command line of node-attestation-controller, for a main.
package command

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

// defaultConfigFile is read unless --config names another.
const defaultConfigFile = "/etc/node-attestation-controller/config.yaml"

// Exit codes, beside those of package cli. A code that the plugin has, too, means the same.
const (
	CodeConfiguration = cli.CodeConfiguration
	// codeRefused says that verify judged a request that the policy refuses.
	codeRefused = 21
	// codeFIPS says that GODEBUG=fips140=only forbids an algorithm that is needed.
	codeFIPS = 35
)

// Program has the parts of the command line that differ between binaries.
type Program struct {
	// Version and Commit identify the build.
	Version, Commit string
	// Management serves configurations with clusterAPI. Optional: without it they are refused.
	Management Management
}

// Process has the parts of the process that main passes on.
type Process = cli.Process

// invocation is one call of the command line.
type invocation struct {
	Program
	Process
	file, kubeconfig, watchFilter, leaderIdentity string
	audit, revocation                             bool
	logFormat                                     logFormat
}

// Run executes a command line until ctx ends, and returns the exit code. It reports an error on
// stderr, once.
func (p Program) Run(ctx context.Context, process Process) int {
	return process.Run(ctx, (&invocation{Program: p, Process: process}).rootCommand(), cli.AsFailure)
}

// Command returns the tree of commands with their flags, for documentation. Run executes them.
func (p Program) Command() *cobra.Command { return (&invocation{Program: p}).rootCommand() }

func (i *invocation) rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   controller.Name,
		Short: "Challenge, verify, approve and sign the certificate requests of nodes that attest which machine they are",
		Long: controller.Name + ` decides on the CertificateSigningRequests of kubelet-authenticator: it challenges the machine's TPM, verifies
what it proves, finds the machine in the inventory, and approves and signs, or denies, or waits. It runs until SIGTERM
or SIGINT.`,
		RunE: i.run,
	}
	i.Init(root)
	root.CompletionOptions.HiddenDefaultCmd = true
	root.PersistentFlags().StringVar(&i.file, "config", defaultConfigFile, "configuration file, which has to exist")
	root.Flags().StringVar(&i.kubeconfig, "kubeconfig", "", "kubeconfig file (default: the pod's service account)")
	root.Flags().StringVar(&i.watchFilter, "watch-filter", "", "takes precedence over clusterAPI.watchFilter of the configuration file")
	root.Flags().StringVar(&i.leaderIdentity, "leader-identity", "", "who this replica is in the Lease, such as its pod's UID: a restarted replica of the same identity leads again at once (default: a new one with each start)")
	root.Flags().BoolVar(&i.audit, "audit", false, "audit: true, also if the configuration file says false: decide and report, and change no request")
	root.Flags().BoolVar(&i.revocation, "revocation", false, "revocation.enabled: true, also if the configuration file says false: refuse writes with revoked certificates")
	logs := flag.NewFlagSet("", flag.ContinueOnError)
	klog.InitFlags(logs)
	root.PersistentFlags().AddGoFlag(logs.Lookup("v"))
	root.PersistentFlags().Lookup("v").Shorthand = "v"
	root.PersistentFlags().Lookup("v").Usage = "log verbosity, to stderr"
	root.PersistentFlags().Var(&i.logFormat, "logging-format", "format of the log on stderr: text, or json with a line for each entry (default text)")
	root.PersistentPreRunE = func(*cobra.Command, []string) error {
		verbosity, err := strconv.Atoi(logs.Lookup("v").Value.String())
		i.logFormat.apply(i.Stderr, verbosity)
		return err
	}
	root.AddCommand(i.versionCommand(), i.verifyCommand(), i.inventoryCommand(), i.configCommand(), i.policiesCommand(), i.authorizerCommand())
	return root
}

// settings reads the configuration file and checks it.
func (i *invocation) settings() (*config.Settings, error) {
	c, err := config.Load(i.file)
	if err != nil {
		return nil, misconfigured(err)
	}
	switch {
	// all replicas would have this identity, and all would lead
	case strings.Contains(i.leaderIdentity, "$("):
		return nil, cli.Usage(fmt.Errorf("--leader-identity: %q refers to a variable that the pod's env does not have", i.leaderIdentity))
	case i.watchFilter != "" && c.ClusterAPI == nil:
		return nil, cli.Usage(errors.New("--watch-filter is for a configuration with clusterAPI"))
	case i.watchFilter != "":
		c.ClusterAPI.WatchFilter = i.watchFilter
	}
	// The flag cannot switch audit mode off: the stricter of the two decides.
	c.Audit = c.Audit || i.audit
	c.Revocation.Enabled = c.Revocation.Enabled || i.revocation
	settings, err := config.New(c)
	if err == nil && c.ClusterAPI != nil {
		err = i.checkManagement(settings)
	}
	if err != nil {
		return nil, misconfigured(fmt.Errorf("configuration file %s: %w", i.file, err))
	}
	return settings, nil
}

func (i *invocation) configCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "config",
		Short: "Check a configuration file, offline",
		Args:  cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return cli.Usage(fmt.Errorf("%s needs a command", c.CommandPath()))
		},
	}
	c.AddCommand(&cobra.Command{
		Use:   "check [FILE]",
		Short: "Check a configuration file as the controller reads it, without a cluster",
		Long: `Check a configuration file as the controller reads it, without a cluster. Objects that the file names, such as the inventory, are not
read: see inventory check, and kubectl attest check.

It exits with 0 if the controller would start, and with 10 if it would not.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return cli.Usage(errors.New("name one file"))
			}
			return nil
		},
		RunE: func(_ *cobra.Command, args []string) error {
			if len(args) == 1 {
				i.file = args[0]
			}
			settings, err := i.settings()
			if err != nil {
				return err
			}
			mode := "it enforces"
			if settings.Config().Audit {
				mode = "it audits, and changes no request"
			}
			_, err = fmt.Fprintf(i.Stdout, "%s: the controller would start: %s\n", i.file, mode)
			return err
		},
	})
	return c
}

func (i *invocation) checkManagement(settings *config.Settings) error {
	if i.Management == nil {
		return errors.New("clusterAPI: this program does not support Cluster API")
	}
	return i.Management.Check(settings)
}

func misconfigured(err error) error {
	return cli.Fail(CodeConfiguration, "see docs/controller-configuration.md for the fields of "+config.Kind, err)
}

func (i *invocation) versionCommand() *cobra.Command {
	return i.VersionCommand(controller.Name, cli.BuildInfo{Version: i.Version, Commit: i.Commit, Protocols: map[string][]string{tpm.Provider: {attestation.VersionTPM}}})
}
