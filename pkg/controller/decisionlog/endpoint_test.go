// SPDX-License-Identifier: Apache-2.0

package decisionlog

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io"
	"log"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// collector is an HTTPS endpoint.
type collector struct {
	*httptest.Server
	config EndpointConfig

	mu      sync.Mutex
	answer  func(w http.ResponseWriter, r *http.Request)
	headers []http.Header
	bodies  []string
}

func newCollector(t *testing.T, change func(*tls.Config)) *collector {
	t.Helper()
	c := &collector{}
	c.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		c.mu.Lock()
		c.headers, c.bodies = append(c.headers, r.Header), append(c.bodies, string(body))
		answer := c.answer
		c.mu.Unlock()
		if answer != nil {
			answer(w, r)
		}
	}))
	c.Config.ErrorLog = log.New(io.Discard, "", 0) // it logs failed handshakes
	c.TLS = &tls.Config{}
	if change != nil {
		change(c.TLS)
	}
	c.StartTLS()
	t.Cleanup(c.Close)
	c.config = EndpointConfig{URL: c.URL + "/decisions", CAFile: writePEM(t, "CERTIFICATE", c.Certificate().Raw)}
	return c
}

func writePEM(t *testing.T, kind string, der []byte) string {
	t.Helper()
	return writeFile(t, string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})))
}

func writeFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func (c *collector) post(t *testing.T) (int, error) {
	t.Helper()
	e, err := NewEndpoint(c.config)
	if err != nil {
		t.Fatal(err)
	}
	return e.Write(t.Context(), lines(0, 3))
}

// A batch is one POST of lines, with the token that is in the file now.
func TestEndpoint(t *testing.T) {
	c := newCollector(t, nil)
	c.config.TokenFile = writeFile(t, "first\n")
	if n, err := c.post(t); n != 3 || err != nil {
		t.Fatalf("%d, %v", n, err)
	}
	if err := os.WriteFile(c.config.TokenFile, []byte("second"), 0o600); err != nil {
		t.Fatal(err)
	}
	if n, err := c.post(t); n != 3 || err != nil {
		t.Fatalf("%d, %v", n, err)
	}
	if c.bodies[0] != string(bytes.Join(lines(0, 3), nil)) || c.headers[0].Get("Content-Type") != "application/x-ndjson" {
		t.Errorf("%q, %v", c.bodies, c.headers)
	}
	if c.headers[0].Get("Authorization") != "Bearer first" || c.headers[1].Get("Authorization") != "Bearer second" {
		t.Errorf("%v", c.headers)
	}
}

// A certificate of the client is shown, where one is configured.
func TestEndpointWantsACertificate(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	shown := make(chan []byte, 1)
	c := newCollector(t, func(server *tls.Config) {
		server.ClientAuth = tls.RequireAnyClientCert
		server.VerifyPeerCertificate = func(raw [][]byte, _ [][]*x509.Certificate) error { shown <- raw[0]; return nil }
	})
	if n, err := c.post(t); n != 0 || err == nil {
		t.Errorf("without a certificate: %d, %v", n, err)
	}
	c.config.CertificateFile, c.config.KeyFile = writePEM(t, "CERTIFICATE", der), writePEM(t, "PRIVATE KEY", keyDER)
	if n, err := c.post(t); n != 3 || err != nil || !bytes.Equal(<-shown, der) {
		t.Errorf("%d, %v", n, err)
	}
}

