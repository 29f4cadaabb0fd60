// SPDX-License-Identifier: Apache-2.0

//go:build simulator

package protocol

import (
	"testing"

	"github.com/google/go-tpm/tpm2/transport"
	"github.com/google/go-tpm/tpm2/transport/simulator"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	verifier "github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/tpmmodel"
)

// The same against Microsoft's reference implementation, in this process: another TPM than swtpm,
// behind the same kind of socket. It has no EK certificate, so an inventory names its EK.
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
	ek, err := verifier.ClaimedEK(request)
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

// serve puts the simulator behind a Unix socket. It takes one command after the other, as the
// provider sends them.
func serve(t *testing.T, chip transport.TPM) string {
	t.Helper()
	socket, err := tpmmodel.Serve(chip)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = socket.Close() })
	return socket.Path()
}
