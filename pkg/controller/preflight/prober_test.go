// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/client-go/rest"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/policyset"
)

const (
	ownHost     = "example.com:443" // httptest's certificate has this name
	probedToken = "probed-token"
)

// fakeServer is an API server that a prober asks. Its fields say how it answers.
type fakeServer struct {
	// static are its static policies, nil if it has none.
	static *policyset.Identity
	// refusal refuses the write instead. Slices are the addresses of the EndpointSlice.
	refusal, slicesError *apierrors.StatusError
	addresses            []string
	version              string
	// another is a certificate that no client accepts. down accepts no connection.
	another, down bool

	mu    sync.Mutex
	asked []string
}

func (f *fakeServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	f.asked = append(f.asked, r.Method+" "+r.URL.String())
	f.mu.Unlock()
	answer := func(code int, body any) {
		w.WriteHeader(code)
		_ = json.NewEncoder(w).Encode(body)
	}
	refuse := func(err *apierrors.StatusError) {
		err.ErrStatus.Kind, err.ErrStatus.APIVersion = "Status", "v1"
		answer(int(err.ErrStatus.Code), err.ErrStatus)
	}
	body, _ := io.ReadAll(r.Body)
	switch {
	case r.Header.Get("Authorization") != "Bearer "+probedToken:
		refuse(apierrors.NewUnauthorized("who is this?"))
	case r.URL.String() == "/version":
		answer(http.StatusOK, version.Info{GitVersion: f.version})
	case r.URL.String() == "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes" && f.slicesError != nil:
		refuse(f.slicesError)
	case r.URL.String() == "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes":
		answer(http.StatusOK, discoveryv1.EndpointSlice{
			Ports:     []discoveryv1.EndpointPort{{}, {Port: new(int32(0))}, {Port: new(int32(6443))}},
			Endpoints: []discoveryv1.Endpoint{{Addresses: f.addresses}},
		})
	case r.Method != http.MethodPatch || r.URL.String() != "/api/v1/namespaces/n/status?dryRun=All",
		r.Header.Get("Content-Type") != "application/strategic-merge-patch+json", !strings.Contains(string(body), `"NodeAttestationStaticPolicies"`):
		refuse(apierrors.NewBadRequest("not what a prober asks"))
	case f.refusal != nil:
		refuse(f.refusal)
	case f.static != nil:
		refuse(refusalOf(*f.static))
	default:
		answer(http.StatusOK, corev1.Namespace{})
	}
}

// refusalOf is an API server's answer with these static policies.
func refusalOf(identity policyset.Identity) *apierrors.StatusError {
	content, err := json.Marshal(identity)
	if err != nil {
		panic(err)
	}
	return refusalWith(fmt.Sprintf("ValidatingAdmissionPolicy '%s' with binding '%s' denied request: static policies of node-attestation-controller: %s", policyset.IdentityName, policyset.IdentityName, content))
}

func refusalWith(message string) *apierrors.StatusError {
	return apierrors.NewForbidden(corev1.Resource("namespaces"), "n", errors.New(message))
}

func mayNot(verb, resource string) *apierrors.StatusError {
	return refusalWith(fmt.Sprintf(`User "u" cannot %s resource %q`, verb, resource))
}

// newFakeServers starts API servers by their addresses, and returns a prober of the one at ownHost.
func newFakeServers(t *testing.T, servers map[string]*fakeServer) *StaticProber {
	t.Helper()
	config := &rest.Config{Host: "https://" + ownHost, BearerToken: probedToken}
	listeners := map[string]string{}
	for address, f := range servers {
		server := httptest.NewUnstartedServer(f)
		server.Config.ErrorLog = log.New(io.Discard, "", 0) // of connections that end early
		if f.another {
			server.TLS = &tls.Config{Certificates: []tls.Certificate{anotherCertificate(t)}}
		}
		server.StartTLS()
		t.Cleanup(server.Close)
		if !f.another {
			config.CAData = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
		}
		if !f.down {
			listeners[address] = server.Listener.Addr().String()
		}
	}
	config.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		if listeners[address] == "" {
			return nil, fmt.Errorf("dial %s from port %d: connection refused", address, time.Now().UnixNano())
		}
		return new(net.Dialer).DialContext(ctx, network, listeners[address])
	}
	return &StaticProber{Config: config, Namespace: "n"}
}

