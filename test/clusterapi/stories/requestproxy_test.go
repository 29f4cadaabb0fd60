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

// requestProxy is a proxy in front of a workload cluster's API server. It delays requests of our
// controller and of simulated hosts, so that a rollout stays in a phase for as long as a test
// needs. A delayed request whose sender is killed never reaches the API server.
type requestProxy struct {
	mu     sync.Mutex
	delays []*delay
}

// delay delays the requests that match, until release.
type delay struct {
	match    func(r *http.Request, body []byte) bool
	reached  chan struct{} // closed when the first request is delayed
	released chan struct{} // closed when all requests may continue

	markReached, release func()
}

// delay delays matching requests from now on. Call release to let them continue.
func (g *requestProxy) delay(match func(r *http.Request, body []byte) bool) *delay {
	h := &delay{match: match, reached: make(chan struct{}), released: make(chan struct{})}
	h.markReached, h.release = sync.OnceFunc(func() { close(h.reached) }), sync.OnceFunc(func() { close(h.released) })
	g.mu.Lock()
	defer g.mu.Unlock()
	g.delays = append(g.delays, h)
	return h
}

// wait blocks while a request is delayed. It returns an error if the sender cancels the request.
func (g *requestProxy) wait(r *http.Request) error {
	var body []byte
	if r.Body != nil {
		var err error
		if body, err = io.ReadAll(r.Body); err != nil {
			return err
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
	}
	g.mu.Lock()
	delays := g.delays
	g.mu.Unlock()
	for _, h := range delays {
		select {
		case <-h.released:
			continue
		default:
		}
		if !h.match(r, body) {
			continue
		}
		h.markReached()
		select {
		case <-h.released:
		case <-r.Context().Done():
			return r.Context().Err()
		}
	}
	return nil
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func (g *requestProxy) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		if r.Body != nil {
			r = r.Clone(r.Context()) // a RoundTripper must not change its request
		}
		if err := g.wait(r); err != nil {
			return nil, err
		}
		return next.RoundTrip(r)
	})
}

// newRequestProxy starts a proxy in front of a Cluster's API server. Clients with the Cluster's
// kubeconfig Secret go through the proxy, and so do simulated hosts that are powered on later.
func newRequestProxy(t *testing.T, c *cluster) *requestProxy {
	t.Helper()
	g := &requestProxy{}
	config := c.workload.AdminConfig()
	transport, err := rest.TransportFor(config)
	harness.Must(t, err)
	target, err := url.Parse(c.workload.ServerURL())
	harness.Must(t, err)
	silent := log.New(io.Discard, "", 0) // killed clients would fill the log with errors
	server := httptest.NewUnstartedServer(&httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(target)
			// the transport has the certificate of an administrator, as the Secret had before
			r.Out.Header.Del("Authorization")
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

// restart starts the controller again after it was killed or stopped.
func (s *story) restart(ctx context.Context) error {
	return errors.Join(s.controller.Start(ctx), s.controller.Ready(ctx))
}

// ofController reports whether our controller sent a request: only the controller impersonates.
func ofController(r *http.Request) bool {
	return r.Header.Get(authenticationv1.ImpersonateUserHeader) != ""
}

const requestsPath = "/apis/certificates.k8s.io/v1/certificatesigningrequests"

// createsRequest matches the creation of a CertificateSigningRequest for the signer.
func createsRequest(signer string) func(*http.Request, []byte) bool {
	return func(r *http.Request, body []byte) bool {
		return r.Method == http.MethodPost && r.URL.Path == requestsPath && bytes.Contains(body, []byte(signer))
	}
}

// createsNode matches the creation of a Node.
func createsNode(r *http.Request, _ []byte) bool {
	return r.Method == http.MethodPost && r.URL.Path == "/api/v1/nodes"
}

// writesChallenge matches the write of our controller that adds the challenge to a hello.
func writesChallenge(r *http.Request, _ []byte) bool {
	name, found := strings.CutPrefix(r.URL.Path, requestsPath+"/")
	return ofController(r) && r.Method != http.MethodGet && found && !strings.Contains(name, "/")
}

// readsNode matches our controller's read of the Node, which precedes the record.
func readsNode(r *http.Request, _ []byte) bool {
	return ofController(r) && r.Method == http.MethodGet && strings.HasPrefix(r.URL.Path, "/api/v1/nodes/")
}

// approves matches our controller's writes to /approval: it approves a proof after it has written
// the record.
func approves(r *http.Request, _ []byte) bool {
	return ofController(r) && r.Method != http.MethodGet && strings.HasPrefix(r.URL.Path, requestsPath+"/") && strings.HasSuffix(r.URL.Path, "/approval")
}

// closesHello matches the denial that closes a hello: our controller's last write for a new
// Machine.
func closesHello(r *http.Request, body []byte) bool {
	return approves(r, body) && bytes.Contains(body, []byte(attestation.ReasonCompleted))
}
