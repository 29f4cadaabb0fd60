// SPDX-License-Identifier: Apache-2.0

package nodeaccess

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net/url"
	"slices"
	"strings"

	"golang.org/x/net/http/httpproxy"
	"k8s.io/client-go/rest"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// proxySchemes are those that client-go takes. Go takes environmentSchemes from the environment.
var (
	proxySchemes       = []string{"http", "https", "socks5"}
	environmentSchemes = append(slices.Clone(proxySchemes), "socks5h")
)

func isProxy(value string, schemes []string) bool {
	proxy, err := url.Parse(value)
	return err == nil && proxy.Host != "" && slices.Contains(schemes, proxy.Scheme)
}

// checkProxy refuses what client-go refuses, too. client-go would quote a password in it.
func checkProxy(proxyURL string) error {
	if proxyURL != "" && !isProxy(proxyURL, proxySchemes) {
		return errors.New("proxy-url: needs a host, and one of the schemes " + strings.Join(proxySchemes, ", "))
	}
	return nil
}

// errProxyEnvironment quotes nothing of the value, which may have a password.
var errProxyEnvironment = errors.New("HTTPS_PROXY in the environment is not the URL of a proxy")

// checkEnvironment refuses a proxy in the environment that cannot be used. Go takes a part of such
// a value for a host, or connects without a proxy. A proxy-url in the kubeconfig goes before it.
func (a Access) checkEnvironment() error {
	server, err := url.Parse(a.Config.Host)
	if err != nil || a.Config.Proxy != nil {
		return nil //nolint:nilerr // ClusterConfig has checked the server
	}
	environment := httpproxy.FromEnvironment()
	value := environment.HTTPSProxy
	environment.HTTPSProxy = "http://proxy.invalid" // a valid proxy, so that ProxyFunc only applies NO_PROXY
	if used, err := environment.ProxyFunc()(server); value == "" || used == nil || err != nil {
		return nil //nolint:nilerr // no proxy is used for this server
	}
	if !strings.Contains(value, "://") {
		value = "http://" + value
	}
	if !isProxy(value, environmentSchemes) {
		return &Error{Misconfigured, "correct it where it is set, such as in the kubelet's unit, or set proxy-url in the kubeconfig", errProxyEnvironment}
	}
	return nil
}

// checkCluster finds what would fail at the first request, and look like a failure of the network.
func checkCluster(cluster cache.Origin) error {
	if ca := cluster.CertificateAuthorityData; len(ca) > 0 && !x509.NewCertPool().AppendCertsFromPEM(ca) {
		return errors.New("certificate-authority-data: has no certificate in PEM")
	}
	return nil
}

// checkCredential does the same for a credential. It quotes nothing of it. It refuses only what
// cannot be sent: the API server trims blanks at a token's end.
func checkCredential(config *rest.Config) error {
	token := config.BearerToken
	if strings.HasPrefix(token, " ") || strings.ContainsFunc(token, func(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }) {
		return errors.New("its token has a line break or another character that cannot be sent; in YAML, token: | adds a line break")
	}
	if len(config.CertData) > 0 {
		if _, err := tls.X509KeyPair(config.CertData, config.KeyData); err != nil {
			return errors.New("client-certificate and client-key: not a PEM certificate with its key")
		}
	}
	return nil
}