func anotherCertificate(t *testing.T) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"example.com"}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// Each API server is asked, and only where that can matter. What is not known is never in force.
func TestEachAPIServerIsAsked(t *testing.T) {
	const one, two = "192.0.2.1:6443", "192.0.2.2:6443"
	both := []string{"192.0.2.2", "192.0.2.1"}
	a, b := &policyset.Identity{Digest: "a"}, &policyset.Identity{Digest: "b"}
	for title, c := range map[string]struct {
		inAPI, each bool
		servers     map[string]*fakeServer
		// with and without are the addresses with and without static policies.
		with, without string
		unknown       []string
		calls         int
	}{
		"none, and none is needed": {inAPI: true, servers: map[string]*fakeServer{ownHost: {addresses: both}, one: {}, two: {}},
			without: "https://" + ownHost, calls: 1},
		"too old": {servers: map[string]*fakeServer{ownHost: {addresses: both, version: "v1.35.9"}, one: {}, two: {}},
			without: "https://" + ownHost, calls: 2},
		"too old, and not permitted": {servers: map[string]*fakeServer{ownHost: {refusal: mayNot("patch", "namespaces/status"), version: "v1.35.9"}},
			without: "https://" + ownHost, calls: 2},
		"none": {servers: map[string]*fakeServer{ownHost: {addresses: both, version: "v1.37.0-vendor.1"}, one: {}, two: {}},
			without: one + ", " + two, calls: 5},
		"none is needed, and each is asked": {inAPI: true, each: true, servers: map[string]*fakeServer{ownHost: {addresses: both}, one: {static: a}, two: {}},
			with: one, without: two, calls: 5},
		"none is needed, each is asked, and too old": {inAPI: true, each: true, servers: map[string]*fakeServer{ownHost: {addresses: both, version: "v1.35.9"}, one: {}, two: {}},
			without: "https://" + ownHost, calls: 2},
		"on each": {servers: map[string]*fakeServer{ownHost: {addresses: both, static: a}, one: {static: a}, two: {static: a}},
			with: one + ", " + two, calls: 4},
		"on each, and in the API": {inAPI: true, servers: map[string]*fakeServer{ownHost: {addresses: both, static: a}, one: {static: a}, two: {static: a}},
			with: one + ", " + two, calls: 4},
		"not on one": {servers: map[string]*fakeServer{ownHost: {addresses: both, static: a}, one: {static: a}, two: {}},
			with: one, without: two, calls: 4},
		"not on one, which is asked first": {servers: map[string]*fakeServer{ownHost: {addresses: both}, one: {static: a}, two: {}},
			with: one, without: two, calls: 5},
		"not on one without an address": {servers: map[string]*fakeServer{ownHost: {addresses: both[:1]}, two: {static: a}},
			with: two, without: "https://" + ownHost, calls: 4},
		"different files": {servers: map[string]*fakeServer{ownHost: {addresses: both, static: a}, one: {static: a}, two: {static: b}},
			with: one + ", " + two, unknown: []string{"API servers have different files of static policies"}, calls: 4},
		"one is down": {servers: map[string]*fakeServer{ownHost: {addresses: both, static: a}, one: {static: a}, two: {down: true}},
			with: one, unknown: []string{"static policies of " + two + " are not known: no connection"}, calls: 3},
		"one is another machine": {servers: map[string]*fakeServer{ownHost: {addresses: both, static: a}, one: {static: a}, two: {another: true}},
			with: one, unknown: []string{"static policies of " + two + " are not known: its certificate is not accepted"}, calls: 3},
		"no address is reached": {servers: map[string]*fakeServer{ownHost: {addresses: both, static: a}, one: {down: true}, two: {down: true}},
			with: "https://" + ownHost, calls: 2, unknown: []string{
				"static policies of " + one + " are not known: no connection", "static policies of " + two + " are not known: no connection",
				"not each API server was asked for static policies: no address of the EndpointSlice default/kubernetes answers",
			}},
		"the addresses are not permitted": {servers: map[string]*fakeServer{ownHost: {static: a, slicesError: mayNot("get", "endpointslices")}},
			with: "https://" + ownHost, calls: 2, unknown: []string{`not each API server was asked for static policies: namespaces "n" is forbidden: User "u" cannot get resource "endpointslices"`}},
		"the question is not permitted": {servers: map[string]*fakeServer{ownHost: {refusal: mayNot("patch", "namespaces/status"), version: "v1.37.0"}},
			calls: 2, unknown: []string{"static policies of https://" + ownHost + ` are not known: namespaces "n" is forbidden: User "u" cannot patch resource "namespaces/status"`}},
		"nobody answers": {servers: map[string]*fakeServer{one: {}, ownHost: {down: true}},
			unknown: []string{"static policies of https://" + ownHost + " are not known: no connection", "not each API server was asked for static policies: no connection"}},
		"it is overloaded": {servers: map[string]*fakeServer{ownHost: {refusal: apierrors.NewTooManyRequestsError("later"), slicesError: mayNot("get", "endpointslices")}},
			calls: 3, unknown: []string{"static policies of https://" + ownHost + " are not known: Too many requests: later", `not each API server was asked for static policies: namespaces "n" is forbidden: User "u" cannot get resource "endpointslices"`}},
		"another policy quotes the identity policy": {servers: map[string]*fakeServer{ownHost: {
			refusal: refusalWith("ValidatingAdmissionPolicy 'evil' with binding 'evil' denied request: " + refusalOf(*a).ErrStatus.Message), version: "v1.35.0",
		}}, without: "https://" + ownHost, calls: 2},
		"bad addresses": {servers: map[string]*fakeServer{ownHost: {static: a, addresses: []string{"169.254.169.254", "::ffff:169.254.0.1", "fe80::1", "localhost", "192.0.2.1", "192.0.2.1"}}, one: {static: a}},
			with: one, calls: 3},
	} {
		t.Run(title, func(t *testing.T) {
			p := newFakeServers(t, c.servers)
			p.AskEach = c.each
			answers := p.ask(t.Context(), c.inAPI)
			if with := answers.addresses(apiServer.hasStatic); with != c.with {
				t.Errorf("with static policies: %q", with)
			}
			if without := answers.addresses(apiServer.lacksStatic); without != c.without {
				t.Errorf("without: %q", without)
			}
			if unknown := answers.unknown(); !slices.Equal(unknown, c.unknown) {
				t.Errorf("not known: %q", unknown)
			}
			if forbidden := title == "the question is not permitted"; answers.forbidden() != forbidden {
				t.Errorf("forbidden: %v", !forbidden)
			}
			if unreached := title == "nobody answers" || title == "it is overloaded"; answers.unreached() != unreached {
				t.Errorf("unreached: %v", !unreached)
			}
			calls := 0
			for _, f := range c.servers {
				calls += len(f.asked)
			}
			if calls != c.calls {
				t.Errorf("%d calls", calls)
			}
			if again := p.ask(t.Context(), c.inAPI); again.describe() != answers.describe() {
				t.Errorf("then %s", again.describe())
			}
		})
	}
}

