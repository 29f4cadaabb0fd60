// SPDX-License-Identifier: Apache-2.0

package auto

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/unittest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
)

func TestMain(m *testing.M) { unittest.Main(m) }

// The firmware's fields, as machines of these platforms have them.
var (
	onEC2   = map[string]string{"sys_vendor": "Amazon EC2\n", "product_name": "m7i.large\n", "bios_vendor": "Amazon EC2\n"}
	onGCE   = map[string]string{"sys_vendor": "Google\n", "product_name": "Google Compute Engine\n", "bios_vendor": "Google\n"}
	onAzure = map[string]string{"sys_vendor": "Microsoft Corporation\n", "product_name": "Virtual Machine\n", "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77\n"}
	onMetal = map[string]string{"sys_vendor": "Dell Inc.\n", "product_name": "PowerEdge R650\n", "chassis_asset_tag": "\n"}
)

// firmware returns a directory with the firmware's fields.
func firmware(t *testing.T, fields map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, content := range fields {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestChoose(t *testing.T) {
	bare, certified, broken := swtpm.Start(t, swtpm.Options{}), swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256"}}), swtpm.Start(t, swtpm.Options{})
	if err := broken.SetPassword(tpm2.TPMRHEndorsement, "x"); err != nil {
		t.Fatal(err)
	}
	const absent = "/nonexistent"
	for name, c := range map[string]struct {
		fields     map[string]string
		device     string
		ekTemplate string
		want, says string
	}{
		"metal":                            {onMetal, bare.Socket(), "", tpm.Name, "names no cloud"},
		"metal, no TPM":                    {onMetal, absent, "", tpm.Name, "names no cloud"},
		"no firmware":                      {nil, bare.Socket(), "", tpm.Name, "names no cloud"},
		"a Chromebook":                     {map[string]string{"sys_vendor": "Google\n", "product_name": "Eve\n"}, absent, "", tpm.Name, "names no cloud"},
		"Hyper-V":                          {map[string]string{"sys_vendor": "Microsoft Corporation\n", "product_name": "Virtual Machine\n"}, absent, "", tpm.Name, "names no cloud"},
		"EC2, no TPM":                      {onEC2, absent, "", ec2Role, "Amazon EC2, and there is no TPM device"},
		"EC2, NitroTPM":                    {onEC2, bare.Socket(), "", ec2, "has no certificate of an endorsement key"},
		"EC2, the TPM fails":               {onEC2, broken.Socket(), "", ec2, broken.Socket() + " failed: "},
		"EC2, a key of the TPM is named":   {onEC2, bare.Socket(), "rsa-2048", tpm.Name, "usable endorsement key"},
		"GCE":                              {onGCE, bare.Socket(), "auto", gce, "has no certificate of an endorsement key"},
		"GCE, no TPM":                      {onGCE, absent, "", gce, "there is no TPM device"},
		"GCE, the TPM has a certificate":   {onGCE, certified.Socket(), "", tpm.Name, "usable endorsement key"},
		"GCE, the TPM fails":               {onGCE, broken.Socket(), "", gce, "failed: "},
		"Azure":                            {onAzure, bare.Socket(), "", azure, "Microsoft Azure, and "},
		"Azure, the TPM has a certificate": {onAzure, certified.Socket(), "", tpm.Name, "usable endorsement key"},
		"Azure, the TPM is a file":         {onAzure, os.Args[0], "", azure, "failed: "},
	} {
		t.Run(name, func(t *testing.T) {
			got, why := Chooser{DMI: firmware(t, c.fields)}.Choose(t.Context(), provider.Settings{TPMDevice: c.device, EKTemplate: c.ekTemplate, RuntimeDir: t.TempDir()})
			if got != c.want || !strings.Contains(why, c.says) || strings.Contains(why, "\n") {
				t.Errorf("got %s: %q, want %s: %q", got, why, c.want, c.says)
			}
		})
	}
}

// Without a setting, the first device that exists is meant.
func TestChooseLooksForATPM(t *testing.T) {
	bare := swtpm.Start(t, swtpm.Options{})
	dmi := firmware(t, onEC2)
	for want, devices := range map[string][]string{ec2: {"/nonexistent", bare.Socket()}, ec2Role: {"/nonexistent"}} {
		if got, why := (Chooser{DMI: dmi, TPMs: devices}).Choose(t.Context(), provider.Settings{RuntimeDir: t.TempDir()}); got != want {
			t.Errorf("%q: got %s (%s), want %s", devices, got, why, want)
		}
	}
}

// Without a cloud nothing is opened: the TPM's lock would be in the runtime directory.
func TestChooseOpensNoTPMOnMetal(t *testing.T) {
	bare, dir := swtpm.Start(t, swtpm.Options{}), t.TempDir()
	if got, _ := (Chooser{DMI: firmware(t, onMetal)}).Choose(t.Context(), provider.Settings{TPMDevice: bare.Socket(), RuntimeDir: dir}); got != tpm.Name {
		t.Errorf("got %s", got)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
		t.Errorf("%v, %v", entries, err)
	}
}
