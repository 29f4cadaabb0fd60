// SPDX-License-Identifier: Apache-2.0

package authorizer

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

// identity is a self-signed certificate, which is its own CA.
type identity struct{ certificate, key []byte }

func newIdentity(t *testing.T, name string) identity {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return identity{pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8})}
}

func writeFile(t *testing.T, path string, content []byte) {
	t.Helper()
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
}

// clientOf returns a client with an identity, nil for none, that trusts the server's certificate.
func clientOf(t *testing.T, with *identity, server identity) *http.Client {
	t.Helper()
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(server.certificate)
	config := &tls.Config{RootCAs: pool}
	if with != nil {
		pair, err := tls.X509KeyPair(with.certificate, with.key)
		if err != nil {
			t.Fatal(err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	transport := &http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: true}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: patience}
}

// Only a client with a certificate of the CA gets an answer. Certificates and CA are read again.
func TestServe(t *testing.T) {
	t.Parallel()
	server, client, other := newIdentity(t, "authorizer"), newIdentity(t, "api server"), newIdentity(t, "other")
	w := newWorld(t, slice(1, []v1alpha1.RevokedCertificate{revokedCertificate("a", 1)}))
	a, _ := w.start(t.TempDir(), nil)
	awaitLive(t, a)
	dir := t.TempDir()
	files := TLSFiles{filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key"), filepath.Join(dir, "ca.crt")}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Serve(t.Context(), listener, files); err == nil {
		t.Error("it serves without files")
	}
	writeFile(t, files.Certificate, server.certificate)
	writeFile(t, files.Key, server.key)
	writeFile(t, files.ClientCA, client.certificate)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- a.Serve(ctx, listener, files) }()
	review := `{"apiVersion":"authorization.k8s.io/v1","kind":"SubjectAccessReview","spec":{"user":"system:node:a","groups":["system:nodes"],` +
		`"extra":{"authentication.kubernetes.io/credential-id":["` + id(1) + `"]},"resourceAttributes":{"verb":"get","resource":"secrets"}}}`
	ask := func(c *http.Client) (authorizationv1.SubjectAccessReview, error) {
		response, err := c.Post("https://"+listener.Addr().String()+"/authorize", "application/json", strings.NewReader(review))
		if err != nil {
			return authorizationv1.SubjectAccessReview{}, err
		}
		defer func() { _ = response.Body.Close() }()
		var answer authorizationv1.SubjectAccessReview
		return answer, json.NewDecoder(response.Body).Decode(&answer)
	}
	answer, err := ask(clientOf(t, &client, server))
	if err != nil || !answer.Status.Denied || answer.Status.Allowed || answer.Status.Reason != attestation.MessageRevoked || answer.Kind != "SubjectAccessReview" {
		t.Errorf("%+v, %v", answer, err)
	}
	for name, c := range map[string]*http.Client{"no certificate": clientOf(t, nil, server), "another CA": clientOf(t, &other, server)} {
		if answer, err := ask(c); err == nil {
			t.Errorf("%s: %+v", name, answer)
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// While a file is invalid, the last valid one is used. A new one is used once it is valid.
func TestFilesAreReadAgain(t *testing.T) {
	t.Parallel()
	server, renewed, client := newIdentity(t, "authorizer"), newIdentity(t, "renewed"), newIdentity(t, "api server")
	w := newWorld(t)
	now := time.Now()
	a, stop := w.start(t.TempDir(), nil)
	stop()
	a.Now = func() time.Time { return now }
	dir := t.TempDir()
	files := TLSFiles{filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key"), filepath.Join(dir, "ca.crt")}
	writeFile(t, files.Certificate, server.certificate)
	writeFile(t, files.Key, server.key)
	writeFile(t, files.ClientCA, client.certificate)
	configure := a.tlsConfig(files)
	uses := func(want identity) bool {
		now = now.Add(filesInterval)
		config, err := configure(nil)
		if err != nil {
			t.Fatal(err)
		}
		block, _ := pem.Decode(want.certificate)
		return config.ClientAuth == tls.RequireAndVerifyClientCert && bytes.Equal(config.Certificates[0].Certificate[0], block.Bytes)
	}
	if !uses(server) {
		t.Error("the first one")
	}
	writeFile(t, files.Certificate, renewed.certificate)
	writeFile(t, files.ClientCA, []byte("nothing"))
	if !uses(server) {
		t.Error("the key does not match yet")
	}
	writeFile(t, files.Key, renewed.key)
	if !uses(renewed) {
		t.Error("the renewed one")
	}
}

// What cannot be read gets no opinion, and no error that an API server would repeat. What is too
// long is denied: it is a thief's.
func TestMalformedQuestions(t *testing.T) {
	t.Parallel()
	w := newWorld(t, slice(1, []v1alpha1.RevokedCertificate{revokedCertificate("a", 1)}))
	a, _ := w.start(t.TempDir(), nil)
	awaitLive(t, a)
	void := `"spec":{"user":"system:node:a","groups":["system:nodes"],"extra":{"authentication.kubernetes.io/credential-id":["` + id(1) + `"]}`
	head := `{"apiVersion":"authorization.k8s.io/v1","kind":"SubjectAccessReview",`
	longest := head + void + "}}"
	longest += strings.Repeat(" ", maxQuestion-len(longest))
	for name, c := range map[string]struct {
		method, body string
		denied       bool
	}{
		"nothing":                      {"POST", "", false},
		"no JSON":                      {"POST", "{", false},
		"a list":                       {"POST", "[]", false},
		"two documents":                {"POST", head + void + "}}" + head + void + "}}", false},
		"GET":                          {"GET", head + void + "}}", false},
		"another kind":                 {"POST", strings.Replace(head, "Subject", "SelfSubject", 1) + void + "}}", false},
		"another version":              {"POST", strings.Replace(head, "/v1", "/v1beta1", 1) + void + "}}", false},
		"extra of another type":        {"POST", head + `"spec":{"user":"system:node:a","extra":{"a":"b"}}}`, false},
		"as long as a question may be": {"POST", longest, true},
		"a byte longer":                {"POST", longest + " ", true},
		"too long":                     {"POST", head + `"spec":{"uid":"` + strings.Repeat("a", 2<<20) + `","user":"system:node:a"}}`, true},
		"deep":                         {"POST", strings.Repeat("[", 20_000), false},
		"a user, and nothing else":     {"POST", head + `"spec":{"user":"system:node:a"}}`, true},
		"neither resource nor path":    {"POST", head + void + "}}", true},
		"a field of a later release":   {"POST", head + void + `,"later":{"a":1}}}`, true},
		"a subresource":                {"POST", head + void + `,"resourceAttributes":{"verb":"create","resource":"certificatesigningrequests","group":"certificates.k8s.io","subresource":"status"}}}`, true},
	} {
		recorder := httptest.NewRecorder()
		request, err := http.NewRequestWithContext(t.Context(), c.method, "https://127.0.0.1/", io.NopCloser(strings.NewReader(c.body)))
		if err != nil {
			t.Fatal(err)
		}
		a.ServeHTTP(recorder, request)
		var answer authorizationv1.SubjectAccessReview
		if err := json.Unmarshal(recorder.Body.Bytes(), &answer); err != nil || recorder.Code != http.StatusOK || answer.Status.Denied != c.denied || answer.Status.Allowed ||
			answer.Kind != kind || answer.APIVersion != "authorization.k8s.io/v1" {
			t.Errorf("%s: %d, %s, %v", name, recorder.Code, recorder.Body.String(), err)
		}
		if tooLong := len(c.body) > maxQuestion && c.method == "POST"; tooLong != (answer.Status.Reason == messageTooLong) {
			t.Errorf("%s: %s", name, answer.Status.Reason)
		}
	}
	if w.logged("cannot read a question") == 0 || w.logged("is too long") != 1 {
		t.Error("nothing is logged")
	}
}

// BenchmarkAnswer answers a question of a node without revoked certificates, without TLS.
func BenchmarkAnswer(b *testing.B) {
	a := &Authorizer{Config: Config{Strict: StrictOff, Now: time.Now}}
	a.lists.Store(&Lists{})
	body := `{"apiVersion":"authorization.k8s.io/v1","kind":"SubjectAccessReview","spec":{"user":"system:node:a","groups":["system:nodes","system:authenticated"],` +
		`"extra":{"authentication.kubernetes.io/credential-id":["` + id(1) + `"]},"resourceAttributes":{"verb":"get","resource":"secrets","namespace":"a","name":"b"}}}`
	for b.Loop() {
		recorder := httptest.NewRecorder()
		a.ServeHTTP(recorder, httptest.NewRequestWithContext(b.Context(), http.MethodPost, "/", strings.NewReader(body)))
		if recorder.Code != http.StatusOK {
			b.Fatal(recorder.Code)
		}
	}
}
