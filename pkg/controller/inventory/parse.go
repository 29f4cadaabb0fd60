// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
)

// The kind of a list of machines.
const (
	APIVersion = "authenticator.cluster.x-k8s.io/v1alpha1"
	Kind       = "MachineInventory"
)

// Limits.
const (
	// MaxSize limits an inventory, in bytes: ten thousand machines as identify prints them.
	MaxSize = 16 << 20
	// maxKeys and maxAddresses limit what one machine has.
	maxKeys, maxAddresses = 16, 64
	// maxText limits each value, in bytes, before it is parsed.
	maxText = 4096
	// tpmProvider is the provider whose devices have endorsement keys.
	tpmProvider = "tpm"
	// fingerprintSize is that of a SHA-256 in hex.
	fingerprintSize = 64
)

// Error says what is wrong with an inventory, and in which line.
type Error struct {
	// Line is the line, 0 if the whole inventory is wrong or Problem says where.
	Line int
	// Machine is the name of the entry, empty where it has none.
	Machine string
	Problem string
}

func (e *Error) Error() string {
	where := "inventory: "
	if e.Line > 0 {
		where += fmt.Sprintf("line %d: ", e.Line)
	}
	if e.Machine != "" {
		where += fmt.Sprintf("machine %q: ", e.Machine)
	}
	return where + e.Problem
}

// withMachine adds to an error which machine it is about, if that is known.
func withMachine(err error, m Machine) error {
	var e *Error
	if errors.As(err, &e) && e.Machine == "" {
		if e.Machine = m.Name; e.Machine == "" {
			e.Machine = m.NodeName
		}
		e.Machine = text.Line(e.Machine, 253)
	}
	return err
}

// Parse decodes an inventory strictly (docs/inventory.md): a stream of documents in YAML or JSON.
// Each is a list of kind MachineInventory, or one machine as `kubelet-authenticator identify`
// prints it. Unknown and doubled fields, and values that two machines have, are an *Error.
//
// A list without machines is valid. A stream without documents is an error, since a file is empty
// while it is being written.
func Parse(data []byte) (*Inventory, error) {
	if len(data) > MaxSize {
		return nil, &Error{Problem: fmt.Sprintf("it is longer than %d bytes", MaxSize)}
	}
	entries, documents, err := decodeAll(data)
	if err != nil {
		return nil, err
	}
	if documents == 0 {
		return nil, &Error{Problem: "it is empty; without machines it is kind " + Kind + " with machines: []"}
	}
	inventory := &Inventory{byEK: map[string]int{}, byName: map[string]int{}, byNodeName: map[string]int{}, byToken: map[string]int{}}
	claims := claimSet{}
	for i := range entries {
		e := &entries[i]
		if err := e.check(); err != nil {
			return nil, withMachine(err, e.machine)
		}
		if err := claims.add(e); err != nil {
			return nil, withMachine(err, e.machine)
		}
		inventory.machines = append(inventory.machines, e.machine)
		inventory.byName[e.machine.Name], inventory.byNodeName[e.machine.NodeName] = i, i
		for _, ek := range e.machine.EKs {
			inventory.byEK[ek.Fingerprint] = i
		}
		if id := e.machine.TokenID; id != "" {
			inventory.byToken[id] = i
		}
	}
	return inventory, nil
}

// check checks one entry by itself and completes its machine.
func (e *machineEntry) check() error {
	m := &e.machine
	if m.Name == "" {
		m.Name = m.NodeName
	}
	switch {
	case m.NodeName == "":
		return e.errorf("it has no nodeName")
	case len(validation.IsDNS1123Subdomain(m.NodeName)) > 0:
		return e.errorf("its nodeName %.64q is not a DNS-1123 subdomain", m.NodeName)
	case len(m.Name) > validation.DNS1123SubdomainMaxLength || text.Line(m.Name, len(m.Name)) != m.Name:
		return e.errorf("its name is longer than %d bytes, or has more than single spaces and printable characters", validation.DNS1123SubdomainMaxLength)
	case e.device && e.provider != tpmProvider:
		return e.errorf("its provider is %.64q, and only devices of provider %s have endorsement keys", e.provider, tpmProvider)
	case !e.device && e.provider != "":
		return e.errorf("it has a provider, but no device")
	case m.TokenID != "" && !isTokenID(m.TokenID):
		return e.errorf("its bootstrapTokenID is not six of a to z and 0 to 9: the part of the token before the dot, and never the rest")
	case len(e.eks) == 0 && m.TokenID == "":
		return e.errorf("it has no endorsement keys: nothing would find it")
	case len(e.eks) > maxKeys:
		return e.errorf("it has more than %d endorsement keys", maxKeys)
	case len(e.addresses) > maxAddresses:
		return e.errorf("it has more than %d addresses", maxAddresses)
	}
	if m.ProviderID != "" {
		if err := csr.CheckProviderID(m.ProviderID); err != nil {
			return e.errorf("%v", err)
		}
	}
	for _, k := range e.eks {
		if problem := k.problem(); problem != "" {
			return &Error{Line: k.line, Problem: problem}
		}
		m.EKs = append(m.EKs, k.EK)
	}
	for _, address := range e.addresses {
		if problem := m.addAddress(address.text); problem != "" {
			return &Error{Line: address.line, Problem: problem}
		}
	}
	return nil
}

