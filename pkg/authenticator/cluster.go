// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"strings"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// access is where a request goes and whose credential goes with it.
type access struct {
	config *rest.Config
	// cluster is the one that the certificate will come from.
	cluster cache.Origin
	// credential says in words whose it is.
	credential string
	// own is set when it is the node's own certificate.
	own bool
}

// requester tells credentials apart: both rounds have to go under one, since the controller compares who asked. It is a hash.
func (a access) requester() string {
	if a.own {
		return "node" // whichever certificate it is, the name in it is the node's
	}
	sum := sha256.Sum256([]byte(strings.Join([]string{a.config.BearerToken, a.config.BearerTokenFile, string(a.config.CertData)}, "\x00")))
	return hex.EncodeToString(sum[:])
}

// access shows the node's own certificate where that may ask for the next one, else the bootstrap credential.
func (o *Options) access(s standing) (access, error) {
	if s.pair != nil && !s.rejected && !s.foreign && o.renews() {
		return o.ownAccess(s.pair)
	}
	return o.bootstrapAccess()
}

// ownAccess shows the node's certificate to the cluster asked for; where the question names none, to the one that the
// certificate came from, or to the one of the bootstrap kubeconfig.
func (o *Options) ownAccess(pair *cache.Pair) (access, error) {
	a := access{credential: "the node's own certificate", own: true} //nolint:gosec // G101: words, not a secret
	var err error
	switch {
	case o.exec.Cluster != nil:
		a.cluster = *o.exec.origin()
		a.config, err = o.exec.restConfig()
	case pair.Origin != nil:
		a.cluster = *pair.Origin
		a.config, err = clusterConfig(*pair.Origin)
	default:
		bootstrap, err := o.bootstrapAccess()
		if err != nil {
			return access{}, &Failure{Configuration, "set provideClusterInfo: true in the kubeconfig's exec stanza",
				fmt.Errorf("no cluster to ask: neither client-go nor the certificate names one, and %w", err)}
		}
		a.cluster = bootstrap.cluster
		a.config, err = clusterConfig(bootstrap.cluster)
		if err != nil {
			return access{}, err
		}
	}
	if err != nil {
		return access{}, &Failure{Configuration, "check the cluster in the kubelet's kubeconfig", err}
	}
	a.config.UserAgent = o.UserAgent
	a.config.CertData, a.config.KeyData = pair.Chain, pair.Key
	return a, nil
}

// bootstrapAccess shows the bootstrap kubeconfig's credential to the server and the CA of that same kubeconfig, and to no other.
func (o *Options) bootstrapAccess() (access, error) {
	paths := []string{o.bootstrapKubeconfig}
	if o.bootstrapKubeconfig == "" {
		paths = []string{o.dir.File(cache.BootstrapFile), o.kubeletBootstrap}
	}
	missing := &Failure{NoBootstrap,
		"put a bootstrap kubeconfig there, or name one with --bootstrap-kubeconfig (kubeadm token create --print-join-command)",
		fmt.Errorf("no bootstrap kubeconfig: %q: no such file", paths)}
	for _, path := range paths {
		a, err := readBootstrap(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return access{}, err
		}
		a.config.UserAgent = o.UserAgent
		if asked := o.exec.origin(); asked != nil {
			if !asked.SameCluster(a.cluster) {
				missing = &Failure{NoBootstrap, "give the bootstrap kubeconfig of the cluster that the kubelet's kubeconfig names",
					fmt.Errorf("bootstrap kubeconfig %s: is for %s, but the kubelet asks for %s, with another CA", path, a.cluster.Server, asked.Server)}
				continue
			}
			a.cluster = *asked
		}
		return a, nil
	}
	return access{}, missing
}

// readBootstrap reads a kubeconfig and refuses what this program must not use. The error is fs.ErrNotExist where there is no file.
func readBootstrap(path string) (access, error) {
	wrong := func(hint string, err error) (access, error) {
		return access{}, &Failure{Configuration, hint, fmt.Errorf("bootstrap kubeconfig %s: %w", path, err)}
	}
	kubeconfig, err := clientcmd.LoadFromFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return access{}, err
	}
	const shape = "it needs a current-context with an https server and a user with a token or a client certificate"
	if err != nil {
		return wrong(shape, errors.New("cannot be read as a kubeconfig")) // the cause may quote a token
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
		return wrong(shape, errors.New(oneLine(err.Error())))
	}
	if err := rest.LoadTLSFiles(config); err != nil {
		return wrong(shape, err)
	}
	cluster := cache.Origin{Server: config.Host, TLSServerName: config.ServerName, CertificateAuthorityData: config.CAData, ProxyURL: proxyURL}
	if _, err := clusterConfig(cluster); err != nil {
		return wrong(shape, err)
	}
	if config.BearerToken == "" && config.BearerTokenFile == "" && len(config.CertData) == 0 {
		return wrong(shape, errors.New("its user has neither a token nor a client certificate"))
	}
	return access{config: config, cluster: cluster, credential: "bootstrap kubeconfig " + path}, nil
}
