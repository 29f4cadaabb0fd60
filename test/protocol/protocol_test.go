// SPDX-License-Identifier: Apache-2.0

package protocol

import (
	"crypto/x509"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	common "github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	verifier "github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

func newMachine(t testing.TB, socket string, config verifier.Config) *Machine {
	t.Helper()
	m, err := New(socket, t.TempDir(), config)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// trust is a policy that trusts the maker of a chip.
func trust(c chip) verifier.Config {
	return verifier.Config{Roots: []*x509.Certificate{c.maker().Root}, Intermediates: []*x509.Certificate{c.maker().Intermediate}}
}

// The whole protocol with each kind of EK, against swtpm.
func TestProtocolAgainstSwtpm(t *testing.T) { testProtocol(t, startSwtpm) }

// The same against the model.
func TestProtocolAgainstModel(t *testing.T) { testProtocol(t, startModel) }

func testProtocol(t *testing.T, start starter) {
	for _, template := range []string{"rsa-2048", "ecc-p256", "ecc-p384-high", "rsa-2048-high", "ecc-p256-high"} {
		t.Run(template, func(t *testing.T) {
			chip := start(t, swtpm.Options{Certified: []string{template}})
			proxy := swtpm.NewProxy(t, chip)
			config := trust(chip)
			config.PCRs.Bank = "sha256"
			for i := range 24 {
				config.PCRs.Indexes = append(config.PCRs.Indexes, i)
			}
			a, err := newMachine(t, proxy.Socket(), config).Attest(t.Context())
			if err != nil || a.Hello.EKTemplate != template {
				t.Fatalf("%+v, %v", a.Hello, err)
			}
			t.Logf("%d TPM commands, 24 PCRs quoted", proxy.Count())
			if n := proxy.Count(); n > 30 && !strings.HasPrefix(template, "rsa") {
				t.Errorf("%d TPM commands", n)
			}
			// A TPM of the same make that nobody made a certificate for is another.
			other := start(t, swtpm.Options{CA: chip.maker()})
			if _, err := newMachine(t, other.Socket(), trust(chip)).Attest(t.Context()); err == nil {
				t.Error("a TPM without a certificate was accepted")
			}
		})
	}
}

// A node stays with the EK it enrolled with, even if the TPM gets one that it would have preferred.
func TestNodeStaysWithItsEK(t *testing.T) { forEachChip(t, testStays) }

func testStays(t *testing.T, start starter) {
	chip := start(t, swtpm.Options{Certified: []string{"ecc-p256", "rsa-2048"}})
	m := newMachine(t, chip.Socket(), trust(chip))
	for remembered, want := range map[string]string{"": "ecc-p256", "rsa-2048": "rsa-2048", "ecc-p256": "ecc-p256", "nonsense": "ecc-p256"} {
		ask := m.Ask("hello")
		ask.Remembered = remembered
		if _, got, err := m.Provider.Hello(t.Context(), ask); err != nil || got != want {
			t.Errorf("remembered %q: %q, %v; want %q", remembered, got, err, want)
		}
	}
}

// 200 attestations leave no transient object and no session behind. Twenty do in the model:
// it is full after three that do.
func TestManyRunsLeaveNothingInTheTPM(t *testing.T) {
	t.Run("swtpm", func(t *testing.T) { testManyRuns(t, startSwtpm, 200) })
	t.Run("model", func(t *testing.T) { testManyRuns(t, startModel, 20) })
}

func testManyRuns(t *testing.T, start starter, runs int) {
	t.Helper()
	chip := start(t, swtpm.Options{Certified: []string{"ecc-p256"}})
	m := newMachine(t, chip.Socket(), trust(chip))
	for i := range runs {
		if _, err := m.Attest(t.Context()); err != nil {
			t.Fatalf("run %d: %v", i, err)
		}
	}
	if handles, err := chip.Handles(); err != nil || len(handles) > 0 {
		t.Errorf("left in the TPM: %x, %v", handles, err)
	}
	if failed, err := chip.LockoutCounter(); err != nil || failed != 0 {
		t.Errorf("lockout counter %d, %v", failed, err)
	}
}

// A PCR that was extended is quoted with its value, and the policy says what that means.
func TestExtendedPCRsAreVerified(t *testing.T) { forEachChip(t, testExtended) }

func testExtended(t *testing.T, start starter) {
	chip := start(t, swtpm.Options{Certified: []string{"ecc-p256"}})
	good := make([]byte, 32) // as after a reset
	config := trust(chip)
	config.PCRValues = map[int][][]byte{4: {good}}
	m := newMachine(t, chip.Socket(), config)
	if _, err := m.Attest(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := chip.Extend(4, []byte("another boot loader")); err != nil {
		t.Fatal(err)
	}
	_, err := m.Attest(t.Context())
	var refusals common.Refusals
	if !errors.As(err, &refusals) || !slices.Equal(refusals.Reasons(), []common.Reason{verifier.ReasonPCRPolicy}) {
		t.Errorf("got %v", err)
	}
}
