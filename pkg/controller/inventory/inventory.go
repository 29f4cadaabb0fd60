// SPDX-License-Identifier: Apache-2.0

// Package inventory parses the inventory of a fleet without Cluster API (docs/inventory.md): which
// endorsement keys a machine has, and its node name. The operator writes it. It is a root of trust:
// whoever writes it decides who gets in.
package inventory

import (
	"net/netip"
	"slices"
)

// Machine is one entry. The operator wrote it by hand, or copied what `kubelet-authenticator
// identify` printed on the machine. A copy is as trustworthy as the way it took.
type Machine struct {
	// Name is unique. Default: the node name.
	Name string
	// NodeName is the name of the machine's Node: unique, and a DNS-1123 subdomain.
	NodeName string
	// ProviderID is the machine's spec.providerID: unique, or empty if it is not known.
	ProviderID string
	// DNSNames and IPs are the machine's addresses, for serving certificates. No other machine has
	// them, or has one of the DNS names as its node name.
	DNSNames []string
	IPs      []netip.Addr
	// EKs are its endorsement keys. No other machine has them. A machine without EKs has a TokenID.
	EKs []EK
	// TokenID is the ID of the bootstrap token that was made for it, empty if the operator did not
	// say. No other machine has it.
	TokenID string
}

// EK is an endorsement key.
type EK struct {
	// Fingerprint is the SHA-256 of its SubjectPublicKeyInfo, in lower-case hex.
	Fingerprint string
	// Template is the name of the template that the TPM makes it from, empty if the operator did
	// not say.
	Template string
	// CertificateFingerprint is the SHA-256 of its certificate, in lower-case hex, empty if the
	// operator did not say.
	CertificateFingerprint string
}

// Inventory is a parsed inventory. It does not change, and returns copies. The zero value, and nil,
// have no machines.
type Inventory struct {
	machines []Machine
	// byEK, byName, byNodeName and byToken have indexes into machines.
	byEK, byName, byNodeName, byToken map[string]int
}

// ByEK returns the machines with the endorsement key of that fingerprint: none or one, since Parse
// refuses more.
func (i *Inventory) ByEK(fingerprint string) []Machine {
	if i == nil {
		return nil
	}
	m, ok := i.at(i.byEK, fingerprint)
	if !ok {
		return nil
	}
	return []Machine{m}
}

// ByName returns the machine of that name.
func (i *Inventory) ByName(name string) (Machine, bool) {
	if i == nil {
		return Machine{}, false
	}
	return i.at(i.byName, name)
}

// ByNodeName returns the machine whose node has that name.
func (i *Inventory) ByNodeName(name string) (Machine, bool) {
	if i == nil {
		return Machine{}, false
	}
	return i.at(i.byNodeName, name)
}

// ByToken returns the machine that the bootstrap token with that ID was made for.
func (i *Inventory) ByToken(id string) (Machine, bool) {
	if i == nil {
		return Machine{}, false
	}
	return i.at(i.byToken, id)
}

// All returns all machines, in the order of the file.
func (i *Inventory) All() []Machine {
	if i == nil {
		return nil
	}
	all := make([]Machine, 0, len(i.machines))
	for _, m := range i.machines {
		all = append(all, m.clone())
	}
	return all
}

func (i *Inventory) at(index map[string]int, key string) (Machine, bool) {
	n, ok := index[key]
	if !ok {
		return Machine{}, false
	}
	return i.machines[n].clone(), true
}

func (m Machine) clone() Machine {
	m.DNSNames, m.IPs, m.EKs = slices.Clone(m.DNSNames), slices.Clone(m.IPs), slices.Clone(m.EKs)
	return m
}
