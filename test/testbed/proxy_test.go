// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

func TestProxyPasses(t *testing.T) {
	f := newProxyFixture(t)
	f.wantOK(t)
	f.wantOK(t)
	stats := f.proxy.Stats()
	if stats.Accepted != 1 || stats.Open != 1 || stats.Up == 0 || stats.Down == 0 {
		t.Errorf("two requests on one connection: %+v", stats)
	}
}

func TestProxyBreaksAndHeals(t *testing.T) {
	tests := []struct {
		name   string
		mode   Mode
		within time.Duration
		want   error
	}{
		{"refuse", Refuse, 5 * time.Second, syscall.ECONNREFUSED},
		{"reset", Reset, 5 * time.Second, syscall.ECONNRESET},
		{"black hole", BlackHole, 500 * time.Millisecond, context.DeadlineExceeded},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			f := newProxyFixture(t)
			f.wantOK(t)
			for range 2 { // it is there after healing, and breaks again
				f.setMode(t, test.mode)
				f.client.CloseIdleConnections() // TestProxyFreezes has the existing one
				if err := f.get(t, "/", test.within); !errors.Is(err, test.want) {
					t.Errorf("new connection: %v, want %v", err, test.want)
				}
				f.setMode(t, Pass)
				f.wantOK(t)
			}
		})
	}
}

// The test uses bare TCP. A connection has two halves, and only the first to notice gets the reset.
// In HTTP that may be the half whose error nobody sees.
func TestProxyResetsExisting(t *testing.T) {
	for name, reset := range map[string]func(*Proxy) error{
		"refuse": func(p *Proxy) error { return p.SetMode(Refuse) },
		"reset":  func(p *Proxy) error { return p.SetMode(Reset) },
		"once":   func(p *Proxy) error { p.ResetConnections(); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			f := newProxyFixture(t)
			conn, err := net.Dial("tcp", f.proxy.Addr())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = conn.Close() })
			if err := poll(t.Context(), "the connection", func(context.Context) error {
				if f.proxy.Stats().Open == 0 {
					return errors.New("it is not accepted yet")
				}
				return nil
			}); err != nil {
				t.Fatal(err)
			}
			if err := reset(f.proxy); err != nil {
				t.Fatal(err)
			}
			if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("existing connection: %v", err)
			}
		})
	}
}

// A frozen connection neither ends nor loses anything: the answer comes when
// the black hole does not swallow any more.
func TestProxyFreezes(t *testing.T) {
	f := newProxyFixture(t)
	answered := make(chan error, 1)
	go func() { answered <- f.get(t, "/slow", time.Minute) }()
	<-f.slow
	f.setMode(t, BlackHole)
	f.release <- struct{}{}
	select {
	case err := <-answered:
		t.Fatalf("an answer came out of the black hole: %v", err)
	case <-time.After(300 * time.Millisecond):
	}
	f.setMode(t, Pass)
	if err := <-answered; err != nil {
		t.Errorf("after the black hole: %v", err)
	}
	if n := f.proxy.Stats().Accepted; n != 1 {
		t.Errorf("%d connections, want the one that was frozen", n)
	}
}

// The end of a connection must not come out of a black hole either.
func TestProxyFreezesTheEnd(t *testing.T) {
	f := newProxyFixture(t)
	answered := make(chan error, 1)
	go func() { answered <- f.get(t, "/slow", time.Minute) }()
	<-f.slow
	f.setMode(t, BlackHole)
	f.server.CloseClientConnections()
	select {
	case err := <-answered:
		t.Fatalf("the end came out of the black hole: %v", err)
	case <-time.After(300 * time.Millisecond):
	}
	f.setMode(t, Pass)
	if err := <-answered; err == nil {
		t.Error("the connection's end was lost")
	}
}

