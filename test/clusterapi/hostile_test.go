// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// attack is a set of attacks of a hostile API server.
type attack int32

const (
	endlessBodies attack = 1 << iota // an answer that is no watch goes on for ever
	endlessLists                     // a list of requests has one page after the other
	endlessEvents                    // a watch of requests has one new request after the other
	slowAnswers                      // an answer comes with a byte a second
)

func (a attack) String() string {
	var names []string
	for i, name := range []string{"endless bodies", "endless lists", "endless events", "a byte a second"} {
		if a&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, ", ")
}

// bandwidth is the bytes per second that a hostile API server sends: a link of a gigabit.
const bandwidth = 125 << 20

// hostileServer is the API server of a tenant who attacks the controller. Its certificate is the
// one that the Cluster's kubeconfig trusts. While it does not attack, it passes everything on to a
// real API server.
type hostileServer struct {
	url    string
	ca     []byte
	server *http.Server
	honest *httputil.ReverseProxy
	sent   atomic.Int64 // bytes of attacks

	mu      sync.Mutex
	attacks attack
	changed context.Context    //nolint:containedctx // it ends with the next change
	change  context.CancelFunc // of all answers that are under way
	budget  float64
	refill  time.Time
}

func newHostileServer(t *testing.T, behind *workload) *hostileServer {
	t.Helper()
	ca, err := testbed.NewCA("hostile")
	harness.Must(t, err)
	pair, err := ca.IssueServer(nil, []net.IP{net.IPv4(127, 0, 0, 1)})
	harness.Must(t, err)
	certificate, err := tls.X509KeyPair(pair.CertPEM, pair.KeyPEM)
	harness.Must(t, err)
	transport, err := rest.TransportFor(behind.AdminConfig())
	harness.Must(t, err)
	target, err := url.Parse(behind.ServerURL())
	harness.Must(t, err)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Must(t, err)
	quiet := log.New(io.Discard, "", 0)
	h := &hostileServer{url: "https://" + listener.Addr().String(), ca: ca.CertPEM(), refill: time.Now()}
	h.changed, h.change = context.WithCancel(context.Background())
	h.honest = &httputil.ReverseProxy{
		Rewrite:   func(r *httputil.ProxyRequest) { r.SetURL(target) },
		Transport: transport, FlushInterval: -1, ErrorLog: quiet,
	}
	h.server = &http.Server{
		Handler: h, ReadHeaderTimeout: time.Minute, ErrorLog: quiet,
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{certificate}, ClientAuth: tls.RequestClientCert, MinVersion: tls.VersionTLS12, NextProtos: []string{"h2"}},
	}
	go func() { _ = h.server.ServeTLS(listener, "", "") }() // until the test ends
	t.Cleanup(func() {
		h.set(0)
		_ = h.server.Close()
	})
	return h
}

// set starts an attack, or ends it with 0. All current answers end.
func (h *hostileServer) set(attacks attack) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.change()
	h.attacks = attacks
	h.changed, h.change = context.WithCancel(context.Background())
}

