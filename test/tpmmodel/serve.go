// SPDX-License-Identifier: Apache-2.0

package tpmmodel

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"

	"github.com/google/go-tpm/tpm2/transport"
)

// Socket is where a TPM in this process can be found by those that open one by its path.
type Socket struct {
	dir      string
	listener net.Listener
	wait     sync.WaitGroup

	mu    sync.Mutex
	conns map[net.Conn]bool // nil when it has ended
}

// Serve puts a TPM behind a Unix socket. The TPM has to take commands from several connections.
func Serve(tpm transport.TPM) (*Socket, error) {
	// not TMPDIR: the path of a socket has at most 107 bytes
	dir, err := os.MkdirTemp("/tmp", "tpm-")
	if err != nil {
		return nil, err
	}
	s := &Socket{dir: dir, conns: map[net.Conn]bool{}}
	if s.listener, err = net.Listen("unix", s.Path()); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	s.wait.Go(func() { s.accept(tpm) })
	return s, nil
}

// Path is the socket's.
func (s *Socket) Path() string { return filepath.Join(s.dir, "tpm") }

// Close ends it, and all that was said through it.
func (s *Socket) Close() error {
	s.mu.Lock()
	for conn := range s.conns {
		_ = conn.Close()
	}
	s.conns = nil
	s.mu.Unlock()
	err := s.listener.Close()
	s.wait.Wait()
	return errors.Join(err, os.RemoveAll(s.dir))
}

func (s *Socket) accept(tpm transport.TPM) {
	for {
		conn, err := s.listener.Accept()
		if err != nil {
			return
		}
		s.mu.Lock()
		open := s.conns != nil
		if open {
			s.conns[conn] = true
		}
		s.mu.Unlock()
		if !open {
			_ = conn.Close()
			return
		}
		s.wait.Go(func() {
			_ = answer(conn, tpm) // ends with the connection
			_ = conn.Close()
			s.mu.Lock()
			delete(s.conns, conn)
			s.mu.Unlock()
		})
	}
}

// answer answers what comes through a connection, until it ends or no command comes.
func answer(conn net.Conn, tpm transport.TPM) error {
	for {
		command, err := readCommand(conn)
		if err != nil {
			return err
		}
		response, err := tpm.Send(command)
		if err != nil {
			return err
		}
		if _, err := conn.Write(response); err != nil {
			return err
		}
	}
}

func readCommand(r io.Reader) ([]byte, error) {
	header := make([]byte, headerSize)
	if _, err := io.ReadFull(r, header); err != nil {
		return nil, err
	}
	size := binary.BigEndian.Uint32(header[2:])
	if size < headerSize || size > maxMessage {
		return nil, errors.New("neither a command nor what could be skipped")
	}
	command := append(header, make([]byte, size-headerSize)...)
	_, err := io.ReadFull(r, command[headerSize:])
	return command, err
}
