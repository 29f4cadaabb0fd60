// SPDX-License-Identifier: Apache-2.0

// Package command is the command line of kubelet-authenticator. An infrastructure provider calls
// Program.Main from a binary of its own, with a provider of its own.
package command

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/outputformat"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/terminal"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/enrol"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// Program has what differs between the binaries that use this package.
type Program struct {
	// Name is the binary's name: kubelet-authenticator, or kubelet-authenticator-<provider> for
	// that of an infrastructure provider.
	Name string
	// Providers are the attestation providers in the binary.
	Providers []provider.Factory
	// Version and Commit are those of the build. The User-Agent and the version command show
	// them.
	Version, Commit string
	// CommitTime is the time of that commit, in seconds since 1970, as in SOURCE_DATE_EPOCH. A
	// machine's clock that shows an earlier time is wrong. CommitTime is empty if the time is not
	// known.
	CommitTime string
	// DefaultProvider is used if the operator names none. If it is empty, the operator has to
	// name one.
	DefaultProvider string
	// WorkerDeadline is the longest life of one worker. Default:
	// authenticator.DefaultWorkerDeadline.
	WorkerDeadline time.Duration
	// OnStep is called before each step of a run and of a worker, if set.
	OnStep func(enrol.Step)
	// FlagValues returns the values that a shell completes for a flag of this name, such as
	// "ek-template". Default: those of the flags that this package knows.
	FlagValues func(flag string) []string
}

// Process has the parts of the process that main passes on. Stdout receives one JSON document, or
// what a person asked for.
type Process = cli.Process

// invocation is one call of the command line.
type invocation struct {
	Program
	Process
	root   *cobra.Command
	config authenticator.Config // from the flags alone
	file   string
	// askedBy is the file that the cluster was read from. It is empty if client-go named the
	// cluster, or if no cluster is named.
	askedBy string

	// The flags of the root command.
	dryRun, version bool
	output          string
}

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

