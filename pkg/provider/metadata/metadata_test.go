// SPDX-License-Identifier: Apache-2.0

package metadata

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/unittest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// TestMain names a proxy at which nothing listens. net/http reads the environment once.
func TestMain(m *testing.M) {
	for _, name := range []string{"HTTP_PROXY", "http_proxy"} {
		if err := os.Setenv(name, "http://127.0.0.1:1"); err != nil {
			panic(err)
		}
	}
	unittest.Main(m)
}

// serve returns a client of an imitation.
func serve(t *testing.T, handler http.HandlerFunc) Client {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return Client{Address: server.Listener.Addr().String()}
}

// wantClass checks class and text of an error.
func wantClass(t *testing.T, what string, err error, class provider.Class, says string) {
	t.Helper()
	if failed, ok := errors.AsType[*provider.Error](err); !ok || failed.Class != class || !strings.Contains(err.Error(), says) {
		t.Errorf("%s: got %v, want class %d and %q", what, err, class, says)
	}
}

func TestExchange(t *testing.T) {
	client := serve(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if r.Method != http.MethodPut || r.URL.RequestURI() != "/a/b?c=d" || r.Header.Get("X-Token") != "t" || string(body) != "body" {
			t.Errorf("%s %s %v %q", r.Method, r.URL, r.Header, body)
		}
		w.Header().Set("Flavor", "vanilla")
		_, _ = io.WriteString(w, strings.Repeat("x", maxAnswer))
	})
	answer, header, err := client.Exchange(t.Context(), http.MethodPut, "/a/b?c=d", http.Header{"X-Token": {"t"}}, []byte("body"))
	if err != nil || len(answer) != maxAnswer || header.Get("Flavor") != "vanilla" {
		t.Errorf("%d bytes, %v, %v", len(answer), header, err)
	}
}

// Only an answer of the service itself counts, and only a short one.
func TestAnswersThatDoNotCount(t *testing.T) {
	elsewhere := serve(t, func(http.ResponseWriter, *http.Request) { t.Error("a redirect was followed") })
	for what, c := range map[string]struct {
		answer http.HandlerFunc
		says   string
	}{
		"redirect": {func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "http://"+elsewhere.Address+"/", http.StatusFound)
		}, "GET /x: status 302"},
		"no such path":   {http.NotFound, "GET /x: status 404"},
		"error":          {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) }, "GET /x: status 500"},
		"another status": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusCreated) }, "GET /x: status 201"},
		"a byte more": {func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, strings.Repeat("x", maxAnswer+1))
		}, "more than 65536 bytes"},
		"cut off": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "9")
			_, _ = io.WriteString(w, "short")
		}, "unexpected EOF"},
	} {
		answer, err := serve(t, c.answer).Call(t.Context(), http.MethodGet, "/x?secret=1", nil, nil)
		wantClass(t, what, err, provider.DeviceFailed, c.says)
		if answer != nil || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %q, %v", what, answer, err)
		}
	}
	var status *StatusError
	if _, err := serve(t, http.NotFound).Call(t.Context(), http.MethodGet, "/x", nil, nil); !errors.As(err, &status) || status.Status != http.StatusNotFound {
		t.Errorf("a status: %v", err)
	}
}

// Where nothing listens there is no such service, which is another matter than one that fails.
func TestNobodyListens(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	client := Client{Address: listener.Addr().String()}
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	_, err = client.Call(t.Context(), http.MethodGet, "/", nil, nil)
	wantClass(t, "closed", err, provider.NoDevice, "refused")
}

func TestSlowService(t *testing.T) {
	ended := make(chan struct{})
	client := serve(t, func(_ http.ResponseWriter, r *http.Request) {
		<-r.Context().Done()
		close(ended)
	})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := client.Call(ctx, http.MethodGet, "/", nil, nil)
	wantClass(t, "slow", err, provider.DeviceFailed, "deadline exceeded")
	<-ended
}

// A proxy of the environment would be asked for the cloud's address: it could answer anything.
func TestNoProxyIsUsed(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	// An address of the documentation (RFC 5737), as Go uses no proxy for loopback addresses.
	_, err := Client{Address: "192.0.2.1:80"}.Call(ctx, http.MethodGet, "/", nil, nil)
	if err == nil || strings.Contains(err.Error(), "proxyconnect") {
		t.Errorf("got %v", err)
	}
}
