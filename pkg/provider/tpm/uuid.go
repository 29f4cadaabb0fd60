// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"context"
	"fmt"
	"os"
	"strings"
)

// systemUUID is the system UUID of the firmware (SMBIOS 3.x, 7.2.1), as Linux shows it to root. The
// maker of the machine sets it, and it is no secret. It names a machine, and proves nothing.
const systemUUID = "/sys/class/dmi/id/product_uuid"

// ProviderID returns <scheme>://<system UUID>, empty if no scheme is set.
func (p *Provider) ProviderID(context.Context) (string, error) {
	if p.scheme == "" {
		return "", nil
	}
	data, err := os.ReadFile(p.uuidFile)
	if err != nil {
		return "", fmt.Errorf("system UUID: %w", err)
	}
	id := strings.ToLower(strings.TrimSpace(string(data)))
	switch {
	case !isUUID(id):
		return "", fmt.Errorf("system UUID: %s does not hold a UUID", p.uuidFile)
	case strings.Trim(id, "0-") == "", strings.Trim(id, "f-") == "", id == "03000200-0400-0500-0006-000700080009":
		// Firmware without a UUID of its own: many machines share these.
		return "", fmt.Errorf("system UUID: %s is a placeholder; set providerID", id)
	}
	return p.scheme + "://" + id, nil
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