// say prints an error that does not end the command.
func (i *invocation) say(err error) {
	hint := ""
	if failure, ok := errors.AsType[*reason.Failure](err); ok {
		hint = failure.Hint
	}
	i.Report(i.Name, err, hint)
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

// example returns the examples of a command's help, with the program's name for "{}".
func example(name, s string) string {
	indented := "  " + strings.ReplaceAll(strings.ReplaceAll(strings.TrimSpace(s), "{}", name), "\n", "\n  ")
	return strings.ReplaceAll(indented, "\n  \n", "\n\n")
}

// bind connects each setting with its flag.
func bind(flags *pflag.FlagSet, c *authenticator.Config) {
	flags.StringVar(&c.Provider, "provider", c.Provider, "attestation provider")
	flags.StringVar(&c.NodeName, "node-name", c.NodeName, "name of this machine's Node (default: as the kubelet computes it)")
	flags.StringVar(&c.ProviderID, "provider-id", c.ProviderID, "the machine's provider ID (default: the provider's)")
	flags.StringVar(&c.ProviderIDScheme, "provider-id-scheme", c.ProviderIDScheme, "make the provider ID from the system UUID: <scheme>://<uuid>")
	flags.StringVar(&c.SystemUUIDFrom, "system-uuid-from", c.SystemUUIDFrom, "field of the firmware that has the system UUID: product_uuid, or product_serial on vSphere (default: product_uuid)")
	flags.StringVar(&c.CertDir, "cert-dir", c.CertDir, "certificate directory")
	flags.StringVar(&c.RuntimeDir, "runtime-dir", c.RuntimeDir, "directory for the TPM's lock and the note of which certificate a run printed last; may be lost at a reboot")
	flags.StringVar(&c.BootstrapKubeconfig, "bootstrap-kubeconfig", c.BootstrapKubeconfig,
		"kubeconfig with the credential for the first certificate (default: bootstrap.kubeconfig in the certificate directory, then kubeadm's)")
	flags.BoolVar(&c.KeepBootstrapCredential, "keep-bootstrap-credential", c.KeepBootstrapCredential, "keep the copy of the bootstrap kubeconfig that \"prepare\" makes")
	flags.StringVar(&c.KubeletKubeconfig, "kubelet-kubeconfig", c.KubeletKubeconfig, "the kubelet's kubeconfig")
	flags.StringVar(&c.KubeletBootstrapKubeconfig, "kubelet-bootstrap-kubeconfig", c.KubeletBootstrapKubeconfig, "the kubelet's bootstrap kubeconfig, which kubeadm writes and deletes")
	flags.DurationVar(&c.PrepareWait.Duration, "prepare-wait", c.PrepareWait.Duration, "longest wait of \"prepare\" for the node's first certificate")
	flags.StringVar(&c.SignerName, "signer-name", c.SignerName, "signer to ask (default: the provider's)")
	flags.DurationVar(&c.Expiration.Duration, "expiration", c.Expiration.Duration, "lifetime to ask for, 10m to 87600h; 0 leaves it to the signer")
	flags.DurationVar(&c.WaitTimeout.Duration, "wait-timeout", c.WaitTimeout.Duration, "longest wait if there is no certificate to print")
	flags.DurationVar(&c.RenewalWait.Duration, "renewal-wait", c.RenewalWait.Duration, "longest wait for a new certificate if the old one ends within 2s, is rejected, or is another cluster's")
	flags.DurationVar(&c.CheckInterval.Duration, "check-interval", c.CheckInterval.Duration, "longest time between two checks for announced renewals, 10s to 24h; 0 switches them off")
	flags.StringVar(&c.MetricsTextfile, "metrics-textfile", c.MetricsTextfile, "file for the metrics of workers, for node-exporter's textfile collector (default: none)")
	flags.StringVar(&c.TPMDevice, "tpm-device", c.TPMDevice, "TPM device, or Unix socket of a software TPM (default: as the provider finds it)")
	flags.StringVar(&c.EKTemplate, "ek-template", c.EKTemplate, "template of the TPM's endorsement key to use, such as rsa-2048; auto leaves the choice to the provider")
}

// settings returns the settings. A flag overrides the file, and the file overrides the defaults.
// The error is about the file. With an error, the flags override the Config that LoadConfig
// returned.
func (i *invocation) settings() (authenticator.Config, error) {
	given := i.root.PersistentFlags()
	config, loadErr := authenticator.LoadConfig(i.file, !given.Changed("config"))
	if config.Provider == "" {
		config.Provider = i.DefaultProvider
	}
	merged := pflag.NewFlagSet("", pflag.ContinueOnError)
	bind(merged, &config)
	given.VisitAll(func(f *pflag.Flag) {
		if f.Changed && merged.Lookup(f.Name) != nil {
			_ = merged.Set(f.Name, f.Value.String()) // cannot fail: the value was parsed before
		}
	})
	return config, loadErr
}

// load returns an Authenticator for the settings and client-go's request. With an error, the
// Authenticator may still be set. Then its Run can print a valid certificate.
func (i *invocation) load() (*authenticator.Authenticator, error) {
	config, err := i.settings()
	return i.newAuthenticator(config, err, i.Getenv(authenticator.ExecInfoVariable))
}

// newAuthenticator makes an Authenticator from settings that were read with loadErr. execInfo is
// client-go's request. A worker is started with env added to its environment. If execInfo cannot be
// read, there is no Authenticator.
func (i *invocation) newAuthenticator(config authenticator.Config, loadErr error, execInfo string, env ...string) (*authenticator.Authenticator, error) {
	exec, err := authenticator.ParseExecInfo(execInfo)
	if err != nil {
		return nil, err
	}
	exec.Source = i.askedBy
	return authenticator.New(authenticator.Options{
		Config: config, ConfigError: loadErr, Providers: i.Providers, Exec: exec,
		Parent: authenticator.Caller(exec), UserAgent: i.userAgent(),
		StartWorker:    func() (process.ID, error) { return i.startWorker(env...) },
		WorkerDeadline: i.WorkerDeadline, Built: i.built(), OnStep: i.OnStep,
	})
}

func (p Program) built() time.Time {
	seconds, err := strconv.ParseInt(p.CommitTime, 10, 64)
	if err != nil {
		return time.Time{}
	}
	return time.Unix(seconds, 0)
}

func (i *invocation) userAgent() string { return i.Name + "/" + i.Version }

// deadline is the longest life of a worker, and of a command that a person waits for.
func (i *invocation) deadline() time.Duration {
	return cmp.Or(i.WorkerDeadline, authenticator.DefaultWorkerDeadline)
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
		return err // there is no answer that client-go would understand
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
