// SPDX-License-Identifier: Apache-2.0

// Package machineentry writes entries of an inventory (docs/inventory.md) in their shortest form.
// The node's half uses it, so it depends on nothing of the controller's.
package machineentry

import (
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// The kind of a list of machines.
const (
	APIVersion = "authenticator.cluster.x-k8s.io/v1alpha1"
	Kind       = "MachineInventory"
)

// Machine is an entry.
type Machine struct {
	// Name is left out if it is the node name.
	Name, NodeName, ProviderID string
	Addresses                  []string
	// EKs are fingerprints.
	EKs              []string
	BootstrapTokenID string
}

// String returns the entry in YAML, as an element of the list machines.
func (m Machine) String() string {
	var out strings.Builder
	field := func(name, value string) {
		if value == "" {
			return
		}
		begin := "  "
		if out.Len() == 0 {
			begin = "- "
		}
		out.WriteString(begin + name + ": " + value + "\n")
	}
	if m.Name != m.NodeName {
		field("name", scalar(m.Name))
	}
	field("nodeName", scalar(m.NodeName))
	field("providerID", scalar(m.ProviderID))
	if len(m.Addresses) > 0 {
		addresses := make([]string, 0, len(m.Addresses))
		for _, address := range m.Addresses {
			addresses = append(addresses, scalar(address))
		}
		field("addresses", "["+strings.Join(addresses, ", ")+"]")
	}
	field("bootstrapTokenID", scalar(m.BootstrapTokenID))
	if len(m.EKs) > 0 {
		out.WriteString("  eks:\n")
	}
	for _, ek := range m.EKs {
		out.WriteString("  - fingerprint: " + scalar(ek) + "\n")
	}
	return out.String()
}

var (
	// plain is what YAML takes for a text without quotes, in a list in brackets, too: no number, no
	// date. It may be one of words.
	plain = regexp.MustCompile(`^[a-z]([a-z0-9._:/-]*[a-z0-9])?$`)
	// words are those that YAML takes for something else.
	words = []string{"null", "true", "false", "y", "n", "yes", "no", "on", "off"}
)

// scalar returns a text as YAML, in quotes if it needs them. Characters that end a line or are not
// printable are escapes, as YAML and Go have them in common. The empty text stays empty.
func scalar(value string) string {
	if value == "" || plain.MatchString(value) && !slices.Contains(words, value) {
		return value
	}
	return strconv.Quote(value)
}
