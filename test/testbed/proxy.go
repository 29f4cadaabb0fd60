// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"sync"
	"time"
)

// Mode is what a Proxy does with connections.
type Mode int

const (
	// Pass forwards everything.
	Pass Mode = iota
	// Refuse closes the port: clients get "connection refused", existing
	// connections are reset.
	Refuse
	// Reset accepts and resets, and resets existing connections.
	Reset
	// BlackHole accepts and never answers; existing connections freeze: no byte
	// passes and nothing is closed. Pass lets them go on where they were.
	BlackHole
)

// Proxy forwards TCP connections and breaks them on demand. TLS passes through
// it, so it sees no requests, but client certificates work.
type Proxy struct {
	port   *Port // also while it is closed, until Close
	target string
	wait   sync.WaitGroup

	mu       sync.Mutex
	listener net.Listener // nil while the port is closed
	mode     Mode
	passing  chan struct{} // closed while bytes may pass
	links    map[*link]struct{}
	cut      *cut // armed, or nil
	stats    Stats
	closed   bool
}

// Stats count what a Proxy has seen.
type Stats struct {
	Accepted int   // connections, in all
	Open     int   // connections, now
	Up       int64 // bytes forwarded to the server
	Down     int64 // bytes forwarded to clients
}

// NewProxy starts a proxy on a loopback port in front of a server, which is
// given as host:port or as a URL.
func NewProxy(target string) (*Proxy, error) {
	if u, err := url.Parse(target); err == nil && u.Host != "" {
		target = u.Host
	}
	if _, _, err := net.SplitHostPort(target); err != nil {
		return nil, fmt.Errorf("proxy: %w", err)
	}
	port, err := TakePort()
	if err != nil {
		return nil, fmt.Errorf("proxy: %w", err)
	}
	passing := make(chan struct{})
	close(passing)
	p := &Proxy{port: port, target: target, passing: passing, links: map[*link]struct{}{}}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.listen(); err != nil {
		return nil, err
	}
	return p, nil
}

// Addr returns the proxy's host:port, which stays the same.
func (p *Proxy) Addr() string { return p.port.Addr() }

// URL returns the proxy's address as a server of kubeconfigs.
func (p *Proxy) URL() string { return "https://" + p.Addr() }

// Stats returns what the proxy has seen so far.
func (p *Proxy) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	stats := p.stats
	stats.Open = len(p.links)
	return stats
}

// SetMode changes what happens to connections, existing and new.
func (p *Proxy) SetMode(mode Mode) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return errors.New("proxy: it is closed")
	}
	if mode == Pass && p.mode != Pass {
		close(p.passing)
	}
	if mode != Pass && p.mode == Pass {
		p.passing = make(chan struct{})
	}
	p.mode = mode
	if mode == Refuse || mode == Reset {
		p.resetLinks()
	}
	switch {
	case mode == Refuse && p.listener != nil:
		err := p.listener.Close()
		p.listener = nil
		if err != nil {
			return fmt.Errorf("proxy: close the port: %w", err)
		}
	case mode != Refuse && p.listener == nil:
		return p.listen()
	}
	return nil
}

// CutAfterRequest makes the proxy lose one answer. It waits for the first connection whose client
// sends more than n bytes from now on. From there on, it drops all bytes from the server. Bytes
// from the client still pass. When both sides are silent, the proxy closes the client's side. The
// server's side stays open for another second, so that the server carries out the request. Other
// connections are left alone, and afterwards everything passes again. The channel is closed when
// the connection has been cut.
//
// With 0 the next request loses its answer, on a new connection or an existing one. A larger n
// spares smaller requests before it; measure with Stats, as client certificates, tokens and headers
// all count. Bytes that a client sends before the server's first byte (the TLS ClientHello) do not
// count. If a request has more than 60 KiB, at most its last 60 KiB may come after n. Otherwise the
// server's permission to send more (HTTP/2 flow control) would be lost with the answer.
func (p *Proxy) CutAfterRequest(n int64) <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = &cut{after: n, done: make(chan struct{})}
	for l := range p.links {
		l.sent = 0
	}
	return p.cut.done
}

// ResetConnections resets the existing connections once.
func (p *Proxy) ResetConnections() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.resetLinks()
}

// Close ends the proxy and all connections.
func (p *Proxy) Close() error {
	p.mu.Lock()
	var err error
	if p.listener != nil {
		err = p.listener.Close()
		p.listener = nil
	}
	p.closed = true
	p.resetLinks()
	p.mu.Unlock()
	p.wait.Wait()
	p.port.Free()
	if err != nil {
		return fmt.Errorf("proxy: %w", err)
	}
	return nil
}

// listen is called with the lock held.
func (p *Proxy) listen() error {
	listener, err := net.Listen("tcp", p.Addr())
	if err != nil {
		return fmt.Errorf("proxy: %w", err)
	}
	p.listener = listener
	p.wait.Go(func() { p.accept(listener) })
	return nil
}

func (p *Proxy) accept(listener net.Listener) {
	for {
		client, err := listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // such as too many open files
			time.Sleep(quietTick)
			continue
		}
		p.take(client)
	}
}

func (p *Proxy) take(client net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stats.Accepted++
	if p.closed || p.mode == Reset || p.mode == Refuse {
		reset(client)
		return
	}
	l := &link{proxy: p, client: client, ended: make(chan struct{})}
	p.links[l] = struct{}{}
	p.wait.Go(l.run)
}

// resetLinks is called with the lock held.
func (p *Proxy) resetLinks() {
	for l := range p.links {
		l.end(reset)
	}
}

func (p *Proxy) forget(l *link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.links, l)
}

// awaitPassing returns when bytes may pass, or false when the link has ended.
func (p *Proxy) awaitPassing(l *link) bool {
	for {
		p.mu.Lock()
		passing := p.passing
		p.mu.Unlock()
		select {
		case <-l.ended:
			return false
		default:
		}
		select {
		case <-l.ended:
			return false
		case <-passing:
			return true
		}
	}
}
