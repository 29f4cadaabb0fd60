// SPDX-License-Identifier: Apache-2.0

package nodeaccess

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/trustedfile"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// readKubeconfig reads a kubeconfig with a credential, and refuses one that this program must not
// use. The error is fs.ErrNotExist if there is no file. Its text quotes nothing of the file. what
// names the kubeconfig in messages.
func readKubeconfig(what, path string) (Access, error) {
	wrong := func(hint string, err error) (Access, error) {
		return Access{}, &Error{Misconfigured, hint, fmt.Errorf("%s %s: %w", what, path, err)}
	}
	const shape = "it needs a current-context with an https server and a user with a token or a client certificate"
	data, err := trustedfile.Read(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return Access{}, err
	case errors.Is(err, fs.ErrPermission):
		return wrong("run it as root", fs.ErrPermission)
	case err != nil:
		return wrong(trustedfile.Hint(err, shape), err)
	}
	kubeconfig, err := clientcmd.Load(data)
	if err != nil {
		// the cause may quote a token
		return wrong(shape, errors.New("cannot be read as a kubeconfig"))
	}
	proxyURL := ""
	if current, ok := kubeconfig.Contexts[kubeconfig.CurrentContext]; ok {
		user, hasUser := kubeconfig.AuthInfos[current.AuthInfo]
		if hasUser && (user.Exec != nil || user.AuthProvider != nil) {
			return wrong("use a token or a client certificate: an exec plugin here could start this program for ever", errors.New("its user is an exec plugin or an auth provider"))
		}
		cluster, hasCluster := kubeconfig.Clusters[current.Cluster]
		if hasCluster {
			if cluster.InsecureSkipTLSVerify {
				return wrong("set certificate-authority-data instead", errInsecureTLS)
			}
			if err := checkProxy(cluster.ProxyURL); err != nil {
				return wrong(shape, err)
			}
			proxyURL = cluster.ProxyURL
		}
		if hasUser && hasCluster {
			if err := inline(filepath.Dir(path), cluster, user); err != nil {
				return wrong(trustedfile.Hint(err, shape), err)
			}
		}
	}
	config, err := clientcmd.NewDefaultClientConfig(*kubeconfig, &clientcmd.ConfigOverrides{}).ClientConfig()
	if err != nil {
		// it has several lines
		return wrong(shape, errors.New(strings.Join(strings.Fields(err.Error()), " ")))
	}
	cluster := cache.Origin{Server: config.Host, TLSServerName: config.ServerName, CertificateAuthorityData: config.CAData, ProxyURL: proxyURL}
	if _, err := ClusterConfig(cluster); err != nil {
		return wrong(shape, err)
	}
	if config.BearerToken == "" && len(config.CertData) == 0 {
		return wrong(shape, errors.New("its user has neither a token nor a client certificate"))
	}
	return Access{Config: config, Cluster: cluster, Source: path, Credential: what + " " + path}, nil
}

// inline replaces the files that a kubeconfig in dir names by their content, so that client-go
// reads no file. A running worker does not see a later change of the token's file. As in client-go,
// the token's file has precedence over a token, and data over other files.
func inline(dir string, cluster *clientcmdapi.Cluster, user *clientcmdapi.AuthInfo) error {
	var token []byte
	for _, named := range []struct {
		field string
		file  *string
		data  *[]byte
	}{
		{"certificate-authority", &cluster.CertificateAuthority, &cluster.CertificateAuthorityData},
		{"client-certificate", &user.ClientCertificate, &user.ClientCertificateData},
		{"client-key", &user.ClientKey, &user.ClientKeyData},
		{"tokenFile", &user.TokenFile, &token},
	} {
		if *named.file == "" {
			continue
		}
		path := *named.file
		if !filepath.IsAbs(path) {
			path = filepath.Join(dir, path)
		}
		content, err := trustedfile.Read(path)
		if errors.Is(err, fs.ErrNotExist) {
			// not wrapped, since the caller takes fs.ErrNotExist for a missing kubeconfig
			return fmt.Errorf("%s: %s: no such file", named.field, path)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", named.field, err)
		}
		if len(*named.data) == 0 {
			*named.data = content
		}
		*named.file = ""
	}
	if len(token) > 0 {
		user.Token = strings.TrimSpace(string(token))
	}
	return nil
}
