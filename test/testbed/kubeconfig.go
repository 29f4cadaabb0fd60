// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// KubeconfigOption changes what a kubeconfig says about the cluster.
type KubeconfigOption func(*clientcmdapi.Cluster)

// WithServer points the kubeconfig elsewhere, for example to a Proxy.
func WithServer(url string) KubeconfigOption {
	return func(c *clientcmdapi.Cluster) { c.Server = url }
}

// WithServerCA makes the kubeconfig trust another authority.
func WithServerCA(pem []byte) KubeconfigOption {
	return func(c *clientcmdapi.Cluster) { c.CertificateAuthorityData = pem }
}

// AdminUser is a member of system:masters.
func (cp *ControlPlane) AdminUser() *clientcmdapi.AuthInfo { return CertificateUser(cp.admin) }

// CertificateUser authenticates with a client certificate.
func CertificateUser(pair KeyPair) *clientcmdapi.AuthInfo {
	return &clientcmdapi.AuthInfo{
		ClientCertificateData: pair.CertPEM,
		ClientKeyData:         pair.KeyPEM,
	}
}

// TokenUser authenticates with a bearer token.
func TokenUser(token string) *clientcmdapi.AuthInfo {
	return &clientcmdapi.AuthInfo{Token: token}
}

// ExecUser authenticates through an exec credential plugin that never asks.
// The command must be absolute: a relative one would be taken as relative to
// the kubeconfig's folder.
func ExecUser(apiVersion, command string, args []string, env map[string]string, provideClusterInfo bool) *clientcmdapi.AuthInfo {
	plugin := &clientcmdapi.ExecConfig{
		APIVersion:         apiVersion,
		Command:            command,
		Args:               args,
		InteractiveMode:    clientcmdapi.NeverExecInteractiveMode,
		ProvideClusterInfo: provideClusterInfo,
	}
	for _, name := range slices.Sorted(maps.Keys(env)) {
		plugin.Env = append(plugin.Env, clientcmdapi.ExecEnvVar{Name: name, Value: env[name]})
	}
	return &clientcmdapi.AuthInfo{Exec: plugin}
}

// Kubeconfig returns a kubeconfig with this user, and with the server's
// authority inlined.
func (cp *ControlPlane) Kubeconfig(user *clientcmdapi.AuthInfo, opts ...KubeconfigOption) []byte {
	const name = "testbed"
	config := clientcmdapi.NewConfig()
	cluster := clientcmdapi.NewCluster()
	cluster.Server = cp.ServerURL()
	cluster.CertificateAuthorityData = cp.ServerCA()
	for _, opt := range opts {
		opt(cluster)
	}
	config.Clusters[name] = cluster
	config.AuthInfos[name] = user
	config.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: name}
	config.CurrentContext = name
	data, err := clientcmd.Write(*config)
	if err != nil {
		// Plain data was given to a known type's encoder: a bug in the test bed.
		panic(fmt.Sprintf("testbed: encode a kubeconfig: %v", err))
	}
	return data
}

// AdminKubeconfig returns a kubeconfig of a member of system:masters.
func (cp *ControlPlane) AdminKubeconfig(opts ...KubeconfigOption) []byte {
	return cp.Kubeconfig(cp.AdminUser(), opts...)
}

// BootstrapKubeconfig returns a kubeconfig with a bearer token.
func (cp *ControlPlane) BootstrapKubeconfig(token string, opts ...KubeconfigOption) []byte {
	return cp.Kubeconfig(TokenUser(token), opts...)
}

// ExecKubeconfig returns a kubeconfig with an exec credential plugin; see
// ExecUser.
func (cp *ControlPlane) ExecKubeconfig(apiVersion, command string, args []string, env map[string]string, provideClusterInfo bool, opts ...KubeconfigOption) []byte {
	return cp.Kubeconfig(ExecUser(apiVersion, command, args, env, provideClusterInfo), opts...)
}

// WriteKubeconfig writes a kubeconfig with this user, readable by its owner
// only.
func (cp *ControlPlane) WriteKubeconfig(path string, user *clientcmdapi.AuthInfo, opts ...KubeconfigOption) error {
	if err := os.WriteFile(path, cp.Kubeconfig(user, opts...), 0o600); err != nil {
		return fmt.Errorf("write kubeconfig: %w", err)
	}
	return nil
}

// RunKubectl runs kubectl with this kubeconfig and returns its stdout; its
// stderr is part of the error.
func (cp *ControlPlane) RunKubectl(ctx context.Context, kubeconfig string, args ...string) (string, error) {
	all := append([]string{
		"--kubeconfig=" + kubeconfig,
		"--cache-dir=" + cp.path("kubectl-cache"), // not the developer's
	}, args...)
	cmd := exec.CommandContext(ctx, cp.Kubectl(), all...) //nolint:gosec // running kubectl is the purpose
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("kubectl %v: %w\n%s", args, err, stderr.String())
	}
	return stdout.String(), nil
}
