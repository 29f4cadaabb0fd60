// SPDX-License-Identifier: Apache-2.0

//go:build simulator

package protocol

import (
	"encoding/binary"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-tpm/tpm2/transport"
	"github.com/google/go-tpm/tpm2/transport/simulator"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	verifier "github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

// The same against Microsoft's reference implementation, in this process: another TPM than swtpm, behind the same kind of socket. It
// has no EK certificate, so an inventory names its EK.
func TestProtocolAgainstTheSimulator(t *testing.T) {
	chip, err := simulator.OpenSimulator()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = chip.Close() })
	m := newMachine(t, serve(t, chip), verifier.Config{NamedEKs: true})
	hello, _, err := m.Provider.Hello(t.Context(), m.Ask("hello"))
	if err != nil {
		t.Fatal(err)
	}
	request, err := m.Request("hello", attestation.HelloSignerName, hello)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.Attest(t.Context()); err == nil {
		t.Error("an EK that nobody vouches for was accepted")
	}
	ek, err := m.Verifier.EK(request)
	if err != nil {
		t.Fatal(err)
	}
	m.Named = append(m.Named, ek)
	for range 20 {
		if _, err := m.Attest(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// serve puts the simulator behind a Unix socket, one connection after the other.
func serve(t *testing.T, chip transport.TPM) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "simulator-")
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "tpm")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = listener.Close()
		_ = os.RemoveAll(dir)
	})
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			for {
				header := make([]byte, 10)
				if _, err := io.ReadFull(conn, header); err != nil {
					break
				}
				command := append(header, make([]byte, binary.BigEndian.Uint32(header[2:6])-10)...)
				if _, err := io.ReadFull(conn, command[10:]); err != nil {
					break
				}
				response, err := chip.Send(command)
				if err != nil {
					break
				}
				if _, err := conn.Write(response); err != nil {
					break
				}
			}
			_ = conn.Close()
		}
	}()
	return socket
}
