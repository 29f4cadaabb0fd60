// SPDX-License-Identifier: Apache-2.0

// Package inventory parses the inventory of a fleet without Cluster API (docs/inventory.md): which
// endorsement keys a machine has, and its node name. The operator writes the inventory. It is a
// root of trust: its writers decide which machines get certificates.
package inventory

import "net/netip"

// Machine is one entry. The operator wrote it by hand, or copied the output of
// `kubelet-authenticator identify` from the machine. A copy is only as trustworthy as its
// transport.
type Machine struct {
	// Name is unique. Default: NodeName. What is said to be unique here need not be so for a
	// Disputed machine.
	Name string
	// NodeName is the name of the machine's Node: unique, and a DNS-1123 subdomain.
	NodeName string
	// ProviderID is the machine's spec.providerID: unique, or empty if it is not known.
	ProviderID string
	// DNSNames and IPs are the machine's addresses, for serving certificates. No other machine has
	// one of them, or has one of the DNS names as its node name.
	DNSNames []string
	IPs      []netip.Addr
	// EKs are its endorsement keys, and the instance of a cloud that it is. No other machine has
	// them. A machine without EKs has a TokenID, or the ProviderID of a cloud's instance.
	EKs []EK
	// TokenID is the ID of the bootstrap token that was made for the machine, "" if the operator
	// did not specify one. No other machine has it.
	TokenID string
	// Disputed says that entries of the inventory contradict each other about this machine. Either
	// it is listed twice with different values, or another machine claims one of its values. If it
	// is listed with different values, only values that all entries agree on are set, and EKs has
	// the EKs of all entries.
	Disputed bool
}

// EK is an endorsement key, or an instance of a cloud.
type EK struct {
	// Fingerprint is the SHA-256 of its SubjectPublicKeyInfo, in lower-case hex, or
	// attestation.Instance.Fingerprint.
	Fingerprint string
	// Template is the name of the template that the TPM makes it from, "" if the operator did not
	// specify it.
	Template string
	// CertificateFingerprint is the SHA-256 of its certificate, in lower-case hex, "" if the
	// operator did not specify it.
	CertificateFingerprint string
}
