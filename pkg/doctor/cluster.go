// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"strings"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
)

// access is where requests go and whose credential goes with them.
type access struct {
	cluster cache.Origin
	// source is the file that names the cluster, credential says in words what is shown.
	source, credential string
	client             *http.Client
	// config is for what it says of the credential. It is never printed.
	config *rest.Config
}

// clusterConfig returns how to reach a cluster, without a credential. There is no insecure way.
func clusterConfig(cluster cache.Origin) (*rest.Config, error) {
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
			return nil, errors.New("proxy-url: cannot be parsed")
		}
		config.Proxy = http.ProxyURL(proxy)
	}
	return config, nil
}

func (e *examination) newAccess(config *rest.Config, cluster cache.Origin, source, credential string) (*access, error) {
	config.UserAgent = e.UserAgent
	client, err := csr.HTTPClient(config)
	if err != nil {
		return nil, err
	}
	return &access{cluster: cluster, source: source, credential: credential, client: client, config: config}, nil
}

// errNoBootstrap says that there is no bootstrap kubeconfig.
var errNoBootstrap = errors.New("there is none")

// bootstrapPath returns the bootstrap kubeconfig that the plugin would use, whether it is there or not.
func (e *examination) bootstrapPath() string {
	if e.Config.BootstrapKubeconfig != "" {
		return e.Config.BootstrapKubeconfig
	}
	own := e.dir.File(cache.BootstrapFile)
	if _, err := os.Stat(own); errors.Is(err, fs.ErrNotExist) {
		return e.Config.KubeletBootstrapKubeconfig
	}
	return own
}

// bootstrapAccess reads the bootstrap kubeconfig, refusing what the plugin refuses. Its errors quote nothing of it: it holds a token.
func (e *examination) bootstrapAccess() (*access, error) {
	path := e.bootstrapPath()
	k, err := clientcmd.LoadFromFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("%s: %w", path, errNoBootstrap)
	case errors.Is(err, fs.ErrPermission):
		return nil, fmt.Errorf("%s: %w", path, errNeedsRoot)
	case err != nil:
		return nil, fmt.Errorf("%s: cannot be read as a kubeconfig", path)
	}
	if err := clientcmd.ResolveLocalPaths(k); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	current, ok := k.Contexts[k.CurrentContext]
	if !ok || k.AuthInfos[current.AuthInfo] == nil || k.Clusters[current.Cluster] == nil {
		return nil, fmt.Errorf("%s: has no current-context with a cluster and a user", path)
	}
	user, cluster := k.AuthInfos[current.AuthInfo], k.Clusters[current.Cluster]
	switch {
	case user.Exec != nil || user.AuthProvider != nil:
		return nil, fmt.Errorf("%s: its user is an exec plugin or an auth provider, which could start this program for ever", path)
	case cluster.InsecureSkipTLSVerify:
		return nil, fmt.Errorf("%s: insecure-skip-tls-verify is set; the plugin has no such mode", path)
	}
	config, err := clientcmd.NewDefaultClientConfig(*k, &clientcmd.ConfigOverrides{}).ClientConfig()
	if err == nil {
		err = rest.LoadTLSFiles(config)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: server, user or a file that it names is wrong", path)
	}
	if config.BearerToken == "" && config.BearerTokenFile == "" && len(config.CertData) == 0 {
		return nil, fmt.Errorf("%s: its user has neither a token nor a client certificate", path)
	}
	origin := cache.Origin{Server: config.Host, TLSServerName: config.ServerName, CertificateAuthorityData: config.CAData, ProxyURL: cluster.ProxyURL}
	if err := kubelet.CheckCluster(origin); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	a, err := e.newAccess(config, origin, path, "the bootstrap credential")
	if err != nil {
		return nil, fmt.Errorf("%s: its CA or its client certificate cannot be used", path)
	}
	return a, nil
}

// asked is the cluster that client-go would name to the plugin, nil if the kubelet's kubeconfig does not say.
func (e *examination) asked() *cache.Origin {
	if k := e.conf(); k.Kind == kubelet.Ours && k.ClusterProblem == nil {
		return &k.Cluster
	}
	return nil
}

