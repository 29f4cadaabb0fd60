// SPDX-License-Identifier: Apache-2.0

package googlekeys

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/google"
)

var theGoogle = sync.OnceValue(func() *google.Google { return google.New("test") })

// serve serves over TLS, and returns a client that trusts the server.
func serve(t *testing.T, handler http.Handler) *Client {
	t.Helper()
	server := httptest.NewUnstartedServer(handler)
	server.EnableHTTP2 = true
	server.StartTLS()
	t.Cleanup(server.Close)
	pool := x509.NewCertPool()
	pool.AddCert(server.Certificate())
	client, err := New(Config{URL: server.URL + "/oauth2/v3/certs", RootCAs: pool})
	if err != nil {
		t.Fatal(err)
	}
	return client
}

func TestFetch(t *testing.T) {
	data, maxAge, err := serve(t, theGoogle().Keys()).Fetch(t.Context())
	if err != nil || !bytes.Equal(data, theGoogle().KeySet()) || maxAge != 21000*time.Second {
		t.Errorf("%q, %s, %v", data, maxAge, err)
	}
}

// Nothing is returned of an answer that is not whole, or comes from elsewhere.
func TestFaults(t *testing.T) {
	faulty := func(fault google.Fault) http.Handler {
		s := theGoogle().Keys()
		s.Set(fault)
		return s
	}
	write := func(n int) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(bytes.Repeat([]byte("k"), n)) })
	}
	if data, _, err := serve(t, write(maxAnswer)).Fetch(t.Context()); err != nil || len(data) != maxAnswer {
		t.Errorf("%d bytes: %v", len(data), err)
	}
	for what, c := range map[string]struct {
		handler http.Handler
		says    string
	}{
		"down":        {faulty(google.Down), ""},
		"redirecting": {faulty(google.Redirecting), "status 302"},
		"failing":     {faulty(google.Failing), "status 500"},
		"too long":    {write(maxAnswer + 1), "longer than 65536 bytes"},
		"empty":       {write(0), "empty"},
		"cut short": {http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "100")
			_, _ = w.Write([]byte("half"))
		}), ""},
	} {
		data, _, err := serve(t, c.handler).Fetch(t.Context())
		if err == nil || data != nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %d bytes, %v", what, len(data), err)
		}
	}
}

func TestSlowServer(t *testing.T) {
	s := theGoogle().Keys()
	s.Set(google.Slow)
	client := serve(t, s)
	if client.timeout != 10*time.Second {
		t.Errorf("waits %s", client.timeout)
	}
	client.timeout = 50 * time.Millisecond
	if _, _, err := client.Fetch(t.Context()); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := client.Fetch(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

// A server whose certificate is not trusted is not asked.
func TestUntrustedServer(t *testing.T) {
	asked := false
	client := serve(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked = true }))
	client.transport.TLSClientConfig.RootCAs = x509.NewCertPool()
	if _, _, err := client.Fetch(t.Context()); err == nil || asked {
		t.Errorf("asked: %t, %v", asked, err)
	}
}

func TestURL(t *testing.T) {
	if c, err := New(Config{}); err != nil || c.url != DefaultURL || c.transport.Proxy == nil {
		t.Errorf("%+v, %v", c, err)
	}
	for _, url := range []string{"http://example.com/", "https://", "https://user@example.com/", "https://example.com/#f", "file:///etc/keys", "\x7f", "example.com"} {
		if _, err := New(Config{URL: url}); err == nil {
			t.Errorf("%q is accepted", url)
		}
	}
}

func TestFreshness(t *testing.T) {
	for _, c := range []struct {
		control, age string
		want         time.Duration
	}{
		{"public, max-age=19000, must-revalidate", "", 19000 * time.Second},
		{"Public,Max-Age=3600", "600", 3000 * time.Second},
		{"max-age=3600", "x", time.Hour},
		{"max-age=3600", "9999", MinAge},
		{"max-age=3600", "-600", time.Hour},
		{"s-maxage=7200", "", MinAge},
		{"no-store", "", MinAge},
		{"", "", MinAge},
		{"max-age=-1", "", MinAge},
		{"max-age=0", "", MinAge},
		{"max-age=86401", "", MaxAge},
		{"max-age=99999999999999999999999", "", MaxAge},
		{"max-age=3600", "99999999999999999999999", MinAge},
	} {
		header := http.Header{"Cache-Control": {c.control}, "Age": {c.age}}
		if got := freshness(header); got != c.want {
			t.Errorf("%q, age %q: %s", c.control, c.age, got)
		}
	}
}
