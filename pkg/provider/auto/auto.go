// SPDX-License-Identifier: Apache-2.0

// Package auto chooses the provider of a machine that has not enrolled yet, for images that boot on
// several platforms. The choice is only which evidence the node offers. The controller's policy
// decides whether that evidence is enough.
package auto

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
)

// The providers that a machine can get, besides tpm.
const (
	ec2, ec2Role, gce, azure = "ec2", "ec2-role", "gce", "azure"
)

// Chooser has the paths that a choice depends on. The zero value has those of Linux.
type Chooser struct {
	// DMI is the directory with the firmware's fields. Default: /sys/class/dmi/id.
	DMI string
	// TPMs are the TPM devices to look for if the operator named none. Default: /dev/tpmrm0, then
	// /dev/tpm0.
	TPMs []string
}

// Choose returns the name of the strongest provider that this machine seems to have evidence for,
// and why. It opens the TPM only on a cloud's instance: elsewhere there is nothing else to choose.
//
// A TPM comes first if a source of endorsement keys can vouch for it: it has a certificate of its
// endorsement key, or the operator named the key's template. The TPMs of EC2 and Azure have no such
// certificate, and the cloud's own evidence needs no list of keys.
func (c Chooser) Choose(ctx context.Context, s provider.Settings) (name, why string) {
	// 1. Without a cloud, the TPM is the only device.
	cloud, named := c.cloud()
	if cloud == "" {
		return tpm.Name, "the firmware names no cloud that this program knows"
	}
	// 2. A TPM with a usable key.
	device, found := c.findTPM(s)
	problem := "there is no TPM device"
	if found {
		usable, err := usableEK(ctx, s)
		switch {
		case err == nil && usable:
			return tpm.Name, fmt.Sprintf("%s has a usable endorsement key", device)
		case err == nil:
			problem = device + " has no certificate of an endorsement key"
		default:
			problem = fmt.Sprintf("%s failed: %s", device, text.Line(err.Error(), 256))
		}
	}
	// 3. The cloud. On EC2 a TPM that fails still means that the instance has a NitroTPM. The
	// choice stays with the stronger evidence.
	if cloud == ec2 && !found {
		cloud = ec2Role
	}
	return cloud, fmt.Sprintf("the firmware names %s, and %s", named, problem)
}

// cloud returns the provider of the cloud that the firmware names, and the cloud's name. Both are
// empty if it names none. The host of the virtual machine writes these fields, so they prove
// nothing.
func (c Chooser) cloud() (name, named string) {
	const azureTag = "7783-7084-3265-9085-8269-3286-77" // the asset tag of all virtual machines of Azure
	for _, platform := range []struct{ field, value, provider, name string }{
		{"sys_vendor", "Amazon EC2", ec2, "Amazon EC2"},
		{"product_name", "Google Compute Engine", gce, "Google Compute Engine"},
		{"chassis_asset_tag", azureTag, azure, "Microsoft Azure"},
	} {
		dir := c.DMI
		if dir == "" {
			dir = "/sys/class/dmi/id"
		}
		value, err := os.ReadFile(filepath.Join(dir, platform.field))
		if err == nil && strings.TrimSpace(string(value)) == platform.value {
			return platform.provider, platform.name
		}
	}
	return "", ""
}

// findTPM returns the TPM device that exists.
func (c Chooser) findTPM(s provider.Settings) (path string, found bool) {
	devices := c.TPMs
	if devices == nil {
		devices = []string{"/dev/tpmrm0", "/dev/tpm0"}
	}
	if s.TPMDevice != "" {
		devices = []string{s.TPMDevice}
	}
	for _, device := range devices {
		// An error other than a missing file means that there is a device which cannot be used.
		if _, err := os.Stat(device); !errors.Is(err, os.ErrNotExist) {
			return device, true
		}
	}
	return "", false
}

// usableEK reports whether a source of endorsement keys can vouch for this TPM.
func usableEK(ctx context.Context, s provider.Settings) (bool, error) {
	p, err := tpm.Factory().New(s)
	if err != nil {
		return false, err
	}
	inspector, ok := p.(provider.Inspector)
	if !ok {
		return false, fmt.Errorf("provider %s cannot show its keys", p.Name())
	}
	found, err := inspector.Identify(ctx)
	if err != nil {
		return false, err
	}
	identity, ok := found.(*tpm.Identity)
	if !ok {
		return false, fmt.Errorf("provider %s shows no keys", p.Name())
	}
	return identity.HasUsableEK(s.EKTemplate), nil
}
