// SPDX-License-Identifier: Apache-2.0

// Package nodeaccess decides how a node reaches the API server: under which node name, in which
// cluster, and with which credential. The plugin and doctor both use it, so that doctor examines
// what the plugin would do.
package nodeaccess

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"strings"

	"k8s.io/client-go/rest"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
)

// Node has the inputs that decide how one node reaches the API server.
type Node struct {
	// Dir is the certificate directory.
	Dir cache.Dir
	// Bootstrap is the bootstrap kubeconfig that the operator names. If it is empty, the one in
	// Dir is tried first, then KubeletBootstrap, which kubeadm writes.
	Bootstrap, KubeletBootstrap string
	// Asked is the cluster that the kubelet talks to, nil if that is not known. AskedBy says
	// where it is named.
	Asked   *cache.Origin
	AskedBy string
	// Insecure is set if the kubelet does not verify the API server of Asked. This program does not
	// use such a server.
	Insecure bool
	// Provider is the name of the attestation provider. Renews says whether the node's
	// certificate may ask for the next one.
	Provider string
	Renews   bool
	// UserAgent is sent with each request.
	UserAgent string
}

// Access is where requests go, and with which credential. Config holds the credential: it is never
// printed.
type Access struct {
	Config *rest.Config
	// Cluster is the one that the certificate will come from.
	Cluster cache.Origin
	// Source is the file, or another place, that names the cluster.
	Source string
	// Credential describes the credential for people.
	Credential string
	// Own is set if it is the node's certificate.
	Own bool
}

// Requester identifies a credential: "node" for the node's own certificate, else a hash of the
// credential. Hello and proof need the same one, since the controller compares who filed them.
func (a Access) Requester() string {
	if a.Own {
		return "node" // each of the node's certificates has the same user name
	}
	// Older releases had the token file's name in place of "". The hash of a pending request must
	// not change.
	sum := sha256.Sum256([]byte(strings.Join([]string{a.Config.BearerToken, "", string(a.Config.CertData)}, "\x00")))
	return hex.EncodeToString(sum[:])
}

// Problem is a class of errors.
type Problem int

// The problems. The zero value is none of them.
const (
	// Misconfigured: a file or a setting is wrong.
	Misconfigured Problem = iota + 1
	// NoBootstrap: there is no bootstrap kubeconfig.
	NoBootstrap
	// ForeignBootstrap: each bootstrap kubeconfig is for another cluster than the kubelet's.
	ForeignBootstrap
)

// Error says why the node cannot reach the API server. It quotes no secret.
type Error struct {
	Problem Problem
	// Hint says what can be done.
	Hint string
	Err  error
}