func TestProxyLosesOneAnswer(t *testing.T) {
	tests := []struct {
		name    string
		connect bool // have a connection before
		body    int
		after   int64
	}{
		{"new connection", false, 10, 0},
		{"existing connection", true, 10, 0},
		{"many reads of the proxy", false, 60 << 10, 0},
		{"more than a flow control window", false, 200 << 10, 150 << 10},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			f := newProxyFixture(t)
			if test.connect {
				f.wantOK(t)
			}
			before := f.requests.Load()
			cut := f.proxy.CutAfterRequest(test.after)
			if err := f.post(t, test.body); err == nil {
				t.Fatal("the answer was not lost")
			}
			<-cut
			if n := f.requests.Load() - before; n != 1 {
				t.Errorf("the server carried out %d requests, want the one whose answer was lost", n)
			}
			if n := f.received.Load(); n != int64(test.body) {
				t.Errorf("the server received %d bytes of %d", n, test.body)
			}
			f.wantOK(t)
		})
	}
}

func TestProxyCutSparesSmallRequests(t *testing.T) {
	f := newProxyFixture(t)
	f.wantOK(t)
	cut := f.proxy.CutAfterRequest(4000)
	f.wantOK(t)
	select {
	case <-cut:
		t.Fatal("a small request was cut")
	default:
	}
	if err := f.post(t, 5000); err == nil {
		t.Error("the answer was not lost")
	}
	<-cut
}

func TestProxyCloseEndsEverything(t *testing.T) {
	f := newProxyFixture(t)
	f.wantOK(t)
	f.setMode(t, BlackHole)
	if err := f.proxy.Close(); err != nil {
		t.Fatal(err)
	}
	if n := f.proxy.Stats().Open; n != 0 {
		t.Errorf("%d connections are open after Close", n)
	}
	if err := f.proxy.SetMode(Pass); err == nil {
		t.Error("a closed proxy lets itself be opened")
	}
}

// proxyFixture is an HTTP/2 server behind a Proxy.
type proxyFixture struct {
	proxy    *Proxy
	server   *httptest.Server
	client   *http.Client
	requests atomic.Int64
	received atomic.Int64  // bytes of the last body
	slow     chan struct{} // a request for /slow has arrived
	release  chan struct{} // and may be answered
}

func newProxyFixture(t *testing.T) *proxyFixture {
	t.Helper()
	f := &proxyFixture{slow: make(chan struct{}, 1), release: make(chan struct{}, 1)}
	f.server = httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		n, err := io.Copy(io.Discard, r.Body)
		if err != nil {
			return // a request that did not arrive whole does not count
		}
		if r.URL.Path == "/slow" {
			f.slow <- struct{}{}
			select {
			case <-f.release:
			case <-r.Context().Done():
			}
		}
		f.received.Store(n)
		f.requests.Add(1)
	}))
	f.server.EnableHTTP2 = true
	f.server.Config.ErrorLog = log.New(io.Discard, "", 0) // broken connections are the point
	f.server.StartTLS()
	t.Cleanup(f.server.Close)
	var err error
	if f.proxy, err = NewProxy(f.server.URL); err != nil {
		t.Fatal(err)
	}
	f.client = f.server.Client()
	t.Cleanup(func() {
		if err := f.proxy.Close(); err != nil {
			t.Error(err)
		}
	})
	return f
}

func (f *proxyFixture) setMode(t *testing.T, mode Mode) {
	t.Helper()
	if err := f.proxy.SetMode(mode); err != nil {
		t.Fatal(err)
	}
}

func (f *proxyFixture) get(t *testing.T, path string, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	return f.do(ctx, http.MethodGet, path, nil)
}

func (f *proxyFixture) post(t *testing.T, size int) error {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	return f.do(ctx, http.MethodPost, "/", strings.NewReader(strings.Repeat("x", size)))
}

func (f *proxyFixture) do(ctx context.Context, method, path string, body io.Reader) error {
	request, err := http.NewRequestWithContext(ctx, method, f.proxy.URL()+path, body)
	if err != nil {
		return err
	}
	request.GetBody = nil // else net/http may silently try again
	answer, err := f.client.Do(request)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, answer.Body)
	return errors.Join(err, answer.Body.Close())
}

func (f *proxyFixture) wantOK(t *testing.T) {
	t.Helper()
	if err := f.get(t, "/", 5*time.Second); err != nil {
		t.Errorf("request: %v", err)
	}
}
