// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"encoding/pem"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/docs/examples/acme/platform"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
)

// platformInterval is how often a platform is asked about all machines, where nothing else is set.
const platformInterval = 30 * time.Second

// acme is the imaginary platform of docs/providers.md, and the controller of its provider.
type acme struct {
	platform.Fleet
	// binary is the controller, and env its environment.
	binary string
	env    []string
}

func newAcme(t *testing.T) *acme {
	t.Helper()
	const source = "docs/examples/node-attestation-controller-acme-tpm"
	a, dir := &acme{Fleet: platform.Fleet{Token: "secret"}}, t.TempDir()
	server := httptest.NewTLSServer(&a.Fleet)
	t.Cleanup(server.Close)
	ca, token := filepath.Join(dir, "ca.crt"), filepath.Join(dir, "token")
	a.binary = filepath.Join(dir, "acme")
	a.env = []string{"ACME_URL=" + server.URL, "ACME_CA_FILE=" + ca, "ACME_TOKEN_FILE=" + token}
	if err := compile.Program(t.Context(), module, a.binary, "./"+source); err != nil {
		t.Fatal(err)
	}
	mustWrite(t, ca, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})))
	mustWrite(t, token, "secret\n")
	return a
}

func mustWrite(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// launches makes the platform give the machine's TPM to its instance of that name.
func (a *acme) launches(t *testing.T, m *computer, instance string) {
	t.Helper()
	public, err := m.chip.EK("ecc-p256")
	if err != nil {
		t.Fatal(err)
	}
	key, err := tpm2.Pub(public)
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Launch(instance, "", key); err != nil {
		t.Fatal(err)
	}
}

func onAcme(m *machine) { m.isInstance("acme://" + m.name) }

// The example in docs/providers.md: the platform says which machine has a TPM, also if it learns of
// the TPM late. An instance with another TPM is refused.
func TestAcmePlatform(t *testing.T) {
	t.Parallel()
	a := newAcme(t)
	w := newWorld(t, shared.management)
	c := w.newCluster(t, "acme", nil)
	w.startPlatform(t, a.binary, "acme", a.env...)

	known := newComputer(t)
	a.launches(t, known, "known")
	a.launches(t, newComputer(t), "swapped") // not the one that comes
	first := c.newMachineOf(t, known, "known", onAcme)
	first.enrols(t)
	first.remembered(t)

	swapped := c.newMachine(t, "swapped", onAcme).begins(t)
	<-swapped.done
	if swapped.err == nil || !strings.Contains(swapped.err.Error(), "NodeNameMismatch") {
		t.Errorf("with another TPM than the platform gave it: %v", swapped.err)
	}
	late := c.newMachine(t, "late", onAcme).begins(t)
	late.waits(t, time.Second)
	since := time.Now()
	a.launches(t, late.computer, "late")
	late.within(t, platformInterval+decided+slack)
	t.Logf("the platform learned of it late: %s", time.Since(since).Round(time.Millisecond))

	// The released program does not know the platform, and Acme's program needs its API.
	w.refusesPlatform(t, `does not know "acme"`, shared.controller, "acme")
	w.refusesPlatform(t, "clusterAPI.platform: acme: ACME_URL", a.binary, "acme")
}