func (e *Error) Error() string { return e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

// Access returns the access for the next request. pair is the certificate on disk, nil if none can
// be used. rejected says that the API server answered it with 401.
func (n Node) Access(pair *cache.Pair, rejected bool) (Access, error) {
	if n.WhyBootstrap(pair, rejected) == "" {
		return n.OwnAccess(pair)
	}
	return n.BootstrapAccess()
}

// WhyBootstrap says why the next request needs the bootstrap credential. It is "" if the node's
// certificate can be used.
func (n Node) WhyBootstrap(pair *cache.Pair, rejected bool) string {
	switch {
	case pair == nil:
		return "there is no usable certificate"
	case !n.Renews:
		return "provider " + n.Provider + " does not renew"
	case n.IsForeign(pair):
		return "the certificate came from another cluster than the one that " + n.AskedBy + " names"
	case rejected:
		return "the API server rejects the certificate"
	}
	return ""
}

// IsForeign reports whether a certificate came from another cluster than the kubelet's, as far as
// both are known.
func (n Node) IsForeign(pair *cache.Pair) bool {
	return n.Asked != nil && pair.Origin != nil && !n.Asked.SameCluster(*pair.Origin)
}

// OwnAccess returns the access with the node's certificate to the kubelet's cluster. If that is not
// known, it is the cluster that issued the certificate, or else that of the bootstrap kubeconfig.
func (n Node) OwnAccess(pair *cache.Pair) (Access, error) {
	a := Access{Credential: "the node's own certificate", Own: true} //nolint:gosec // G101: words, not a secret
	const hint = "check the cluster in the kubelet's kubeconfig"
	switch {
	case n.Asked != nil && n.Insecure:
		return Access{}, &Error{Misconfigured, hint, errInsecureTLS}
	case n.Asked != nil:
		a.Cluster, a.Source = *n.Asked, n.AskedBy
	case pair.Origin != nil:
		a.Cluster, a.Source = *pair.Origin, n.Dir.File(cache.CurrentFile)
	default:
		bootstrap, err := n.findBootstrap()
		if err != nil {
			return Access{}, &Error{Misconfigured, "set provideClusterInfo: true in the kubeconfig's exec stanza",
				fmt.Errorf("no cluster to ask: neither client-go nor the certificate names one, and %w", err)}
		}
		a.Cluster, a.Source = bootstrap.Cluster, bootstrap.Source
	}
	config, err := ClusterConfig(a.Cluster)
	if err != nil {
		return Access{}, &Error{Misconfigured, hint, err}
	}
	config.UserAgent = n.UserAgent
	config.CertData, config.KeyData = pair.Chain, pair.Key
	a.Config = config
	return a, a.checkEnvironment()
}

// BootstrapAccess returns the access with the credential of a bootstrap kubeconfig to the server of
// that same file, verified with its CA. A file for another cluster than the kubelet's is skipped.
func (n Node) BootstrapAccess() (Access, error) {
	a, err := n.findBootstrap()
	if err != nil {
		return Access{}, err
	}
	return a, a.check("write the bootstrap kubeconfig again (kubeadm token create --print-join-command)")
}

// KubeletAccess returns the access with the credential in the kubelet's kubeconfig, such as the
// client certificate that kubeadm had issued. If that file has none, since it does not exist or
// names this program, it returns BootstrapAccess.
func (n Node) KubeletAccess(path string) (Access, error) {
	if k := kubelet.ReadKubeconfig(path, ""); k.Kind == kubelet.Missing || k.NamesThisProgram() {
		return n.BootstrapAccess()
	}
	a, err := readKubeconfig("the kubelet's kubeconfig", path)
	if err != nil {
		return Access{}, err
	}
	a.Config.UserAgent = n.UserAgent
	return a, a.check("check that the kubelet works with this file")
}

// check checks cluster, credential and proxy. hint is for the first two.
func (a Access) check(hint string) error {
	if err := cmp.Or(checkCluster(a.Cluster), checkCredential(a.Config)); err != nil {
		return &Error{Misconfigured, hint, fmt.Errorf("%s: %w", a.Credential, err)}
	}
	return a.checkEnvironment()
}

// findBootstrap is BootstrapAccess without a look at the credential.
func (n Node) findBootstrap() (Access, error) {
	paths := []string{n.Bootstrap}
	if n.Bootstrap == "" {
		paths = []string{n.Dir.File(cache.BootstrapFile), n.KubeletBootstrap}
	}
	missing := &Error{NoBootstrap,
		"write a bootstrap kubeconfig to one of these paths, or name one with --bootstrap-kubeconfig (kubeadm token create --print-join-command)",
		fmt.Errorf("no bootstrap kubeconfig: %q: no such file", paths)}
	for _, path := range paths {
		a, err := readKubeconfig("bootstrap kubeconfig", path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return Access{}, err
		}
		if n.Asked != nil && !n.Asked.SameCluster(a.Cluster) {
			missing = &Error{ForeignBootstrap, "give the bootstrap kubeconfig of the cluster that the kubelet's kubeconfig names",
				fmt.Errorf("bootstrap kubeconfig %s: is for %s, but the kubelet asks for %s, with another CA", path, a.Cluster.Server, n.Asked.Server)}
			continue
		}
		if n.Asked != nil {
			a.Cluster = *n.Asked
		}
		a.Config.UserAgent = n.UserAgent
		return a, nil
	}
	return Access{}, missing
}

// errInsecureTLS refuses a cluster without a check of the API server's certificate.
var errInsecureTLS = errors.New("insecure-skip-tls-verify is set; this program has no such mode")

// errProxyURL hides its cause, which may quote a password.
var errProxyURL = errors.New("proxy-url: cannot be parsed")

// ClusterConfig returns how to reach a cluster, without a credential. Only HTTPS is accepted: a
// token must not travel in the clear.
func ClusterConfig(cluster cache.Origin) (*rest.Config, error) {
	if err := kubelet.CheckCluster(cluster); err != nil {
		return nil, err
	}
	config := &rest.Config{
		Host:            cluster.Server,
		TLSClientConfig: rest.TLSClientConfig{ServerName: cluster.TLSServerName, CAData: cluster.CertificateAuthorityData},
	}
	if cluster.ProxyURL != "" {
		proxy, err := url.Parse(cluster.ProxyURL)
		if err != nil {
			return nil, errProxyURL
		}
		config.Proxy = http.ProxyURL(proxy)
	}
	return config, nil
}
