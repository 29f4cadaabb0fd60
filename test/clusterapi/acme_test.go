// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"encoding/pem"
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/docs/examples/acme/platform"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
)

// platformInterval is how often a platform is asked about all machines, where nothing else is set.
const platformInterval = 30 * time.Second

// acme is the imaginary platform of docs/providers.md, and the controller of its provider.
type acme struct {
	platform.Fleet
	// program starts the controller with what it needs to know of the platform.
	program string
}

func newAcme(t *testing.T) *acme {
	t.Helper()
	const source = "docs/examples/node-attestation-controller-acme-tpm"
	a, dir := &acme{Fleet: platform.Fleet{Token: "secret"}}, t.TempDir()
	server := httptest.NewTLSServer(&a.Fleet)
	t.Cleanup(server.Close)
	binary, ca, token := filepath.Join(dir, "acme"), filepath.Join(dir, "ca.crt"), filepath.Join(dir, "token")
	if err := compile.Program(t.Context(), module, binary, "./"+source); err != nil {
		t.Fatal(err)
	}
	a.program = filepath.Join(dir, "start")
	for path, content := range map[string]string{
		ca:        string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})),
		token:     "secret\n",
		a.program: fmt.Sprintf("#!/bin/sh\nACME_URL=%s ACME_CA_FILE=%s ACME_TOKEN_FILE=%s exec %s \"$@\"\n", server.URL, ca, token, binary),
	} {
		if err := os.WriteFile(path, []byte(content), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return a
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

// onAcme makes the Machine an instance of Acme, without an EK in an annotation.
func onAcme(m *machine) {
	m.providerID = "acme://" + m.name
	m.object.Annotations = nil
	m.object.Spec.ProviderID = m.providerID
	m.infra.Object["spec"] = map[string]any{"providerID": m.providerID}
}

// The example in docs/providers.md: the platform says which machine has a TPM, also if it learns of
// the TPM late. An instance with another TPM is refused.
func TestAcmePlatform(t *testing.T) {
	t.Parallel()
	a := newAcme(t)
	w := newWorld(t, shared.management)
	c := w.newCluster(t, "acme", nil)
	controller, err := controllerprocess.New(controllerprocess.Options{
		ControlPlane: w.ControlPlane, Dir: t.TempDir(), Binary: a.program,
		Configure: func(c *config.Config) {
			c.ClusterUID, c.Signing, c.Inventory = "", config.Signing{Mode: config.Sign}, config.Inventory{}
			c.LeaderElection.Enabled = false
		},
		Edit: func(file map[string]any) {
			file["clusterAPI"] = map[string]any{"namespaces": []any{w.namespace}, "ekSources": []any{"Platform"}}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	w.mu.Lock()
	w.controllers = append(w.controllers, controller)
	w.mu.Unlock()
	if err := controller.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := controller.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}

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

	// The shipped program supports no platform, and Acme's program requires Platform.
	for program, says := range map[string]string{shared.controller: "knows no platform", a.program: "must have Platform"} {
		source := "Platform"
		if program == a.program {
			source = "Annotation"
		}
		wrong, err := controllerprocess.New(controllerprocess.Options{
			ControlPlane: w.ControlPlane, Dir: t.TempDir(), Binary: program,
			Edit: func(file map[string]any) {
				delete(file, "clusterUID")
				delete(file, "inventory")
				file["signing"], file["clusterAPI"] = map[string]any{"mode": "Sign"}, map[string]any{"ekSources": []any{source}}
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := wrong.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		<-wrong.Process().Done()
		if log := wrong.LogTail(); !strings.Contains(log, says) {
			t.Errorf("%s: %s", program, log)
		}
	}
}