// A workload cluster's administrator can write any number of addresses.
func TestAddressesAreBounded(t *testing.T) {
	f := &fakeServer{static: &policyset.Identity{Digest: "a"}}
	for i := range 1000 {
		f.addresses = append(f.addresses, fmt.Sprintf("198.51.%d.%d", i/250, i%250))
	}
	answers := newFakeServers(t, map[string]*fakeServer{ownHost: f}).ask(t.Context(), false)
	if n := len(answers.unknown()); n != maxAPIServers+1 {
		t.Errorf("%d are asked", n)
	}
}

// Answers are reused for a while, unless the policies of the API have changed.
func TestAnswersAreReused(t *testing.T) {
	f := &fakeServer{version: "v1.30.0"}
	p := newFakeServers(t, map[string]*fakeServer{ownHost: f})
	for i, step := range []struct {
		inAPI bool
		old   time.Duration
		calls int
	}{
		{true, 0, 1}, {true, 0, 1}, {true, answersFresh, 1}, {true, noneFresh, 2},
		{false, 0, 4}, {false, 0, 4}, {false, answersFresh, 4}, {false, noneFresh, 6}, {true, 0, 7},
	} {
		p.asked = p.asked.Add(-step.old)
		if p.ask(t.Context(), step.inAPI); len(f.asked) != step.calls {
			t.Errorf("step %d: %d calls", i, len(f.asked))
		}
	}
	f.static = &policyset.Identity{Digest: "a"}
	for i, step := range []struct {
		old   time.Duration
		calls int
	}{{noneFresh, 9}, {0, 9}, {answersFresh, 11}} { // with the addresses
		p.asked = p.asked.Add(-step.old)
		if p.ask(t.Context(), true); len(f.asked) != step.calls {
			t.Errorf("static, step %d: %d calls", i, len(f.asked))
		}
	}
	f.static = nil
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if answers := p.ask(ended, false); len(answers.unknown()) == 0 {
		t.Error("an answer after the end")
	}
	if answers := p.ask(t.Context(), false); len(answers.unknown()) > 0 {
		t.Errorf("not known, since an earlier caller gave up: %q", answers.unknown())
	}
	if answers := (*StaticProber)(nil).ask(t.Context(), false); len(answers.servers) > 0 {
		t.Error("a nil prober asks")
	}
}

