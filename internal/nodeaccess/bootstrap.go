// SPDX-License-Identifier: Apache-2.0

package nodeaccess

import (
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"strings"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// readBootstrap reads a bootstrap kubeconfig, and refuses one that this program must not use. The
// error is fs.ErrNotExist if there is no file. Its text quotes nothing of the file, which holds a
// credential.
func readBootstrap(path string) (Access, error) {
	wrong := func(hint string, err error) (Access, error) {
		return Access{}, &Error{Misconfigured, hint, fmt.Errorf("bootstrap kubeconfig %s: %w", path, err)}
	}
	const shape = "it needs a current-context with an https server and a user with a token or a client certificate"
	kubeconfig, err := clientcmd.LoadFromFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return Access{}, err
	case errors.Is(err, fs.ErrPermission):
		return wrong("run it as root", fs.ErrPermission)
	case err != nil:
		// the cause may quote a token
		return wrong(shape, errors.New("cannot be read as a kubeconfig"))
	}
	if err := clientcmd.ResolveLocalPaths(kubeconfig); err != nil {
		return wrong(shape, err)
	}
	proxyURL := ""
	if current, ok := kubeconfig.Contexts[kubeconfig.CurrentContext]; ok {
		if user, ok := kubeconfig.AuthInfos[current.AuthInfo]; ok && (user.Exec != nil || user.AuthProvider != nil) {
			return wrong("use a token or a client certificate: an exec plugin here could start this program for ever", errors.New("its user is an exec plugin or an auth provider"))
		}
		if cluster, ok := kubeconfig.Clusters[current.Cluster]; ok {
			if cluster.InsecureSkipTLSVerify {
				return wrong("set certificate-authority-data instead", errInsecureTLS)
			}
			if _, err := url.Parse(cluster.ProxyURL); err != nil {
				return wrong(shape, errProxyURL)
			}
			proxyURL = cluster.ProxyURL
		}
	}
	config, err := clientcmd.NewDefaultClientConfig(*kubeconfig, &clientcmd.ConfigOverrides{}).ClientConfig()
	if err != nil {
		// it has several lines
		return wrong(shape, errors.New(strings.Join(strings.Fields(err.Error()), " ")))
	}
	if err := rest.LoadTLSFiles(config); err != nil {
		return wrong(shape, err)
	}
	cluster := cache.Origin{Server: config.Host, TLSServerName: config.ServerName, CertificateAuthorityData: config.CAData, ProxyURL: proxyURL}
	if _, err := ClusterConfig(cluster); err != nil {
		return wrong(shape, err)
	}
	if config.BearerToken == "" && config.BearerTokenFile == "" && len(config.CertData) == 0 {
		return wrong(shape, errors.New("its user has neither a token nor a client certificate"))
	}
	return Access{Config: config, Cluster: cluster, Source: path, Credential: "bootstrap kubeconfig " + path}, nil
}
