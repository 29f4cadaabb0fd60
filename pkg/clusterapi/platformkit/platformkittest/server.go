// SPDX-License-Identifier: Apache-2.0

package platformkittest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

// Fault is what is wrong with the platform's API as a whole.
type Fault int

// Faults. Each replaces the answers to all calls.
const (
	NoFault Fault = iota
	// Throttled refuses calls, with a Retry-After of one second.
	Throttled
	// Silent answers no call.
	Silent
	// Forbidden says that the credential lacks a right.
	Forbidden
	// Expired says that the credential is no longer valid.
	Expired
	// Redirected sends the caller to another server.
	Redirected
	// OtherCA has a certificate that the adapter must not accept.
	OtherCA
)

// Server is the TLS server of an imitation. It counts calls and makes faults, so that the imitation
// only has to answer as the platform does without faults.
type Server struct {
	// URL is https://127.0.0.1:<port>, and CAFile has the certificate of its CA in PEM.
	URL, CAFile string
	// Throttle and Expire replace the answers to Throttled (429) and Expired (401), for an API that
	// says it in another way. Set them before the first call.
	Throttle, Expire http.HandlerFunc

	handler   http.Handler
	server    *httptest.Server
	elsewhere string
	good, bad tls.Certificate

	mu             sync.Mutex
	fault          Fault
	calls, strayed int
}

// NewServer starts a server, which ends with the test.
func NewServer(t *testing.T, handler http.Handler) *Server {
	t.Helper()
	s := &Server{handler: handler}
	var root []byte
	root, s.good = certificate(t)
	_, s.bad = certificate(t)
	s.CAFile = filepath.Join(t.TempDir(), "ca.crt")
	if err := os.WriteFile(s.CAFile, root, 0o600); err != nil {
		t.Fatal(err)
	}
	s.server = httptest.NewUnstartedServer(s)
	s.server.TLS = &tls.Config{MinVersion: tls.VersionTLS12, GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.fault == OtherCA {
			return &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{s.bad}}, nil
		}
		return &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{s.good}}, nil
	}}
	s.server.Config.ErrorLog = quiet
	s.server.StartTLS()
	t.Cleanup(s.server.Close)
	s.URL = s.server.URL

	// It has a certificate that the adapter accepts, and answers as the platform does.
	elsewhere := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		s.strayed++
		s.mu.Unlock()
		handler.ServeHTTP(w, r)
	}))
	elsewhere.TLS = &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{s.good}}
	elsewhere.Config.ErrorLog = quiet
	elsewhere.StartTLS()
	t.Cleanup(elsewhere.Close)
	s.elsewhere = elsewhere.URL
	return s
}

// Set sets the fault. Open connections end.
func (s *Server) Set(fault Fault) {
	s.mu.Lock()
	s.fault = fault
	s.mu.Unlock()
	s.server.CloseClientConnections()
}

// Calls returns the number of calls since the last time.
func (s *Server) Calls() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer func() { s.calls = 0 }()
	return s.calls
}

// Strayed returns the number of calls that followed a redirect.
func (s *Server) Strayed() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.strayed
}

// ServeHTTP answers as the fault says, or by the handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	s.calls++
	fault := s.fault
	s.mu.Unlock()
	switch {
	case fault == Throttled && s.Throttle != nil:
		s.Throttle(w, r)
	case fault == Throttled:
		w.Header().Set("Retry-After", "1")
		http.Error(w, "too many requests", http.StatusTooManyRequests)
	case fault == Silent:
		// the server sees the end of a connection only once the body is read
		_, _ = io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	case fault == Forbidden:
		http.Error(w, "forbidden", http.StatusForbidden)
	case fault == Expired && s.Expire != nil:
		s.Expire(w, r)
	case fault == Expired:
		http.Error(w, "expired", http.StatusUnauthorized)
	case fault == Redirected:
		http.Redirect(w, r, s.elsewhere+r.URL.RequestURI(), http.StatusTemporaryRedirect) //nolint:gosec // G710: an imitation
	default:
		s.handler.ServeHTTP(w, r)
	}
}

// certificate makes a CA in PEM, and a certificate of it for 127.0.0.1.
func certificate(t *testing.T) ([]byte, tls.Certificate) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "imitation"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), BasicConstraintsValid: true, IsCA: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}