// Nothing is sent to a server that does not show the right certificate, or where a redirect leads.
// No error has the token or the URL.
func TestEndpointIsNotTheOne(t *testing.T) {
	other := newCollector(t, nil)
	for name, spoil := range map[string]func(*collector){
		"another CA":      func(c *collector) { c.config.CAFile = "" },
		"another name":    func(c *collector) { c.config.URL = strings.Replace(c.config.URL, "127.0.0.1", "localhost", 1) },
		"a redirect":      func(c *collector) { c.answer = redirectTo(other.URL) },
		"plain HTTP":      func(c *collector) { c.config.URL = strings.Replace(c.config.URL, c.URL, plain(t), 1) },
		"a broken CA":     func(c *collector) { c.config.CAFile = writeFile(t, "none") },
		"no CA file":      func(c *collector) { c.config.CAFile = "/nonexistent" },
		"an empty token":  func(c *collector) { c.config.TokenFile = writeFile(t, "\n") },
		"a token of two":  func(c *collector) { c.config.TokenFile = writeFile(t, "secret-token\nsecret-token") },
		"no token":        func(c *collector) { c.config.TokenFile = "/nonexistent" },
		"a broken key":    func(c *collector) { c.config.CertificateFile, c.config.KeyFile = c.config.CAFile, c.config.TokenFile },
		"a missing key":   func(c *collector) { c.config.CertificateFile, c.config.KeyFile = c.config.CAFile, "/nonexistent" },
		"nobody listens":  func(c *collector) { c.Close() },
		"an endless file": func(c *collector) { c.config.TokenFile = "/dev/zero" },
	} {
		t.Run(name, func(t *testing.T) {
			c := newCollector(t, nil)
			c.config.URL += "?key=secret-query"
			c.config.TokenFile = writeFile(t, "secret-token")
			spoil(c)
			n, err := c.post(t)
			if n != 0 || err == nil {
				t.Fatalf("%d, %v", n, err)
			}
			if _, refused := errors.AsType[*RefusedError](err); refused || strings.Contains(err.Error(), "secret") {
				t.Errorf("%v", err)
			}
			if len(other.bodies) > 0 || name != "a redirect" && len(c.bodies) > 0 {
				t.Error("it was sent")
			}
		})
	}
}

func redirectTo(url string) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, url, http.StatusTemporaryRedirect) }
}

// plain returns the https URL of a server that speaks HTTP.
func plain(t *testing.T) string {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("it was sent") }))
	t.Cleanup(server.Close)
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	return strings.Replace(server.URL, "http:", "https:", 1)
}

// Which answers are final: a batch that is refused is not sent again as it is.
func TestEndpointAnswers(t *testing.T) {
	c := newCollector(t, nil)
	for status, want := range map[int]string{
		200: "taken", 202: "taken", 204: "taken",
		400: "refused", 413: "refused", 415: "refused", 422: "refused",
		301: "again", 304: "again", 401: "again", 403: "again", 404: "again", 408: "again", 429: "again", 500: "again", 503: "again",
	} {
		c.answer = func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) }
		n, err := c.post(t)
		_, refused := errors.AsType[*RefusedError](err)
		got := "again"
		switch {
		case err == nil && n == 3:
			got = "taken"
		case refused && n == 0:
			got = "refused"
		}
		if got != want {
			t.Errorf("%d: %s, want %s (%d, %v)", status, got, want, n, err)
		}
	}
}

// An endpoint that does not answer holds a batch no longer than its context, and each batch has a
// timeout of its own.
func TestEndpointHangs(t *testing.T) {
	c := newCollector(t, nil)
	release := make(chan struct{})
	t.Cleanup(func() { close(release) })
	c.answer = func(http.ResponseWriter, *http.Request) { <-release }
	e, err := NewEndpoint(c.config)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	began := time.Now()
	if n, err := e.Write(ctx, lines(0, 1)); n != 0 || !errors.Is(err, context.DeadlineExceeded) || time.Since(began) > postTimeout/2 {
		t.Errorf("%d, %v after %s", n, err, time.Since(began))
	}
}

func TestEndpointConfig(t *testing.T) {
	for name, config := range map[string]EndpointConfig{
		"none":          {},
		"http":          {URL: "http://example.com/"},
		"a user":        {URL: "https://user:secret@example.com/"},
		"no host":       {URL: "https:///path"},
		"a fragment":    {URL: "https://example.com/#a"},
		"not a URL":     {URL: "https://exa mple.com/"},
		"half a pair":   {URL: "https://example.com/", CertificateFile: "/a"},
		"the other one": {URL: "https://example.com/", KeyFile: "/a"},
	} {
		if _, err := NewEndpoint(config); err == nil || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
