// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"bufio"
	"bytes"
	"crypto"
	"encoding/json"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-tpm/tpm2"
	"k8s.io/apimachinery/pkg/util/uuid"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// vCenter is an imitation of vCenter, with the environment of the controller for vSphere.
type vCenter struct {
	dir, binary, control string
	env                  []string
}

func newVCenter(t *testing.T) *vCenter {
	t.Helper()
	const source = module + "/platforms/vsphere"
	dir := t.TempDir()
	v := &vCenter{dir: dir, binary: filepath.Join(dir, "node-attestation-controller-vsphere")}
	program := filepath.Join(dir, "vcenter")
	harness.Must(t, compile.Program(t.Context(), source, v.binary, "./cmd/node-attestation-controller-vsphere"))
	harness.Must(t, compile.Program(t.Context(), source, program, "./internal/imitation/vcenter", "-tags=simulator"))
	cmd := exec.CommandContext(t.Context(), program, dir)
	// The imitation ends with its standard input: when the test ends, or is killed.
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = stdin.Close(); _ = cmd.Wait() })
	line, err := bufio.NewReader(stdout).ReadBytes('\n')
	if err != nil {
		t.Fatal(err)
	}
	var at struct{ Server, Control string }
	if err := json.Unmarshal(line, &at); err != nil {
		t.Fatal(err)
	}
	v.control = at.Control
	v.env = []string{
		"VSPHERE_SERVER=" + at.Server, "VSPHERE_CA_FILE=" + filepath.Join(dir, "ca.crt"),
		"VSPHERE_USER_FILE=" + filepath.Join(dir, "user"), "VSPHERE_PASSWORD_FILE=" + filepath.Join(dir, "password"),
	}
	return v
}

// endorsementKey returns the public key that the computer's TPM shows.
func endorsementKey(t *testing.T, hardware *computer) crypto.PublicKey {
	t.Helper()
	public, err := hardware.chip.EK("ecc-p256")
	if err != nil {
		t.Fatal(err)
	}
	key, err := tpm2.Pub(public)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// clone makes a virtual machine with the computer's TPM, and returns its BIOS UUID.
func (v *vCenter) clone(t *testing.T, hardware *computer) string {
	t.Helper()
	certificate, err := shared.maker.Issue(endorsementKey(t, hardware), nil)
	if err != nil {
		t.Fatal(err)
	}
	bios := string(uuid.NewUUID())
	v.ask(t, http.MethodPut, bios, map[string]any{"certificates": [][]byte{certificate}}, nil)
	return bios
}

// ask makes a virtual machine, replaces or removes it, or asks for the calls since the last time.
func (v *vCenter) ask(t *testing.T, method, path string, body, answer any) {
	t.Helper()
	encoded, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	request, err := http.NewRequestWithContext(t.Context(), method, v.control+"/"+path, bytes.NewReader(encoded))
	if err != nil {
		t.Fatal(err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode != http.StatusOK {
		t.Fatal(response.Status)
	}
	if answer != nil {
		harness.Must(t, json.NewDecoder(response.Body).Decode(answer))
	}
}

// onVSphere makes the Machine the virtual machine with that BIOS UUID.
func onVSphere(bios string) func(*machine) {
	return func(m *machine) { m.isInstance("vsphere://" + bios) }
}

// vCenter names the TPM of each virtual machine. An impostor is refused. Virtual machines with a
// copied TPM wait until only one of them is left.
func TestVSphere(t *testing.T) {
	t.Parallel()
	v := newVCenter(t)
	w := newWorld(t, shared.management)
	c := w.newCluster(t, "vsphere", nil)

	// Without its environment, the program says so and ends.
	w.refusesPlatform(t, "clusterAPI.platform: vsphere: VSPHERE_SERVER", v.binary, "vsphere", v.env[1:]...)
	controller := w.startPlatform(t, v.binary, "vsphere", v.env...)

	hardware := newComputer(t)
	first := c.newMachineOf(t, hardware, "first", onVSphere(v.clone(t, hardware)))
	c.refuses(t, first.impostor(t).peer(t), verifier.ReasonNodeNameMismatch)
	first.enrols(t)
	first.remembered(t)

	original := newComputer(t)
	source := c.newMachineOf(t, original, "original", onVSphere(v.clone(t, original)))
	second := v.clone(t, original)
	copied := c.newMachineOf(t, original, "copied", onVSphere(second))
	harness.Eventually(t, harness.Soon, "the copied TPM is reported", func() bool {
		return strings.Contains(controller.LogTail(), "a copied TPM identifies none of them")
	})
	c.waits(t, verifier.ReasonMachineNotFound, source.peer(t).hello(t), copied.peer(t).hello(t))
	v.ask(t, http.MethodDelete, second, nil, nil)
	source.begins(t).within(t, platformInterval+decided+slack)
	source.remembered(t)
	if record := c.record(t, "copied"); record != nil {
		t.Errorf("the clone is remembered: %+v", record.Spec)
	}

	var calls map[string]int
	v.ask(t, http.MethodGet, "", nil, &calls)
	t.Logf("calls: %v", calls)
	harness.Must(t, controller.Stop())
	v.ask(t, http.MethodGet, "", nil, &calls)
	if calls["Logout"] != 1 {
		t.Errorf("calls when it ended: %v", calls)
	}
	if log := string(logOf(t, controller)); strings.Contains(log, "correct horse") {
		t.Error("the log has the password")
	}
}
