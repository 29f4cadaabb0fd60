// SPDX-License-Identifier: Apache-2.0

package swtpm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/google/go-tpm/tpm2"
)

// Exchange is one command and its response as sent. The response is nil while there is none.
type Exchange struct {
	Code              tpm2.TPMCC
	Command, Response []byte
}

// Proxy relays between a program and a TPM. It records the exchanges, and can delay, drop or
// replace responses. Its methods may be called at any time.
type Proxy struct {
	dir, backend string
	listener     net.Listener
	stop         chan struct{}

	mu        sync.Mutex
	exchanges []*Exchange
	rules     []func(index int, code tpm2.TPMCC) action
}

// action is what a rule does with a command. The zero action passes it on.
type action struct {
	call     func()
	delay    time.Duration
	wait     <-chan struct{}
	response tpm2.TPMRC
	cut      bool
}

// NewProxy returns a proxy before a TPM behind a socket. It ends with the test.
func NewProxy(t TB, tpm socketed) *Proxy {
	t.Helper()
	p, err := OpenProxy(tpm)
	if err != nil {
		t.Fatalf("proxy: %v", err)
	}
	t.Cleanup(p.Close)
	return p
}

// socketed is a TPM behind a Unix socket.
type socketed interface{ Socket() string }

// OpenProxy returns a proxy before a TPM. The caller closes it, once.
func OpenProxy(tpm socketed) (*Proxy, error) {
	dir, err := os.MkdirTemp("/tmp", "swtpm-")
	if err != nil {
		return nil, err
	}
	p := &Proxy{dir: dir, backend: tpm.Socket(), stop: make(chan struct{})}
	if p.listener, err = net.Listen("unix", p.Socket()); err != nil {
		_ = os.RemoveAll(dir)
		return nil, err
	}
	go p.accept()
	return p, nil
}

// Close ends the proxy. Held commands get no response.
func (p *Proxy) Close() {
	close(p.stop)
	_ = p.listener.Close()
	_ = os.RemoveAll(p.dir)
}

// Socket is the path of the proxy's socket.
func (p *Proxy) Socket() string { return filepath.Join(p.dir, "tpm") }

// Exchanges returns the exchanges since the start or the last Reset.
func (p *Proxy) Exchanges() []Exchange {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := make([]Exchange, len(p.exchanges))
	for i, e := range p.exchanges {
		all[i] = *e
	}
	return all
}

// Count returns how many commands came with one of these codes, or in all if none is given.
func (p *Proxy) Count(codes ...tpm2.TPMCC) int {
	n := 0
	for _, e := range p.Exchanges() {
		if len(codes) == 0 || slices.Contains(codes, e.Code) {
			n++
		}
	}
	return n
}

// Reset removes all recorded exchanges and all rules.
func (p *Proxy) Reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.exchanges, p.rules = nil, nil
}

// Delay holds back commands of these codes, or all if none is given, for d.
func (p *Proxy) Delay(d time.Duration, codes ...tpm2.TPMCC) {
	p.rule(func(_ int, code tpm2.TPMCC) (a action) {
		if len(codes) == 0 || slices.Contains(codes, code) {
			a.delay = d
		}
		return a
	})
}

// Hang holds back commands of this code until release is called.
func (p *Proxy) Hang(code tpm2.TPMCC) (release func()) {
	released := make(chan struct{})
	p.rule(func(_ int, c tpm2.TPMCC) (a action) {
		if c == code {
			a.wait = released
		}
		return a
	})
	return sync.OnceFunc(func() { close(released) })
}

// Answer answers the next n commands of this code with a response code. The TPM does not receive
// them.
func (p *Proxy) Answer(code tpm2.TPMCC, response tpm2.TPMRC, n int) {
	p.rule(func(_ int, c tpm2.TPMCC) (a action) {
		if c == code && n > 0 {
			n--
			a.response = response
		}
		return a
	})
}

// AnswerAt answers the command number index, counted from the last Reset, with a response code.
func (p *Proxy) AnswerAt(index int, response tpm2.TPMRC) {
	p.rule(func(i int, _ tpm2.TPMCC) (a action) {
		if i == index {
			a.response = response
		}
		return a
	})
}

