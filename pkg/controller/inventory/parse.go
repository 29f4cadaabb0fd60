// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/machineentry"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
)

// The kind of a list of machines.
const (
	APIVersion = machineentry.APIVersion
	Kind       = machineentry.Kind
)

// Limits.
const (
	// MaxSize limits a part, in bytes. That suffices for ten thousand outputs of identify.
	MaxSize = 16 << 20
	// maxKeys and maxAddresses limit what one machine has.
	maxKeys, maxAddresses = 16, 64
	// maxText limits each value, in bytes, before it is parsed.
	maxText = 4096
	// tpmProvider is the provider whose devices have endorsement keys.
	tpmProvider = "tpm"
	// fingerprintSize is the length of a SHA-256 in hex.
	fingerprintSize = 64
)

// Error says what is wrong with a part of an inventory, and in which line.
type Error struct {
	// Part is the part's name, empty if it has none.
	Part string
	// Line is the line, 0 if the whole part is wrong.
	Line int
	// Machine is the name of the entry, "" if it has none.
	Machine string
	Problem string
}

func (e *Error) Error() string {
	where := "inventory: "
	if e.Part != "" {
		where += e.Part + ": "
	}
	if e.Line > 0 {
		where += fmt.Sprintf("line %d: ", e.Line)
	}
	return where + e.Text()
}

// Text is the error without its place.
func (e *Error) Text() string {
	if e.Machine == "" {
		return e.Problem
	}
	return fmt.Sprintf("machine %q: %s", e.Machine, e.Problem)
}

// withMachine adds the name of the machine to an error, if the name is known.
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

// maxProblems bounds the problems that are collected for one part.
const maxProblems = 100

// problemList collects the problems of a part.
type problemList struct {
	part string
	all  []*Error
}

func (l *problemList) add(err error) {
	var e *Error
	if errors.As(err, &e) && !l.full() {
		e.Part = l.part
		l.all = append(l.all, e)
	}
}

func (l *problemList) full() bool { return len(l.all) >= maxProblems }

// Part is a parsed file or ConfigMap entry. It is immutable.
type Part struct {
	name    string
	entries []entry
}

// entry is a machine, and the line where it begins.
type entry struct {
	line    int
	machine Machine
}

// Name returns the part's name.
func (p *Part) Name() string { return p.name }

// Len returns the number of entries in the part.
func (p *Part) Len() int { return len(p.entries) }

// ParsePart decodes a part of an inventory strictly (docs/inventory.md): a stream of documents in
// YAML or JSON. Each is a list of kind MachineInventory, or one machine as `kubelet-authenticator
// identify` prints it. Unknown and doubled fields and malformed values are an *Error.
//
// A list without machines is valid. A stream without documents is an error, since a file may be
// empty while it is being written.
func ParsePart(name string, data []byte) (*Part, error) {
	part, problems := parse(name, data)
	if len(problems) > 0 {
		return nil, problems[0]
	}
	return part, nil
}

// Problems returns everything that ParsePart refuses in a part, at most a hundred problems, in the
// order of their lines.
func Problems(name string, data []byte) []*Error {
	_, problems := parse(name, data)
	slices.SortStableFunc(problems, func(a, b *Error) int { return a.Line - b.Line })
	return problems
}

func parse(name string, data []byte) (*Part, []*Error) {
	problems := problemList{part: name}
	if len(data) > MaxSize {
		problems.add(&Error{Problem: fmt.Sprintf("it is longer than %d bytes", MaxSize)})
		return nil, problems.all
	}
	decoded, documents := decodeAll(data, &problems)
	if documents == 0 && len(problems.all) == 0 {
		problems.add(&Error{Problem: "it is empty; without machines it is kind " + Kind + " with machines: []"})
	}
	part := &Part{name: name, entries: make([]entry, 0, len(decoded))}
	for i := range decoded {
		e := &decoded[i]
		e.check(func(err error) { problems.add(withMachine(err, e.machine)) })
		part.entries = append(part.entries, entry{e.line, e.machine})
	}
	return part, problems.all
}

// check checks one entry by itself, reports each problem, and completes its machine.
func (e *machineEntry) check(report func(error)) {
	m := &e.machine
	if m.Name == "" {
		m.Name = m.NodeName
	}
	if err := e.checkFields(); err != nil {
		report(err)
	}
	if m.ProviderID != "" {
		if err := csr.CheckProviderID(m.ProviderID); err != nil {
			report(e.errorf("%v", err))
		}
	}
	if len(e.eks) > maxKeys || len(e.addresses) > maxAddresses {
		return // reported
	}
	for _, k := range e.eks {
		switch problem := k.problem(); {
		case problem != "":
			report(&Error{Line: k.line, Problem: problem})
		case slices.ContainsFunc(m.EKs, func(other EK) bool { return other.Fingerprint == k.Fingerprint }):
			report(&Error{Line: k.line, Problem: fmt.Sprintf("it has the EK %.80q twice", k.Fingerprint)})
		}
		m.EKs = append(m.EKs, k.EK)
	}
	for i, address := range e.addresses {
		problem := m.addAddress(address.text)
		if problem == "" && slices.ContainsFunc(e.addresses[:i], func(other textAt) bool { return other.text == address.text }) {
			problem = fmt.Sprintf("it has the address %.80q twice", address.text)
		}
		if problem != "" {
			report(&Error{Line: address.line, Problem: problem})
		}
	}
}

func (e *machineEntry) checkFields() error {
	m := &e.machine
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
		// Unknown templates are accepted, since a newer plugin may know more of them.
		return fmt.Sprintf("the template %.64q is not a name like ecc-p256", k.Template)
	}
	return ""
}

func isFingerprint(s string) bool {
	_, err := hex.DecodeString(s)
	return err == nil && len(s) == fingerprintSize && s == strings.ToLower(s)
}

// addAddress refuses addresses that cannot belong to one machine only. The rules for serving
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
	// a mistyped IP, or one in an old notation; no top-level domain is a number
	if strings.Trim(last, "0123456789") == "" {
		return fmt.Sprintf("the address %.64q is neither an IP nor a DNS name", address)
	}
	if last == "localhost" || strings.HasSuffix(address, ".localhost.localdomain") || address == "localhost.localdomain" {
		return fmt.Sprintf("the address %.64q is every machine's own", address)
	}
	m.DNSNames = append(m.DNSNames, address)
	return ""
}