// Behind a load balancer, each connection reaches any API server. One without static policies is
// reported for some time, and not only until the next connection.
func TestALackBehindALoadBalancerIsRemembered(t *testing.T) {
	f := &fakeServer{}
	has := &policyset.Identity{Digest: "a"}
	p := newFakeServers(t, map[string]*fakeServer{ownHost: f})
	for i, step := range []struct {
		has   *policyset.Identity
		pause time.Duration
		lacks bool
	}{{has, 0, false}, {nil, 0, true}, {has, 0, true}, {has, lackMemory - time.Minute, true}, {has, time.Minute, false}, {nil, 0, true}} {
		f.static = step.has
		p.asked, p.lackedAt = time.Time{}, p.lackedAt.Add(-step.pause)
		if answers := p.ask(t.Context(), false); (len(answers.lacking()) > 0) != step.lacks {
			t.Errorf("step %d: %s", i, answers.describe())
		}
	}
	// So it is if only some of the addresses are reached.
	f.addresses, f.static = []string{"192.0.2.1", "192.0.2.2"}, nil
	p = newFakeServers(t, map[string]*fakeServer{ownHost: f, "192.0.2.1:6443": {static: has}, "192.0.2.2:6443": {down: true}})
	for range 2 {
		p.asked = time.Time{}
		if answers := p.ask(t.Context(), false); len(answers.lacking()) != 1 {
			t.Error(answers.describe())
		}
		f.static = has
	}
}

// The text of a failure stays the same while its cause does: each change of the condition is
// reported.
func TestCausesStayTheSame(t *testing.T) {
	for want, err := range map[string]error{
		"no connection": &net.OpError{Op: "dial", Err: errors.New("connection refused")},
		"no answer within " + askTimeout.String(): fmt.Errorf("dial: %w", context.DeadlineExceeded),
		"its certificate is not accepted":         &tls.CertificateVerificationError{Err: x509.CertificateInvalidError{Reason: x509.Expired, Detail: "current time " + time.Now().String()}},
		"unknown":                                 &apierrors.StatusError{ErrStatus: metav1.Status{Message: "unknown", Reason: metav1.StatusReasonInternalError}},
	} {
		if got := cause(err); got != want {
			t.Errorf("%v: %s", err, got)
		}
	}
}
