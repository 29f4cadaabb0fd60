// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"context"
	_ "embed"
	"fmt"
	"os"
	"strings"
)

// dmiDir is where Linux shows root what the firmware says of the machine. The maker of the
// machine sets that, and it is no secret. It names a machine, and proves nothing.
const dmiDir = "/sys/class/dmi/id"

const (
	// productUUID is the system UUID (SMBIOS 3.x, 7.2.1).
	productUUID = "product_uuid"
	// productSerial is the serial number. vSphere writes the UUID of the virtual machine there, as
	// in the provider ID. Its system UUID has the first three groups in another byte order,
	// depending on the version of the virtual hardware (kubernetes/kubernetes#58927).
	productSerial = "product_serial"
)

// SystemUUIDFields returns the fields of the firmware that the system UUID can be read from.
func SystemUUIDFields() []string { return []string{productUUID, productSerial} }

// vmwareUUID returns the UUID in a serial number such as
// "VMware-42 0b cf 2b 1f 6b e7 f0-5e 5f 2c 3d 4e 5f 60 71". Any other text it returns as it is.
func vmwareUUID(serial string) string {
	spelled, isVMware := strings.CutPrefix(serial, "vmware-")
	digits := strings.NewReplacer(" ", "", "-", "").Replace(spelled)
	if !isVMware || len(digits) != 32 {
		return serial
	}
	return digits[:8] + "-" + digits[8:12] + "-" + digits[12:16] + "-" + digits[16:20] + "-" + digits[20:]
}

// ProviderID returns <scheme>://<system UUID>, empty if no scheme is set.
func (p *Provider) ProviderID(context.Context) (string, error) {
	if p.scheme == "" {
		return "", nil
	}
	data, err := os.ReadFile(p.uuidFile)
	if err != nil {
		return "", fmt.Errorf("system UUID: %w", err)
	}
	id := vmwareUUID(strings.ToLower(strings.TrimSpace(string(data))))
	switch {
	case !isUUID(id):
		return "", fmt.Errorf("system UUID: %s does not hold a UUID", p.uuidFile)
	case isShared(id):
		return "", fmt.Errorf("system UUID: many machines have %s, so it names none: set providerID; a machine that has attested with it keeps it with providerID: %s://%[1]s", id, p.scheme)
	}
	return p.scheme + "://" + id, nil
}

//go:embed shareduuids.txt
var sharedUUIDs string

// isShared reports whether a UUID is known to be that of many machines.
func isShared(id string) bool {
	digits := strings.ReplaceAll(id, "-", "")
	if digits == strings.Repeat(digits[:2], len(digits)/2) {
		return true
	}
	for line := range strings.Lines(sharedUUIDs) {
		if known, _, _ := strings.Cut(line, " "); known == id || isUUID(known) && swapped(known) == id {
			return true
		}
	}
	return false
}

// swapped returns a UUID with the bytes of its first three groups in the other order. SMBIOS 2.6
// has them as little endian, and firmware from before does not.
func swapped(id string) string {
	groups := strings.SplitN(id, "-", 4)
	for i, group := range groups[:3] {
		reversed := ""
		for at := 0; at < len(group); at += 2 {
			reversed = group[at:at+2] + reversed
		}
		groups[i] = reversed
	}
	return strings.Join(groups, "-")
}

// isUUID reports whether s is a UUID as RFC 9562, section 4, writes it, in lower case.
func isUUID(s string) bool {
	if len(s) != 36 {
		return false
	}
	for i := range len(s) {
		c := s[i]
		switch i {
		case 8, 13, 18, 23:
			if c != '-' {
				return false
			}
		default:
			if ('0' > c || c > '9') && ('a' > c || c > 'f') {
				return false
			}
		}
	}
	return true
}

// isScheme reports whether s is a URI's scheme (RFC 3986, section 3.1) in lower case.
func isScheme(s string) bool {
	return s != "" && len(s) < 64 && 'a' <= s[0] && s[0] <= 'z' && strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789+.-") == ""
}