func (h *hostileServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h.mu.Lock()
	attacks, changed := h.attacks, h.changed
	h.mu.Unlock()
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(changed, cancel)()
	r = r.WithContext(ctx)
	query := r.URL.Query()
	watches := query.Get("watch") == "true"
	ofRequests := strings.HasSuffix(r.URL.Path, "/certificatesigningrequests")
	out := &limitedWriter{ResponseWriter: w, ctx: ctx, server: h}
	defer func() { // what breaks off is nothing to report
		if p := recover(); p != nil && p != http.ErrAbortHandler { //nolint:errorlint // as net/http compares it
			panic(p)
		}
	}()
	switch {
	case attacks&slowAnswers != 0:
		w.Header().Set("Content-Type", "application/json")
		for ctx.Err() == nil {
			_, _ = io.WriteString(out, " ")
			_ = http.NewResponseController(w).Flush()
			pause(ctx, time.Second)
		}
	case attacks&endlessLists != 0 && watches && ofRequests && query.Get("sendInitialEvents") == "true":
		http.Error(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Invalid","code":422}`, http.StatusUnprocessableEntity) // as before Kubernetes 1.34: it lists
	case attacks&endlessLists != 0 && watches && ofRequests:
		http.Error(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Expired","code":410}`, http.StatusGone) // it has to list again
	case attacks&endlessLists != 0 && !watches && ofRequests && r.Method == http.MethodGet:
		out.page()
	case attacks&endlessEvents != 0 && watches && ofRequests:
		out.events()
	case attacks&endlessBodies != 0 && !watches:
		w.Header().Set("Content-Type", "application/json")
		for chunk := make([]byte, 1<<16); ctx.Err() == nil; {
			if _, err := out.Write(chunk); err != nil {
				return
			}
		}
	default:
		h.honest.ServeHTTP(w, r)
	}
}

// limitedWriter writes no faster than the server's bandwidth, and counts.
type limitedWriter struct {
	http.ResponseWriter
	ctx    context.Context //nolint:containedctx // of one request
	server *hostileServer
}

func (l *limitedWriter) Write(data []byte) (int, error) {
	h := l.server
	h.mu.Lock()
	now := time.Now()
	h.budget = min(h.budget+now.Sub(h.refill).Seconds()*bandwidth, bandwidth/20)
	h.refill = now
	h.budget -= float64(len(data))
	wait := time.Duration(-h.budget / bandwidth * float64(time.Second))
	h.mu.Unlock()
	if wait > 0 {
		pause(l.ctx, wait)
	}
	if err := l.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := l.ResponseWriter.Write(data)
	h.sent.Add(int64(n))
	return n, err
}

var inventedCount atomic.Int64

// invented returns a hello that was never filed, with a new name and UID.
func invented() *certificatesv1.CertificateSigningRequest {
	n := inventedCount.Add(1)
	return &certificatesv1.CertificateSigningRequest{
		TypeMeta: metav1.TypeMeta{APIVersion: "certificates.k8s.io/v1", Kind: "CertificateSigningRequest"},
		ObjectMeta: metav1.ObjectMeta{
			Name: fmt.Sprintf("invented-%d", n), UID: types.UID(fmt.Sprintf("uid-%d", n)), ResourceVersion: fmt.Sprint(n), CreationTimestamp: metav1.Now(),
		},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request: []byte("nothing"), SignerName: attestation.HelloSignerName, Username: fmt.Sprintf("system:bootstrap:%06d", n%1_000_000),
			Usages: []certificatesv1.KeyUsage{certificatesv1.UsageClientAuth},
		},
	}
}

// page answers with one page of a list that never ends.
func (l *limitedWriter) page() {
	list := &certificatesv1.CertificateSigningRequestList{
		TypeMeta: metav1.TypeMeta{APIVersion: "certificates.k8s.io/v1", Kind: "CertificateSigningRequestList"},
		ListMeta: metav1.ListMeta{ResourceVersion: "1", Continue: "next"},
	}
	for range 5000 {
		list.Items = append(list.Items, *invented())
	}
	l.Header().Set("Content-Type", apiruntime.ContentTypeProtobuf)
	_ = protobuf.NewSerializer(clientgoscheme.Scheme, clientgoscheme.Scheme).Encode(list, l)
}

// events answers a watch with an endless stream of events.
func (l *limitedWriter) events() {
	l.Header().Set("Content-Type", apiruntime.ContentTypeProtobuf+";stream=watch")
	objects, frames := protobuf.NewSerializer(clientgoscheme.Scheme, clientgoscheme.Scheme), protobuf.LengthDelimitedFramer.NewFrameWriter(l)
	whole := protobuf.NewRawSerializer(clientgoscheme.Scheme, clientgoscheme.Scheme)
	for l.ctx.Err() == nil {
		data, err := apiruntime.Encode(objects, invented())
		if err != nil {
			return
		}
		if err := whole.Encode(&metav1.WatchEvent{Type: "ADDED", Object: apiruntime.RawExtension{Raw: data}}, frames); err != nil {
			return
		}
	}
}
