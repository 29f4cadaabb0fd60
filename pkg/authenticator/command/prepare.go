// SPDX-License-Identifier: Apache-2.0

package command

import (
	"cmp"
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/spf13/cobra"
	clientauthentication "k8s.io/client-go/pkg/apis/clientauthentication/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/oserror"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
)

func (i *invocation) prepareCommand() *cobra.Command {
	var envFile, manifests, kubeletConfig, command string
	c := &cobra.Command{
		Use:   "prepare",
		Short: "Before the kubelet starts: set it up to use this program, and wait for the node's first certificate",
		Long: `Run by the kubelet's unit before the kubelet (ExecStartPre). It changes nothing if there is no configuration file, if the
machine has no credential to join with, or if another program wrote the kubelet's kubeconfig. Otherwise it keeps a copy of the bootstrap kubeconfig, writes the
kubelet's kubeconfig if there is none, and the environment file with the kubelet's flags. Before a worker node's first certificate
it waits for that, says what the request waits for, and fails if the certificate does not come.`,
		Example: example(i.Name, `
# what the kubelet's unit runs
{} prepare

# on a machine whose kubelet has another configuration file
{} prepare --kubelet-config=/etc/kubelet/config.yaml`),
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			config, loadErr := i.settings()
			exec, err := i.exec(command)
			if err != nil {
				return err
			}
			return i.prepare(cmd.Context(), config, loadErr, kubelet.Setup{
				Config: i.file, Invalid: loadErr != nil && !errors.Is(loadErr, fs.ErrNotExist), Kubeconfig: config.KubeletKubeconfig, Bootstrap: config.KubeletBootstrapKubeconfig,
				Static: config.BootstrapKubeconfig, KubeletConfig: kubeletConfig, EnvFile: envFile, Manifests: manifests, Certs: cache.At(config.CertDir), Exec: exec,
			})
		},
	}
	c.Flags().StringVar(&envFile, "env-file", kubelet.EnvFile, "environment file of the kubelet's unit")
	c.Flags().StringVar(&manifests, "manifests", kubelet.ManifestsDir, "directory of static pods; with "+kubelet.ServerManifest+" in it, this is a control plane")
	c.Flags().StringVar(&kubeletConfig, "kubelet-config", kubelet.ConfigFile, "the kubelet's configuration file: while it is missing, bootstrapKubeconfig does not count as a credential")
	c.Flags().StringVar(&command, "command", "", "absolute path of this program, for the kubeconfig (default: where it is)")
	return c
}

// prepare fails only if the kubelet must not start, or if a worker node has not got its first
// certificate. After the first certificate it only reports problems, and the kubelet uses the
// certificate that it has.
func (i *invocation) prepare(ctx context.Context, config authenticator.Config, loadErr error, setup kubelet.Setup) error {
	if err := setup.Check(); err != nil {
		return &reason.Failure{Reason: reason.Configuration, Hint: "see --help and kubelet-authenticator-config(5), docs/configuration.md, for what each setting may be", Err: err}
	}
	p, err := kubelet.Prepare(setup, func(line string) { i.tell("%s", line) })
	for _, problem := range p.Problems {
		i.say(notWritten(problem))
	}
	if err != nil {
		return notWritten(err)
	}
	if errors.Is(loadErr, fs.ErrNotExist) {
		loadErr = nil // no file means the defaults, which Prepare has used
	}
	if !p.Enabled {
		if p.Foreign {
			return nil
		}
		return loadErr // a valid file might name other paths
	}
	info, err := execInfo(p.Cluster)
	if err != nil {
		return err
	}
	a, err := i.newAuthenticator(config, loadErr, info, authenticator.ExecInfoVariable+"="+info)
	if a == nil {
		return err
	}
	if p.First {
		if err != nil {
			return err // waiting would not help
		}
		return i.awaitFirst(ctx, a, config.PrepareWait.Duration)
	}
	if err != nil {
		i.say(err)
	}
	i.discardBootstrap(ctx, a)
	return nil
}

func (i *invocation) awaitFirst(ctx context.Context, a *authenticator.Authenticator, wait time.Duration) error {
	i.tell("waiting up to %s for this node's first certificate", wait)
	leaf, err := a.AwaitFirst(ctx, wait, i.say)
	if err != nil {
		return err
	}
	i.tellCertificate(leaf)
	i.discardBootstrap(ctx, a)
	return nil
}

func (i *invocation) tellCertificate(leaf *x509.Certificate) {
	i.tell("%s has a certificate, valid until %s", leaf.Subject.CommonName, leaf.NotAfter.UTC().Format(time.RFC3339))
}

func (i *invocation) discardBootstrap(ctx context.Context, a *authenticator.Authenticator) {
	deleted, err := a.DiscardBootstrap(ctx)
	if err != nil {
		i.say(err)
	}
	if deleted {
		i.tell("deleted %s: the node has a certificate of its own", cache.BootstrapFile)
	}
}

// execInfo returns the request that client-go would send for the kubelet's kubeconfig. With it, a
// worker uses the same cluster as the kubelet.
func execInfo(cluster cache.Origin) (string, error) {
	ask := clientauthentication.ExecCredential{Spec: clientauthentication.ExecCredentialSpec{Cluster: &clientauthentication.Cluster{
		Server: cluster.Server, TLSServerName: cluster.TLSServerName, ProxyURL: cluster.ProxyURL, CertificateAuthorityData: cluster.CertificateAuthorityData,
	}}}
	ask.APIVersion, ask.Kind = clientauthentication.SchemeGroupVersion.String(), "ExecCredential"
	data, err := json.Marshal(ask)
	return string(data), err
}

// notWritten returns the Failure for an error about a file outside the certificate directory.
func notWritten(err error) error {
	var write *cache.WriteError
	var unprepared *kubelet.UnpreparedError
	if errors.As(err, &write) || errors.As(err, &unprepared) {
		return &reason.Failure{Reason: reason.KubeletNotPrepared, Hint: cmp.Or(oserror.Directory(err, ""),
			"see who owns the file and its directory, their modes, and whether the file system is full or read-only"), Err: err}
	}
	return reason.AsFailure(err)
}

// tell prints one line on standard error about what succeeded.
func (i *invocation) tell(format string, args ...any) {
	_, _ = fmt.Fprintf(i.Stderr, "%s: %s\n", i.Name, text.Line(fmt.Sprintf(format, args...), cli.MaxLine))
}
