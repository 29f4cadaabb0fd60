// SPDX-License-Identifier: Apache-2.0

// Package workload reaches workload clusters of Cluster API. Their owners write their kubeconfigs
// and run their API servers, so neither is trusted.
package workload

import (
	"errors"
	"net/netip"
	"net/url"
	"strings"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// maxHost limits a server's host and port, in bytes. Both are a label of client-go's metrics, which
// panic if a label is not UTF-8. So only printable ASCII is accepted.
const maxHost = 253 + len("[]:65535")

// ParseKubeconfig parses the kubeconfig of a workload cluster. Its writer must not make the reader
// run a program, or send one of the reader's files to a server. So everything must be in the
// kubeconfig itself. A server with a link-local address is refused. Errors quote nothing of the
// kubeconfig.
func ParseKubeconfig(kubeconfig []byte) (*clientcmdapi.Config, error) {
	config, err := clientcmd.Load(kubeconfig)
	if err != nil || len(kubeconfig) == 0 {
		return nil, errors.New("does not hold a kubeconfig")
	}
	for _, cluster := range config.Clusters {
		server, err := url.Parse(cluster.Server)
		switch {
		case cluster.CertificateAuthority != "":
			return nil, errors.New("the kubeconfig names a file: certificate-authority")
		case !strings.HasPrefix(strings.ToLower(cluster.Server), "https://"):
			return nil, errors.New("the kubeconfig names a server that is not reached by https")
		case err != nil || server.Hostname() == "" || len(server.Host) > maxHost || strings.ContainsFunc(server.Host, func(r rune) bool { return r <= ' ' || r > '~' }):
			return nil, errors.New("the kubeconfig names a server that is not a URL with a host")
		case linkLocal(server.Hostname()):
			return nil, errors.New("the kubeconfig names a server with a link-local address, where platforms serve metadata")
		case cluster.ProxyURL != "":
			return nil, errors.New("the kubeconfig names a proxy: proxy-url; set the proxy in the environment of the controller instead")
		case cluster.InsecureSkipTLSVerify:
			return nil, errors.New("the kubeconfig disables the check of the server's certificate: insecure-skip-tls-verify")
		}
		cluster.DisableCompression = true // a small answer could expand to a huge one
	}
	for _, info := range config.AuthInfos {
		if problem := externalReference(info); problem != "" {
			return nil, errors.New("the kubeconfig " + problem)
		}
	}
	return config, nil
}

// linkLocal reports whether a host is an address in 169.254.0.0/16 (RFC 3927) or fe80::/10 (RFC
// 4291, section 2.5.6), also as an IPv4-mapped address. Platforms serve metadata at such addresses,
// and no workload cluster has one. Names are not resolved here, because the caller's client
// resolves them again. Cluster API's ClusterCache also follows redirects, and has no hook for
// either. docs/threat-model.md says what remains.
func linkLocal(host string) bool {
	address, err := netip.ParseAddr(host)
	return err == nil && address.Unmap().IsLinkLocalUnicast()
}

// externalReference says which part of a credential is not in the kubeconfig itself.
func externalReference(info *clientcmdapi.AuthInfo) string {
	switch {
	case info.TokenFile != "":
		return "names a file: tokenFile"
	case info.ClientCertificate != "":
		return "names a file: client-certificate"
	case info.ClientKey != "":
		return "names a file: client-key"
	case info.Exec != nil:
		return "wants to run a program: exec"
	case info.AuthProvider != nil:
		return "wants an auth-provider"
	}
	return ""
}
