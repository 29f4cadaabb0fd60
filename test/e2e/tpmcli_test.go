// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-tpm/tpm2"
	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
)

// byHand runs the plugin as a person does.
func (n *tpmNode) byHand(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	var out, errs strings.Builder
	cmd := exec.CommandContext(t.Context(), n.plugin, append(args, n.flags()...)...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// fingerprint returns the fingerprint of an EK in an inventory.
func fingerprint(t *testing.T, chip *swtpm.TPM, name string) string {
	t.Helper()
	public, err := chip.EK(name)
	if err != nil {
		t.Fatal(err)
	}
	key, err := template.PublicKey(public)
	if err != nil {
		t.Fatal(err)
	}
	spki, err := x509.MarshalPKIXPublicKey(key)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(spki)
	return hex.EncodeToString(sum[:])
}

// identify prints all that an inventory needs, of all EKs, in both formats, and needs no API
// server.
func TestTPMIdentify(t *testing.T) {
	n := newTPMNode(t, swtpm.Options{Certified: []string{"ecc-p256", "rsa-2048"}}, nil)
	n.server = "https://127.0.0.1:1"
	var asJSON, asYAML struct {
		authenticator.Identity
		Device tpm.Identity `json:"device"`
	}
	out, stderr, code := n.byHand(t, "identify", "--output=json")
	if err := json.Unmarshal([]byte(out), &asJSON); err != nil || code != 0 {
		t.Fatalf("exit code %d: %s%s: %v", code, out, stderr, err)
	}
	out, stderr, code = n.byHand(t, "identify")
	if err := yaml.UnmarshalStrict([]byte(out), &asYAML); err != nil || code != 0 {
		t.Fatalf("exit code %d: %s%s: %v", code, out, stderr, err)
	}
	id := asJSON
	if asYAML.Device.AKName != id.Device.AKName || asYAML.NodeName != id.NodeName || len(asYAML.Device.EKs) != 2 {
		t.Errorf("YAML %+v, JSON %+v", asYAML, id)
	}
	if id.NodeName != n.name || id.ProviderID != "test://"+n.name || id.Device.Manufacturer != "IBM" || id.Device.Firmware == "" || !strings.HasPrefix(id.Device.AKName, "000b") || len(id.Device.AKName) != 68 {
		t.Errorf("%+v", id)
	}
	for i, name := range []string{"ecc-p256", "rsa-2048"} {
		ek := id.Device.EKs[i]
		if ek.Template != name || ek.Fingerprint != fingerprint(t, n.tpm, name) || ek.Certificate == nil || ek.Certificate.Problem != "" || ek.Certificate.NotAfter == "" ||
			ek.Certificate.SubjectAltName != "TPMManufacturer="+swtpm.TPMManufacturer+",TPMModel="+swtpm.TPMModel+",TPMVersion="+swtpm.TPMVersion {
			t.Errorf("%s: %+v", name, ek)
		}
	}
	if _, stderr, code := n.byHand(t, "identify", "--output=xml"); code != 3 || !strings.Contains(stderr, "xml") {
		t.Errorf("exit code %d: %s", code, stderr)
	}
	n.provider = "insecure"
	if _, stderr, code := n.byHand(t, "identify"); code != 10 || !strings.Contains(stderr, "insecure") {
		t.Errorf("exit code %d: %s", code, stderr)
	}
	n.nothingLoaded(t)
}

// The self-test names each command and the one that the chip refuses.
func TestTPMSelfTest(t *testing.T) {
	n := newTPMNode(t, swtpm.Options{Certified: []string{"ecc-p256", "rsa-2048"}}, nil)
	n.provider = "insecure" // the command is about the TPM, whatever the node uses
	out, stderr, code := n.byHand(t, "tpm", "selftest")
	if code != 0 || strings.Contains(out, "FAILED") {
		t.Fatalf("exit code %d: %s%s", code, out, stderr)
	}
	for _, command := range []string{"TPM2_GetCapability", "TPM2_NV_Read", "TPM2_CreatePrimary", "TPM2_StartAuthSession", "TPM2_PolicySecret", "TPM2_ActivateCredential", "TPM2_Quote", "TPM2_PCR_Read", "TPM2_FlushContext", "ecc-p256 ", "rsa-2048 "} {
		if !strings.Contains(out, command) {
			t.Errorf("%s is not reported:\n%s", command, out)
		}
	}
	for name, code := range map[string]tpm2.TPMCC{"TPM2_Quote": tpm2.TPMCCQuote, "TPM2_ActivateCredential": tpm2.TPMCCActivateCredential, "TPM2_CreatePrimary": tpm2.TPMCCCreatePrimary} {
		n.proxy.Reset()
		n.proxy.Answer(code, tpm2.TPMRCFailure, 99)
		out, stderr, exit := n.byHand(t, "tpm", "selftest")
		if exit != 15 || !strings.Contains(stderr, name) || !strings.Contains(out, "FAILED") {
			t.Errorf("%s: exit code %d: %s%s", name, exit, out, stderr)
		}
	}
	n.proxy.Reset()
	n.nothingLoaded(t)
	if _, stderr, code := n.byHand(t, "tpm"); code != 3 || !strings.Contains(stderr, "hint: ") {
		t.Errorf("exit code %d: %s", code, stderr)
	}
}

// A dry run says in words what the hello holds, has the API server check it, and leaves nothing
// behind anywhere.
func TestTPMDryRun(t *testing.T) {
	n := newTPMNode(t, swtpm.Options{Certified: []string{"ecc-p256"}, Chain: true}, nil)
	out, stderr, code := n.byHand(t, "--dry-run")
	if code != 0 {
		t.Fatalf("exit code %d: %s%s", code, out, stderr)
	}
	for _, want := range []string{"hello of tpm/v1", "ecc-p256", fingerprint(t, n.tpm, "ecc-p256"), "1 certificate from the TPM", "AK name", "attestation-hello", "accepted"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is not in\n%s", want, out)
		}
	}
	n.wantFiled(t, 0, 0)
	n.nothingLoaded(t)
	if exists(n.dir.Path()) {
		t.Error("it made the certificate directory")
	}
}
