// SPDX-License-Identifier: Apache-2.0

package prepare

import (
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
)

const (
	// hiddenServer is the API server under a name that nobody can look up (RFC 6761): only the
	// proxy knows where it is.
	hiddenServer = "kubernetes.invalid:6443"
	// documentedProxy is what docs/integration/without-kubeadm.md calls the proxy.
	documentedProxy = "http://proxy.example.com:3128"
)

// httpProxy is a proxy that forwards every request to one server, and writes down what was asked.
type httpProxy struct {
	url, to string

	mu    sync.Mutex
	asked []string
}

func newHTTPProxy(t *testing.T) *httpProxy {
	t.Helper()
	return newHTTPProxyTo(t, shared.ServerURL())
}

func newHTTPProxyTo(t *testing.T, server string) *httpProxy {
	t.Helper()
	p := &httpProxy{to: strings.TrimPrefix(server, "https://")}
	listening := httptest.NewServer(p)
	t.Cleanup(listening.Close)
	p.url = listening.URL
	return p
}

func (p *httpProxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	p.asked = append(p.asked, r.Method+" "+r.Host)
	p.mu.Unlock()
	to, err := net.DialTimeout("tcp", p.to, 10*time.Second)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	defer func() { _ = to.Close() }()
	w.WriteHeader(http.StatusOK)
	from, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer func() { _ = from.Close() }()
	go func() {
		_, _ = io.Copy(to, buffered)
		_ = to.Close()
	}()
	_, _ = io.Copy(from, to)
}

// forget returns how often the API server was asked for since it was called last. Nothing else may
// have been.
func (p *httpProxy) forget(t *testing.T) int {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	n := len(p.asked)
	if slices.ContainsFunc(p.asked, func(asked string) bool { return asked != "CONNECT "+hiddenServer }) {
		t.Errorf("the proxy was asked for %q", p.asked)
	}
	p.asked = nil
	return n
}

// newHidden returns a machine whose bootstrap kubeconfig names the API server as only a proxy finds
// it.
func newHidden(t *testing.T, name, proxyURL string) usualPlaces {
	t.Helper()
	chip := swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256"}})
	d := newUsualPlaces(t, "apiVersion: authenticator.cluster.x-k8s.io/v1alpha1\nkind: KubeletAuthenticatorConfiguration\nprovider: tpm\nproviderID: metal://"+name+
		"\nprepareWait: 20s\n", chip.Socket(), name)
	answer(t, chip, name)
	token, err := shared.CreateBootstrapToken(t.Context(), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	d.write(kubelet.BootstrapFile, string(shared.BootstrapKubeconfig(token, func(c *clientcmdapi.Cluster) {
		c.Server, c.TLSServerName, c.ProxyURL = "https://"+hiddenServer, "127.0.0.1", proxyURL
	})))
	for _, name := range []string{"HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy"} {
		d.env = append(d.env, name+"=") // the developer's
	}
	return d
}

// readConfinement returns the part of the guide about proxies and sandboxes.
func readConfinement(t *testing.T) string {
	t.Helper()
	_, part, _ := strings.Cut(read(t, guides+"without-kubeadm.md"), confinement)
	return part
}

// unitEnvironment returns the variables of the documented drop-in, with our proxy in the place of
// the documented one.
func unitEnvironment(t *testing.T, proxy *httpProxy) []string {
	t.Helper()
	var env []string
	for line := range strings.Lines(blocks(readConfinement(t), "ini")[0]) {
		if variable, ok := strings.CutPrefix(strings.TrimSpace(line), "Environment="); ok {
			env = append(env, strings.Replace(variable, documentedProxy, proxy.url, 1))
		}
	}
	if len(env) != 2 || env[0] != "HTTPS_PROXY="+proxy.url {
		t.Fatalf("%q", env)
	}
	return env
}

// mustJoin has the machine attest through the proxy, and then be the node through it.
func (d usualPlaces) mustJoin(t *testing.T, proxy *httpProxy, name string) {
	t.Helper()
	d.run("kubelet-authenticator prepare").Want(t, 0, "system:node:"+name+" has a certificate")
	if proxy.forget(t) == 0 {
		t.Error("the worker went past the proxy")
	}
	if r := d.run("kubectl --kubeconfig=" + kubelet.KubeconfigFile + " auth whoami"); r.Code != 0 || !strings.Contains(r.Stdout, "system:node:"+name) {
		t.Errorf("%+v", r)
	}
	if proxy.forget(t) == 0 {
		t.Error("client-go went past the proxy")
	}
}

// What the unit has in its environment reaches the worker, which the plugin starts.
func TestProxyOfTheEnvironment(t *testing.T) {
	proxy := newHTTPProxy(t)
	d := newHidden(t, "behind-proxy", "")
	d.env = append(d.env, unitEnvironment(t, proxy)...)
	d.mustJoin(t, proxy, "behind-proxy")
}

func TestNoProxy(t *testing.T) {
	proxy := newHTTPProxy(t)
	d := newHidden(t, "past-proxy", "")
	d.env = append(d.env, "HTTPS_PROXY="+proxy.url, "NO_PROXY=10.0.0.0/8,.invalid")
	d.run("kubelet-authenticator --wait-timeout=5s").Want(t, 19, "kubernetes.invalid")
	if n := proxy.forget(t); n != 0 {
		t.Errorf("the proxy was asked %d times", n)
	}
}

// proxy-url comes from the bootstrap kubeconfig, is written into the kubelet's, and beats the
// environment.
func TestProxyOfTheKubeconfig(t *testing.T) {
	proxy := newHTTPProxy(t)
	snippet := blocks(readConfinement(t), "yaml")
	if len(snippet) != 1 {
		t.Fatalf("%q", snippet)
	}
	documented, err := clientcmd.Load([]byte(strings.Replace(snippet[0], documentedProxy, proxy.url, 1)))
	if err != nil || documented.Clusters["cluster"] == nil {
		t.Fatal(snippet[0], err)
	}
	d := newHidden(t, "behind-own-proxy", documented.Clusters["cluster"].ProxyURL)
	d.env = append(d.env, "HTTPS_PROXY=http://127.0.0.1:1")
	d.mustJoin(t, proxy, "behind-own-proxy")
	if written := read(t, d.At(kubelet.KubeconfigFile)); !strings.Contains(written, "proxy-url: "+proxy.url+"\n") {
		t.Error(written)
	}
}

// A proxy that shows a certificate of its own does not get the credential.
func TestProxyThatOpensTLS(t *testing.T) {
	opener := httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		t.Errorf("it was asked for %s", r.URL)
	}))
	opener.Config.ErrorLog = log.New(io.Discard, "", 0) // each handshake is to fail
	opener.StartTLS()
	t.Cleanup(opener.Close)
	proxy := newHTTPProxyTo(t, opener.URL)
	d := newHidden(t, "opened", "")
	d.env = append(d.env, "HTTPS_PROXY="+proxy.url)
	d.run("kubelet-authenticator --wait-timeout=5s").Want(t, 26)
	if proxy.forget(t) == 0 {
		t.Error("it went past the proxy")
	}
}

func TestProxyByHand(t *testing.T) {
	commands := blocks(readConfinement(t), "sh")
	if len(commands) != 1 {
		t.Fatalf("%q", commands)
	}
	proxy := newHTTPProxy(t)
	d := newHidden(t, "by-hand", "")
	d.run(strings.Replace(commands[0], documentedProxy, proxy.url, 1)).Want(t, 0)
	if proxy.forget(t) == 0 {
		t.Error("it went past the proxy")
	}
}
