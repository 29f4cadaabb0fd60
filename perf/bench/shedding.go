// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"io"
	"log"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// call is a kind of request.
type call int

const (
	callPost call = iota
	callGet
	callList
	callWatch
	calls
)

func (c call) String() string { return [...]string{"POST", "GET", "LIST", "WATCH"}[c] }

// second is what arrived within one second.
type second struct{ answered, shed [calls]int }

func (s second) all() (n int) {
	for c := range calls {
		n += s.answered[c]
	}
	return n + s.allShed()
}

func (s second) allShed() (n int) {
	for _, shed := range s.shed {
		n += shed
	}
	return n
}

// sheddingServer serves the part of certificates.k8s.io/v1 that the plugin needs, and sheds load.
// It serves a bounded number of requests a second, and answers the others with Retry-After. It
// decides nothing.
type sheddingServer struct {
	url      string
	ca       []byte
	status   int // of a request that is shed
	capacity float64
	began    time.Time
	stop     context.CancelFunc
	server   *http.Server

	mu       sync.Mutex
	tokens   float64
	refilled time.Time
	objects  map[string]*certificatesv1.CertificateSigningRequest
	seconds  []second
}

// retryAfter is what kube-apiserver asks for when it sheds load.
const retryAfter = "1"

// connectionIdle is how long a connection outlives its last request: longer than retryAfter, and
// not much longer than a worker. A real worker's connection ends with its process.
const connectionIdle = 3 * time.Second

// newSheddingServer starts one. Its certificate is for each name below overloadDomain, and for
// 127.0.0.1.
func newSheddingServer(status int, capacity float64) (*sheddingServer, error) {
	ca, err := testbed.NewCA("overload")
	if err != nil {
		return nil, err
	}
	pair, err := ca.IssueServer([]string{"*." + overloadDomain}, []net.IP{net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return nil, err
	}
	certificate, err := tls.X509KeyPair(pair.CertPEM, pair.KeyPEM)
	if err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	s := &sheddingServer{
		url: "https://" + listener.Addr().String(), ca: ca.CertPEM(), status: status, capacity: capacity,
		began: time.Now(), refilled: time.Now(), stop: stop, objects: map[string]*certificatesv1.CertificateSigningRequest{},
	}
	s.server = &http.Server{
		Handler: s, ReadHeaderTimeout: time.Minute, IdleTimeout: connectionIdle, ErrorLog: log.New(io.Discard, "", 0),
		BaseContext: func(net.Listener) context.Context { return ctx },
		TLSConfig: &tls.Config{
			Certificates: []tls.Certificate{certificate}, ClientAuth: tls.RequestClientCert, MinVersion: tls.VersionTLS13, NextProtos: []string{"h2"},
			// the cheapest: both sides share this machine
			CurvePreferences: []tls.CurveID{tls.X25519},
		},
	}
	go func() { _ = s.server.ServeTLS(listener, "", "") }() // until close
	return s, nil
}

// close ends all watches and connections.
func (s *sheddingServer) close() {
	s.stop()
	_ = s.server.Close()
}

// kindOf says what a request is. The plugin sends nothing else.
func kindOf(r *http.Request) (call, string) {
	_, name, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/apis/certificates.k8s.io/v1/"), "/")
	query := r.URL.Query()
	if name == "" {
		_, name, _ = strings.Cut(query.Get("fieldSelector"), "=")
	}
	switch {
	case r.Method == http.MethodPost:
		return callPost, name
	case query.Get("watch") != "":
		return callWatch, name
	case query.Has("fieldSelector"):
		return callList, name
	}
	return callGet, name
}

func (s *sheddingServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	kind, name := kindOf(r)
	var object *certificatesv1.CertificateSigningRequest
	if kind == callPost { // it is read in any case: the client is not to see a broken connection
		object = &certificatesv1.CertificateSigningRequest{}
		if err := json.NewDecoder(r.Body).Decode(object); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
	}
	if !s.admit(kind) {
		// As kube-apiserver does (apiserver/pkg/server/filters, tooManyRequests).
		w.Header().Set("Retry-After", retryAfter)
		http.Error(w, "Too many requests, please try again later.", s.status)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	switch kind {
	case callPost:
		s.create(w, object)
	case callWatch:
		s.watch(w, r)
	case callList:
		list := certificatesv1.CertificateSigningRequestList{TypeMeta: typeMeta("CertificateSigningRequestList")}
		if found := s.object(name); found != nil {
			list.Items = append(list.Items, *found)
		}
		_ = json.NewEncoder(w).Encode(list)
	default:
		if found := s.object(name); found != nil {
			_ = json.NewEncoder(w).Encode(found)
			return
		}
		refuse(w, http.StatusNotFound, metav1.StatusReasonNotFound)
	}
}

// admit counts the request, and says whether it is answered: a token bucket, which holds a tenth of
// a second.
func (s *sheddingServer) admit(kind call) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	s.tokens = min(s.tokens+now.Sub(s.refilled).Seconds()*s.capacity, max(s.capacity/10, 1))
	s.refilled = now
	for i := int(now.Sub(s.began) / time.Second); i >= len(s.seconds); {
		s.seconds = append(s.seconds, second{})
	}
	last := &s.seconds[len(s.seconds)-1]
	if s.tokens < 1 {
		last.shed[kind]++
		return false
	}
	s.tokens--
	last.answered[kind]++
	return true
}

func (s *sheddingServer) create(w http.ResponseWriter, object *certificatesv1.CertificateSigningRequest) {
	s.mu.Lock()
	if s.objects[object.Name] != nil {
		s.mu.Unlock()
		refuse(w, http.StatusConflict, metav1.StatusReasonAlreadyExists)
		return
	}
	object.TypeMeta = typeMeta("CertificateSigningRequest")
	object.UID, object.ResourceVersion = types.UID("uid-"+object.Name), strconv.Itoa(len(s.objects)+1)
	s.objects[object.Name] = object
	s.mu.Unlock()
	w.WriteHeader(http.StatusCreated)
	_ = json.NewEncoder(w).Encode(object)
}

// watch stays open as long as the client wants it to. Nothing happens to the object.
func (s *sheddingServer) watch(w http.ResponseWriter, r *http.Request) {
	ctx := r.Context()
	if seconds, err := strconv.Atoi(r.URL.Query().Get("timeoutSeconds")); err == nil {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(seconds)*time.Second)
		defer cancel()
	}
	w.WriteHeader(http.StatusOK)
	_ = http.NewResponseController(w).Flush()
	<-ctx.Done()
}

func (s *sheddingServer) object(name string) *certificatesv1.CertificateSigningRequest {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.objects[name]
}

// filed returns how many requests exist.
func (s *sheddingServer) filed() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.objects)
}

// arrived returns what arrived in each second between two times since the start.
func (s *sheddingServer) arrived(from, to time.Duration) []second {
	s.mu.Lock()
	defer s.mu.Unlock()
	window := make([]second, int((to-from)/time.Second))
	for i := range window {
		if at := int(from/time.Second) + i; at < len(s.seconds) {
			window[i] = s.seconds[at]
		}
	}
	return window
}

func typeMeta(kind string) metav1.TypeMeta {
	return metav1.TypeMeta{APIVersion: certificatesv1.SchemeGroupVersion.String(), Kind: kind}
}

func refuse(w http.ResponseWriter, status int, reason metav1.StatusReason) {
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: metav1.StatusFailure, Code: int32(status), Reason: reason, Message: string(reason), //nolint:gosec // G115: a status of HTTP
	})
}