// ownAccess shows the node's certificate to the cluster that the plugin would show it to.
func (e *examination) ownAccess() (*access, error) {
	if err := e.unseen(); err != nil {
		return nil, err
	}
	pair := e.usable()
	if pair == nil {
		return nil, errors.New("there is no usable certificate")
	}
	cluster, source := e.asked(), e.conf().Path
	if cluster == nil {
		cluster, source = pair.Origin, e.dir.File(cache.CurrentFile)
	}
	if cluster == nil {
		bootstrap, err := e.bootstrap()
		if err != nil {
			return nil, fmt.Errorf("neither the kubelet's kubeconfig nor the certificate names a cluster, and %w", err)
		}
		cluster, source = &bootstrap.cluster, bootstrap.source
	}
	config, err := clusterConfig(*cluster)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", source, err)
	}
	config.CertData, config.KeyData = pair.Chain, pair.Key
	a, err := e.newAccess(config, *cluster, source, "the node's certificate")
	if err != nil {
		return nil, fmt.Errorf("%s: its CA cannot be used", source)
	}
	return a, nil
}

// whyBootstrap returns why the bootstrap credential is needed, empty if it is not, or if that cannot be told.
func (e *examination) whyBootstrap() string {
	pair := e.usable()
	switch {
	case e.unseen() != nil:
		return ""
	case pair == nil:
		return "there is no usable certificate"
	case !e.renews():
		return "provider " + e.Config.Provider + " does not renew"
	}
	if asked := e.asked(); asked != nil && pair.Origin != nil && !asked.SameCluster(*pair.Origin) {
		return "the certificate came from another cluster than the one that " + e.conf().Path + " names"
	}
	if r, err := e.accepted(); err == nil && r.status == http.StatusUnauthorized {
		return "the API server rejects the certificate"
	}
	return ""
}

// requester is what the next request would be filed with.
func (e *examination) requester() (*access, error) {
	if e.need() == "" {
		return e.own()
	}
	return e.bootstrap()
}

func checkBootstrapFile(_ context.Context, e *examination) finding {
	why := e.need()
	a, err := e.bootstrap()
	const remedy = "make one of: kubeadm token create --print-join-command; or name one with --bootstrap-kubeconfig"
	switch {
	case errors.Is(err, errNeedsRoot):
		return skipped("%v", err)
	case errors.Is(err, errNoBootstrap) && e.unseen() != nil:
		return skipped("%v; whether it is needed cannot be told: %v", err, e.unseen())
	case errors.Is(err, errNoBootstrap) && why == "":
		return ok("not needed: the node renews with its own certificate")
	case errors.Is(err, errNoBootstrap):
		return e.whileServed(failure(remedy, "%v, and %s", err, why))
	case err != nil && why == "":
		return warning(remedy, "%v", err)
	case err != nil:
		return e.whileServed(failure(remedy, "%v", err))
	}
	findings := []finding{ok("%s: for %s", a.source, a.cluster.Server)}
	if info, err := os.Stat(a.source); err == nil {
		findings = append(findings, judgeFile(a.source, info, secret))
	}
	if asked := e.asked(); asked != nil && !asked.SameCluster(a.cluster) {
		findings = append(findings, failure("give the bootstrap kubeconfig of the kubelet's cluster", "%s: is for %s, but %s names %s, with another CA", a.source, a.cluster.Server, e.conf().Path, asked.Server))
	}
	return worst(findings...)
}

// answer is one of the API server's.
type answer struct {
	status int
	header http.Header
	body   []byte
}

// says is what the API server says of a refusal, a metav1.Status.
func (a *answer) says() string {
	var status struct {
		Message string `json:"message"`
	}
	if json.Unmarshal(a.body, &status) != nil || status.Message == "" {
		return http.StatusText(a.status)
	}
	return status.Message
}

// brief says in few words why a server cannot be talked to: the URL that a transport error repeats is left out.
func brief(err error) string {
	var wrapped *url.Error
	if errors.As(err, &wrapped) {
		if wrapped.Timeout() {
			return "no answer in time"
		}
		err = wrapped.Err
	}
	return strings.TrimSpace(err.Error())
}