func (e *machineEntry) errorf(format string, arguments ...any) error {
	return &Error{Line: e.line, Problem: fmt.Sprintf(format, arguments...)}
}

func isTokenID(id string) bool {
	return len(id) == 6 && strings.Trim(id, "abcdefghijklmnopqrstuvwxyz0123456789") == ""
}

func (k *ekEntry) problem() string {
	switch {
	case !isFingerprint(k.Fingerprint):
		return fmt.Sprintf("the EK's fingerprint %.80q is not a SHA-256 in lower-case hex", k.Fingerprint)
	case k.certificate && !isFingerprint(k.CertificateFingerprint):
		return fmt.Sprintf("the certificate's fingerprint %.80q is not a SHA-256 in lower-case hex", k.CertificateFingerprint)
	case k.Template != "" && len(validation.IsDNS1123Label(k.Template)) > 0:
		// Which templates there are is not judged: a newer plugin may know more of them.
		return fmt.Sprintf("the template %.64q is not a name like ecc-p256", k.Template)
	}
	return ""
}

func isFingerprint(s string) bool {
	_, err := hex.DecodeString(s)
	return err == nil && len(s) == fingerprintSize && s == strings.ToLower(s)
}

// addAddress refuses addresses that no machine has for itself alone. The rules for serving
// certificates check more.
func (m *Machine) addAddress(address string) string {
	if ip, err := netip.ParseAddr(address); err == nil {
		if ip.String() != address || ip.Is4In6() || ip.Zone() != "" {
			return fmt.Sprintf("the address %.64q is not in its shortest form", address)
		}
		if !ip.IsGlobalUnicast() {
			return fmt.Sprintf("the address %.64q is loopback, link-local, multicast or none", address)
		}
		m.IPs = append(m.IPs, ip)
		return ""
	}
	if len(validation.IsDNS1123Subdomain(address)) > 0 {
		return fmt.Sprintf("the address %.64q is neither an IP nor a DNS name in lower case", address)
	}
	last := address[strings.LastIndexByte(address, '.')+1:]
	if strings.Trim(last, "0123456789") == "" { // a mistyped IP, or one in an old notation; no top-level domain is a number
		return fmt.Sprintf("the address %.64q is neither an IP nor a DNS name", address)
	}
	if last == "localhost" || strings.HasSuffix(address, ".localhost.localdomain") || address == "localhost.localdomain" {
		return fmt.Sprintf("the address %.64q is every machine's own", address)
	}
	m.DNSNames = append(m.DNSNames, address)
	return ""
}

// claimSet has the entry that holds each value which only one machine may have, by kind and value.
type claimSet map[[2]string]*machineEntry

// add adds the values of e. It fails with the name of the machine that has one of them already.
func (c claimSet) add(e *machineEntry) error {
	m := &e.machine
	// A node's name is a DNS name that it may want in its serving certificate. So no other machine
	// may have it as an address.
	own := [][2]string{{"name", m.Name}, {"DNS name or nodeName", m.NodeName}}
	if m.ProviderID != "" {
		own = append(own, [2]string{"providerID", m.ProviderID})
	}
	if m.TokenID != "" {
		own = append(own, [2]string{"bootstrapTokenID", m.TokenID})
	}
	for _, ek := range m.EKs {
		own = append(own, [2]string{"EK", ek.Fingerprint})
	}
	for _, name := range m.DNSNames {
		if name != m.NodeName {
			own = append(own, [2]string{"DNS name or nodeName", name})
		}
	}
	for _, ip := range m.IPs {
		own = append(own, [2]string{"IP", ip.String()})
	}
	for _, claim := range own {
		before, taken := c[claim]
		switch {
		case taken && before == e:
			return e.errorf("it has the %s %.80q twice", claim[0], claim[1])
		case taken:
			return e.errorf("the %s %.80q is also machine %q's, line %d", claim[0], claim[1], before.machine.Name, before.line)
		}
		c[claim] = e
	}
	return nil
}
