// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"net"
	"sync"
	"time"
)

const (
	quietTick = 20 * time.Millisecond
	// The longest pause of an API server or of a client during a request, even on a busy machine.
	// After a longer pause the request was answered.
	quietBeforeCut = time.Second
	// The time for the server to carry out a request whose answer is lost. If its side was closed
	// with the client's, the server would cancel the request.
	quietAfterCut = time.Second
	dialTimeout   = 5 * time.Second
)

// cut is one answer to lose.
type cut struct {
	after int64
	done  chan struct{}
}

// link is one client's connection together with the one to the server.
type link struct {
	proxy  *Proxy
	client net.Conn

	ended   chan struct{}
	endOnce sync.Once

	// The proxy's lock guards what follows.
	server   net.Conn
	answered bool // the server has spoken: the client's first flight is over
	sent     int64
	cut      *cut // this link is the one to cut
	dropped  bool // an answer has been lost
	active   time.Time
}

func (l *link) run() {
	defer l.proxy.forget(l)
	defer l.end(closeConn)
	if !l.proxy.awaitPassing(l) {
		return
	}
	server, err := net.DialTimeout("tcp", l.proxy.target, dialTimeout)
	if err != nil {
		l.end(reset) // as if the server itself had refused
		return
	}
	if !l.adopt(server) {
		closeConn(server)
		return
	}

	var both sync.WaitGroup
	both.Go(func() {
		l.pump(l.client, server, l.up)
		if !l.isCut() { // else the server's side lingers
			l.end(closeConn)
		}
	})
	both.Go(func() {
		l.pump(server, l.client, l.down)
		l.end(closeConn)
	})
	both.Wait()
}

// adopt makes the server's connection one that end closes, unless the link has
// ended in the meantime.
func (l *link) adopt(server net.Conn) bool {
	l.proxy.mu.Lock()
	defer l.proxy.mu.Unlock()
	select {
	case <-l.ended:
		return false
	default:
		l.server = server
		return true
	}
}

// end closes both connections, the first time it is called.
func (l *link) end(how func(net.Conn)) {
	l.endOnce.Do(func() {
		close(l.ended)
		how(l.client)
		if l.server != nil {
			how(l.server)
		}
	})
}

// pump forwards bytes until an end of the connection. Before it forwards, note
// is asked whether to.
func (l *link) pump(from, to net.Conn, note func(n int) bool) {
	buffer := make([]byte, 32<<10)
	for {
		n, err := from.Read(buffer)
		// The end too must not pass a black hole.
		if !l.proxy.awaitPassing(l) {
			return
		}
		if n > 0 && note(n) {
			if _, err := to.Write(buffer[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// up notes bytes from the client. The cut begins before they are forwarded, so
// that their answer cannot slip through.
func (l *link) up(n int) bool {
	p := l.proxy
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stats.Up += int64(n)
	l.active = time.Now()
	if l.answered {
		l.sent += int64(n)
	}
	if p.cut != nil && l.sent > p.cut.after {
		l.cut, p.cut = p.cut, nil
		p.wait.Go(l.cutWhenQuiet)
	}
	return true
}

// down notes bytes from the server.
func (l *link) down(n int) bool {
	p := l.proxy
	p.mu.Lock()
	defer p.mu.Unlock()
	l.active = time.Now()
	l.answered = true
	if l.cut != nil {
		l.dropped = true
		return false
	}
	p.stats.Down += int64(n)
	return true
}

func (l *link) isCut() bool {
	l.proxy.mu.Lock()
	defer l.proxy.mu.Unlock()
	return l.cut != nil
}

// cutWhenQuiet closes the client's side when the answer has been dropped, and
// the server's a while later.
func (l *link) cutWhenQuiet() {
	defer l.end(closeConn)
	if !l.awaitQuiet(quietBeforeCut) {
		return
	}
	closeConn(l.client)
	close(l.cut.done)
	l.awaitQuiet(quietAfterCut)
}

// awaitQuiet waits until the server has answered and no byte has come from
// either side for a while. It returns false if the link ended before.
func (l *link) awaitQuiet(quiet time.Duration) bool {
	tick := time.NewTicker(quietTick)
	defer tick.Stop()
	for {
		select {
		case <-l.ended:
			return false
		case <-tick.C:
		}
		l.proxy.mu.Lock()
		enough := l.dropped && time.Since(l.active) >= quiet
		l.proxy.mu.Unlock()
		if enough {
			return true
		}
	}
}

// Errors of closing are of no interest: the connection is gone either way.
func closeConn(c net.Conn) { _ = c.Close() }

func reset(c net.Conn) {
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // makes Close send a reset
	}
	_ = c.Close()
}
