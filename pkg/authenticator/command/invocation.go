// SPDX-License-Identifier: Apache-2.0

package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/enrol"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// Program has what differs between the binaries that use this package.
type Program struct {
	// Name is the binary's name: kubelet-authenticator, or kubelet-authenticator-<provider> for
	// that of an infrastructure provider.
	Name string
	// Providers are the attestation providers in the binary, the strongest first.
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
	// Choose names one of Providers for a machine that has not enrolled yet, and says why. If it is
	// nil, "auto" is no provider.
	Choose func(context.Context, provider.Settings) (name, why string)
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

// say prints an error that does not end the command.
func (i *invocation) say(err error) {
	hint := ""
	if failure, ok := errors.AsType[*reason.Failure](err); ok {
		hint = failure.Hint
	}
	i.Report(i.Name, err, hint)
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
	flags.StringVar(&c.ClusterUID, "cluster-uid", c.ClusterUID, "UID of the cluster, which a cloud's evidence is then bound to; providers ec2, ec2-role, gce, azure (default: none)")
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
		Config: config, ConfigError: loadErr, Providers: i.Providers, Choose: i.Choose, Exec: exec,
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

const (
	workerName   = "worker"
	detachedFlag = "detached"
)

// startWorker starts this program again as a worker, with its present flags, and env added to its
// environment.
func (i *invocation) startWorker(env ...string) (process.ID, error) {
	return authenticator.StartDetached(append([]string{workerName, "--" + detachedFlag}, i.givenFlags()...), env...)
}

// givenFlags returns the persistent flags that were given.
func (i *invocation) givenFlags() []string {
	var args []string
	i.root.PersistentFlags().VisitAll(func(f *pflag.Flag) {
		if f.Changed {
			args = append(args, "--"+f.Name+"="+f.Value.String())
		}
	})
	return args
}

// exec returns the exec user of a kubeconfig: this program, with its present flags.
func (i *invocation) exec(command string) (kubelet.Exec, error) {
	exec := kubelet.Exec{Command: command}
	if command == "" {
		self, err := os.Readlink("/proc/self/exe")
		if err != nil {
			return exec, fmt.Errorf("where this program is: %w", err)
		}
		// If an upgrade has replaced the file, the link ends in (deleted).
		exec.Command = strings.TrimSuffix(self, " (deleted)")
	}
	if !filepath.IsAbs(exec.Command) {
		return exec, cli.Usage(fmt.Errorf("--command %q: must be an absolute path", command))
	}
	// Refuse relative paths: the kubelet runs this program in another directory.
	for _, name := range []string{"config", "bootstrap-kubeconfig", "tpm-device"} {
		f := i.root.PersistentFlags().Lookup(name)
		if path := f.Value.String(); f.Changed && path != "" && !filepath.IsAbs(path) {
			return exec, cli.Usage(fmt.Errorf("--%s %q: must be an absolute path here: the kubelet runs this program in another directory", name, path))
		}
	}
	exec.Args = i.givenFlags()
	return exec, nil
}