// AnswerFrom answers the command number index, counted from the last Reset, with a response code.
// It gives each later command of the same code the same answer, n commands in all.
func (p *Proxy) AnswerFrom(index int, response tpm2.TPMRC, n int) {
	var code tpm2.TPMCC
	p.rule(func(i int, c tpm2.TPMCC) (a action) {
		if i == index {
			code = c
		}
		if i >= index && c == code && n > 0 {
			n--
			a.response = response
		}
		return a
	})
}

// CallAt calls f when the command number index arrives, counted from the last Reset. The TPM
// receives the command when f has returned. f may use the TPM, but not this proxy.
func (p *Proxy) CallAt(index int, f func()) {
	p.rule(func(i int, _ tpm2.TPMCC) (a action) {
		if i == index {
			a.call = f
		}
		return a
	})
}

// HangAt holds back the command number index, counted from the last Reset, until release is called.
// It calls arrived when it has received the command.
func (p *Proxy) HangAt(index int, arrived func()) (release func()) {
	released := make(chan struct{})
	p.rule(func(i int, _ tpm2.TPMCC) (a action) {
		if i == index {
			a.call, a.wait = arrived, released
		}
		return a
	})
	return sync.OnceFunc(func() { close(released) })
}

// CutAt closes the connection in place of a response to the command number index, counted from the
// last Reset.
func (p *Proxy) CutAt(index int) {
	p.rule(func(i int, _ tpm2.TPMCC) action { return action{cut: i == index} })
}

func (p *Proxy) rule(r func(int, tpm2.TPMCC) action) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rules = append(p.rules, r)
}

func (p *Proxy) accept() {
	for {
		conn, err := p.listener.Accept()
		if err != nil {
			return
		}
		go func() {
			_ = p.serve(conn)
			_ = conn.Close()
		}()
	}
}

func (p *Proxy) serve(conn net.Conn) error {
	for {
		command, err := readMessage(conn)
		if err != nil {
			return err
		}
		response, err := p.exchange(command)
		if err != nil {
			return err
		}
		if _, err := conn.Write(response); err != nil {
			return err
		}
	}
}

// exchange gets the response for one command. It holds no connection to the TPM while it waits, so
// that the test can use the TPM.
func (p *Proxy) exchange(command []byte) ([]byte, error) {
	e := &Exchange{Code: tpm2.TPMCC(binary.BigEndian.Uint32(command[6:10])), Command: command}
	p.mu.Lock()
	index := len(p.exchanges)
	p.exchanges = append(p.exchanges, e)
	var actions []action
	for _, r := range p.rules {
		actions = append(actions, r(index, e.Code))
	}
	p.mu.Unlock()

	var response []byte
	for _, a := range actions {
		if a.call != nil {
			a.call()
		}
		switch {
		case a.cut:
			return nil, errors.New("cut")
		case a.response != 0:
			response = binary.BigEndian.AppendUint32([]byte{0x80, 0x01, 0, 0, 0, 10}, uint32(a.response))
		case a.delay > 0:
			time.Sleep(a.delay)
		case a.wait != nil:
			select {
			case <-a.wait:
			case <-p.stop:
				return nil, net.ErrClosed
			}
		}
	}
	if response == nil {
		var err error
		if response, err = dial(p.backend).Send(command); err != nil {
			return nil, err
		}
	}
	p.mu.Lock()
	e.Response = response
	p.mu.Unlock()
	return response, nil
}

// readMessage reads a command or a response: a tag, its own length, and a code.
func readMessage(r io.Reader) ([]byte, error) {
	header := make([]byte, 10)
	if _, err := io.ReadFull(r, header); err != nil {
		return nil, err
	}
	size := binary.BigEndian.Uint32(header[2:6])
	if size < 10 || size > 4096 {
		return nil, fmt.Errorf("message of %d bytes", size)
	}
	message := append(header, make([]byte, size-10)...)
	_, err := io.ReadFull(r, message[10:])
	return message, err
}

func responseCode(response []byte) tpm2.TPMRC {
	if len(response) < 10 {
		return tpm2.TPMRCFailure
	}
	return tpm2.TPMRC(binary.BigEndian.Uint32(response[6:10]))
}
