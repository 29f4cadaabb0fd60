// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"crypto/x509"
	"errors"
	"net"
	"net/http"
	"net/url"
	"sync"
	"time"

	"k8s.io/client-go/rest"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
)

// Cluster is where a machine enrols.
type Cluster struct {
	// URL is the API server's, CA what its certificate is by, in PEM.
	URL string
	CA  []byte
	// Token is a bootstrap token, for machines without a certificate.
	Token string
	// Issuer is whom a certificate has to be by.
	Issuer *x509.Certificate
	// Wrap sees each request of the machines, and may hold it back. Optional.
	Wrap func(http.RoundTripper) http.RoundTripper
}

// Credential returns a client's configuration with the machine's certificate, or the bootstrap
// token where it has none yet.
func (m *Machine) Credential(cluster Cluster) *rest.Config {
	config := &rest.Config{Host: cluster.URL, TLSClientConfig: rest.TLSClientConfig{CAData: cluster.CA}, QPS: -1}
	if m.Certificate == nil {
		config.BearerToken = cluster.Token
	} else {
		config.CertData, config.KeyData = m.Certificate, m.Key
	}
	if cluster.Wrap != nil {
		config.Wrap(cluster.Wrap)
	}
	return config
}

// connect returns a client with connections of its own, as each process of the plugin's has them,
// and what ends them.
func (m *Machine) connect(cluster Cluster) (api *csr.Client, hangUp func(), err error) {
	if cluster.Issuer == nil {
		return nil, nil, errors.New("the cluster has no issuer to check certificates with")
	}
	config := m.Credential(cluster)
	calls := &calls{}
	config.Dial = calls.dial
	// client-go shares transports between clients of the same credential, and keeps them, unless
	// they choose proxies their own way.
	config.Proxy = func(*http.Request) (*url.URL, error) { return nil, nil }
	api, err = csr.NewClient(config)
	return api, calls.hangUp, err
}

// calls are the connections of one client.
type calls struct {
	mu    sync.Mutex
	open  []net.Conn
	ended bool
}

const dialTimeout = 30 * time.Second

func (c *calls) dial(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := (&net.Dialer{Timeout: dialTimeout}).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		_ = conn.Close()
		return nil, net.ErrClosed
	}
	c.open = append(c.open, conn)
	return conn, nil
}

func (c *calls) hangUp() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = true
	for _, conn := range c.open {
		_ = conn.Close()
	}
	c.open = nil
}
