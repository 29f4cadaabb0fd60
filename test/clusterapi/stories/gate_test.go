// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"bytes"
	"context"
	"encoding/pem"
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// gate is a proxy before a workload cluster's API server. It delays requests of our controller and
// of simulated hosts, so that the cluster stays in a phase for as long as a test needs. A request
// whose sender is killed meanwhile never arrives.
type gate struct {
	mu    sync.Mutex
	holds []*hold
}

// hold is a request, or several, that wait.
type hold struct {
	match   func(r *http.Request, body []byte) bool
	reached chan struct{} // closed when the first one waits
	open    chan struct{} // closed when all may go on

	reach, letGo func()
}

// hold has requests wait from now on, until letGo.
func (g *gate) hold(match func(r *http.Request, body []byte) bool) *hold {
	h := &hold{match: match, reached: make(chan struct{}), open: make(chan struct{})}
	h.reach, h.letGo = sync.OnceFunc(func() { close(h.reached) }), sync.OnceFunc(func() { close(h.open) })
	g.mu.Lock()
	defer g.mu.Unlock()
	g.holds = append(g.holds, h)
	return h
}

// pass returns when a request may go on. It returns an error if the sender has gone away.
func (g *gate) pass(r *http.Request) error {
	var body []byte
	if r.Body != nil {
		var err error
		if body, err = io.ReadAll(r.Body); err != nil {
			return err
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
	}
	g.mu.Lock()
	holds := g.holds
	g.mu.Unlock()
	for _, h := range holds {
		select {
		case <-h.open:
			continue
		default:
		}
		if !h.match(r, body) {
			continue
		}
		h.reach()
		select {
		case <-h.open:
		case <-r.Context().Done():
			return r.Context().Err()
		}
	}
	return nil
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func (g *gate) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		if r.Body != nil {
			r = r.Clone(r.Context()) // a RoundTripper must not change its request
		}
		if err := g.pass(r); err != nil {
			return nil, err
		}
		return next.RoundTrip(r)
	})
}

// newGate starts a gate before a Cluster's API server. Clients that use the Cluster's kubeconfig
// Secret go through it, and simulated hosts that are powered on later.
func newGate(t *testing.T, c *cluster) *gate {
	t.Helper()
	g := &gate{}
	config := c.workload.AdminConfig()
	transport, err := rest.TransportFor(config)
	harness.Must(t, err)
	target, err := url.Parse(c.workload.ServerURL())
	harness.Must(t, err)
	silent := log.New(io.Discard, "", 0) // of clients that are killed
	server := httptest.NewUnstartedServer(&httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(target)
			r.Out.Header.Del("Authorization") // the transport has an administrator's certificate, as the Secret had
		},
		Transport: g.wrap(transport), FlushInterval: -1, ErrorLog: silent,
	})
	server.EnableHTTP2, server.Config.ErrorLog = true, silent
	server.StartTLS()
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	kubeconfig := c.workload.Kubeconfig(testbed.TokenUser("unused"), testbed.WithServer(server.URL), testbed.WithServerCA(ca))
	object := &corev1.Secret{}
	harness.Must(t, c.client.Get(t.Context(), client.ObjectKey{Namespace: c.namespace, Name: secret.Name(c.name, secret.Kubeconfig)}, object))
	object.Data[secret.KubeconfigDataName] = kubeconfig
	harness.Must(t, c.client.Update(t.Context(), object))
	c.hosts.reach(target.Host, fleet.Cluster{
		URL: c.workload.ServerURL(), CA: c.workload.ServerCA(), Issuer: c.workload.ClientCA().Certificate(), Wrap: g.wrap,
	})
	harness.Must(t, errors.Join(c.controller.Kill(), c.restart(t.Context())))
	return g
}

// restart starts the controller again, which was killed.
func (s *story) restart(ctx context.Context) error {
	return errors.Join(s.controller.Start(ctx), s.controller.Ready(ctx))
}

// ofController reports whether a request is our controller's, which acts as another user.
func ofController(r *http.Request) bool {
	return r.Header.Get(authenticationv1.ImpersonateUserHeader) != ""
}

const requestsPath = "/apis/certificates.k8s.io/v1/certificatesigningrequests"

// files matches a host's request for a certificate by its signer.
func files(signer string) func(*http.Request, []byte) bool {
	return func(r *http.Request, body []byte) bool {
		return r.Method == http.MethodPost && r.URL.Path == requestsPath && bytes.Contains(body, []byte(signer))
	}
}

// registers matches a host's request for its Node.
func registers(r *http.Request, _ []byte) bool {
	return r.Method == http.MethodPost && r.URL.Path == "/api/v1/nodes"
}

// challenges matches our controller's answer to a hello.
func challenges(r *http.Request, _ []byte) bool {
	name, found := strings.CutPrefix(r.URL.Path, requestsPath+"/")
	return ofController(r) && r.Method != http.MethodGet && found && !strings.Contains(name, "/")
}

// readsNode matches what our controller does with a proof before there is a record.
func readsNode(r *http.Request, _ []byte) bool {
	return ofController(r) && r.Method == http.MethodGet && strings.HasPrefix(r.URL.Path, "/api/v1/nodes/")
}

// approves matches our controller's approval of a proof, after there is a record.
func approves(r *http.Request, _ []byte) bool {
	return ofController(r) && r.Method != http.MethodGet && strings.HasPrefix(r.URL.Path, requestsPath+"/") && strings.HasSuffix(r.URL.Path, "/approval")
}

// closesHello matches the last that our controller writes for a new Machine.
func closesHello(r *http.Request, body []byte) bool {
	return approves(r, body) && bytes.Contains(body, []byte(attestation.ReasonCompleted))
}
