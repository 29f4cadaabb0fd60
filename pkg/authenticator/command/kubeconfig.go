// SPDX-License-Identifier: Apache-2.0

package command

import (
	"fmt"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
)

// clusterFlags describe the cluster if there is no bootstrap kubeconfig.
type clusterFlags struct{ server, ca, serverName, proxyURL string }

func (i *invocation) kubeconfigCommand() *cobra.Command {
	var to, command string
	var given clusterFlags
	c := &cobra.Command{
		Use:   "kubeconfig",
		Short: "Print or write the kubelet's kubeconfig, with this program as its user",
		Long: `Print a kubeconfig whose user is this program, or write it with --write. The cluster is that of the bootstrap kubeconfig, unless
--server names one. The flags that configure this program become its arguments there.

A kubeconfig whose user is not this program is never written over.`,
		Example: example(i.Name, `
# print it, for the cluster of the bootstrap kubeconfig
{} kubeconfig

# write it for a cluster that no bootstrap kubeconfig names
{} kubeconfig --write=/etc/kubernetes/kubelet.conf --server=https://cluster.example.com:6443 \
    --certificate-authority=/etc/kubelet-authenticator/ca.crt`),
		Args: cli.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			config, err := i.settings()
			if _, err := i.newAuthenticator(config, err, ""); err != nil {
				return err
			}
			exec, err := i.exec(command)
			if err != nil {
				return err
			}
			cluster, err := given.find(config, exec.Command)
			if err != nil {
				return err
			}
			content, err := kubelet.RenderKubeconfig(cluster, exec)
			if err != nil {
				return cli.Usage(err)
			}
			if to == "" {
				_, err = i.Stdout.Write(content)
				return err
			}
			return i.writeKubeconfig(to, content, exec.Command)
		},
	}
	c.Flags().StringVar(&to, "write", "", "write it to this file, 0600, instead of printing it")
	c.Flags().StringVar(&command, "command", "", "absolute path of this program on the node (default: where it is)")
	c.Flags().StringVar(&given.server, "server", "", "URL of the API server")
	c.Flags().StringVar(&given.ca, "certificate-authority", "", "with --server: file with the API server's CA, which is copied")
	c.Flags().StringVar(&given.serverName, "tls-server-name", "", "with --server: name to check the API server's certificate for")
	c.Flags().StringVar(&given.proxyURL, "proxy-url", "", "with --server: URL of the proxy to the API server")
	return c
}

// find returns the cluster to write.
func (f clusterFlags) find(config authenticator.Config, ours string) (cache.Origin, error) {
	if f.server == "" {
		if f != (clusterFlags{}) {
			return cache.Origin{}, cli.Usage(fmt.Errorf("--certificate-authority, --tls-server-name and --proxy-url go with --server"))
		}
		return findCluster(config, ours)
	}
	cluster := cache.Origin{Server: f.server, TLSServerName: f.serverName, ProxyURL: f.proxyURL}
	if err := kubelet.CheckCluster(cluster); err != nil {
		return cluster, cli.Usage(err)
	}
	if f.ca != "" {
		ca, err := kubelet.ReadCA(f.ca)
		if err != nil {
			return cluster, cli.Usage(fmt.Errorf("--certificate-authority: %w", err))
		}
		cluster.CertificateAuthorityData = ca
	}
	return cluster, nil
}

// findCluster takes the cluster from the first existing bootstrap kubeconfig.
func findCluster(config authenticator.Config, ours string) (cache.Origin, error) {
	paths := []string{config.BootstrapKubeconfig}
	if config.BootstrapKubeconfig == "" {
		paths = []string{config.KubeletBootstrapKubeconfig, filepath.Join(config.CertDir, cache.BootstrapFile)}
	}
	for _, path := range paths {
		k := kubelet.ReadKubeconfig(path, ours)
		if k.Kind == kubelet.Missing {
			continue
		}
		for _, err := range []error{k.Problem, k.ClusterProblem} {
			if err != nil {
				return cache.Origin{}, &reason.Failure{Reason: reason.Configuration, Hint: "name another with --bootstrap-kubeconfig, or the cluster with --server", Err: err}
			}
		}
		return k.Cluster, nil
	}
	return cache.Origin{}, &reason.Failure{
		Reason: reason.NoBootstrap, Hint: "name one with --bootstrap-kubeconfig, or the cluster with --server and --certificate-authority",
		Err: fmt.Errorf("no bootstrap kubeconfig names the cluster: %q: no such file", paths),
	}
}

func (i *invocation) writeKubeconfig(path string, content []byte, ours string) error {
	path, err := filepath.Abs(path)
	if err != nil {
		return err
	}
	written, err := kubelet.WriteKubeconfig(path, content, ours)
	if err != nil {
		return notWritten(err)
	}
	if !written {
		i.tell("%s: is as it should be", path)
		return nil
	}
	i.tell("wrote %s", path)
	return nil
}
