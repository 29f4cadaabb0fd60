// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"cmp"
	"encoding/hex"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/machineentry"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/strict"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation/cloudname"
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

// maxProblems bounds the problems that are collected for one part.
const maxProblems = 100

// problemList collects the problems of a part.
type problemList struct {
	part string
	all  []*Error
}

func (l *problemList) add(e *Error) {
	if !l.full() {
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
		m := e.check(func(line int, format string, arguments ...any) {
			problems.add(&Error{Line: line, Machine: e.name(), Problem: fmt.Sprintf(format, arguments...)})
		})
		part.entries = append(part.entries, entry{int(e.Line), m})
	}
	return part, problems.all
}

type report func(line int, format string, arguments ...any)

// check checks one entry by itself, reports each problem, and returns its machine.
func (e *machineEntry) check(report report) Machine {
	m := Machine{Name: cmp.Or(e.Name.Value, e.NodeName.Value), NodeName: e.NodeName.Value, ProviderID: e.ProviderID.Value, TokenID: e.TokenID.Value}
	eks := e.EKs
	if e.Device != nil {
		eks = e.Device.EKs
	}
	keys := len(eks)
	if e.Instance != nil {
		keys++
	}
	e.checkFields(&m, keys, report)
	if e.Instance != nil {
		i := attestation.Instance{Platform: e.Instance.Platform.Value, ID: e.Instance.ID.Value}
		if is := instanceForms[i.Platform]; is == nil || !is(i.ID) {
			report(int(e.Instance.Line), "its instance is not a platform ec2, gce or azure and an id: i-..., a number, or a GUID in lower case")
		}
		m.EKs = append(m.EKs, EK{Fingerprint: i.Fingerprint()})
	}
	if m.ProviderID != "" {
		if err := csr.CheckProviderID(m.ProviderID); err != nil {
			report(int(e.Line), "%v", err)
		}
	}
	if keys > maxKeys || len(e.Addresses) > maxAddresses {
		return m // reported
	}
	for i := range eks {
		k := EK{Fingerprint: eks[i].Fingerprint.Value, Template: eks[i].Template.Value}
		if c := eks[i].Certificate; c != nil {
			k.CertificateFingerprint = c.Fingerprint.Value
		}
		switch problem := k.problem(eks[i].Certificate != nil); {
		case problem != "":
			report(int(eks[i].Line), "%s", problem)
		case slices.ContainsFunc(m.EKs, func(other EK) bool { return other.Fingerprint == k.Fingerprint }):
			report(int(eks[i].Line), "it has the EK %.80q twice", k.Fingerprint)
		}
		m.EKs = append(m.EKs, k)
	}
	for i, address := range e.Addresses {
		if problem := m.addAddress(address.Value); problem != "" {
			report(address.Line, "%s", problem)
		} else if slices.ContainsFunc(e.Addresses[:i], func(other strict.Text) bool { return other.Value == address.Value }) {
			report(address.Line, "it has the address %.80q twice", address.Value)
		}
	}
	return m
}

// checkFields reports the first problem of the entry's own fields.
func (e *machineEntry) checkFields(m *Machine, keys int, report report) {
	line := int(e.Line)
	switch {
	case e.Device != nil && e.EKs != nil:
		report(line, "a machine has eks or a device, not both")
	case m.NodeName == "":
		report(line, "it has no nodeName")
	case len(validation.IsDNS1123Subdomain(m.NodeName)) > 0:
		report(line, "its nodeName %.64q is not a DNS-1123 subdomain", m.NodeName)
	case len(m.Name) > validation.DNS1123SubdomainMaxLength || text.Line(m.Name, len(m.Name)) != m.Name:
		report(line, "its name is longer than %d bytes, or has more than single spaces and printable characters", validation.DNS1123SubdomainMaxLength)
	case e.Device != nil && e.Provider.Value != tpmProvider:
		report(line, "its provider is %.64q, and only devices of provider %s have endorsement keys", e.Provider.Value, tpmProvider)
	case e.Device == nil && e.Provider.Value != "":
		report(line, "it has a provider, but no device")
	case m.TokenID != "" && !isTokenID(m.TokenID):
		report(line, "its bootstrapTokenID is not six of a to z and 0 to 9: the part of the token before the dot, and never the rest")
	case keys == 0 && m.TokenID == "" && !isCloudProviderID(m.ProviderID):
		report(line, "it has no endorsement keys, no instance and no cloud's provider ID: nothing would find it")
	case keys > maxKeys:
		report(line, "it has more than %d endorsement keys and instances", maxKeys)
	case len(e.Addresses) > maxAddresses:
		report(line, "it has more than %d addresses", maxAddresses)
	}
}

// instanceForms report whether an ID has the form of an instance ID, by platform.
var instanceForms = map[string]func(id string) bool{
	"ec2":   cloudname.IsEC2Instance,
	"gce":   regexp.MustCompile(`^[1-9][0-9]{0,19}$`).MatchString,
	"azure": cloudname.IsGUID,
}

// isCloudProviderID reports whether the evidence of a cloud's instance may name this provider ID.
func isCloudProviderID(id string) bool {
	return strings.HasPrefix(id, "aws:///") || strings.HasPrefix(id, "gce://") || strings.HasPrefix(id, "azure:///")
}

func isTokenID(id string) bool {
	return len(id) == 6 && strings.Trim(id, "abcdefghijklmnopqrstuvwxyz0123456789") == ""
}

// problem returns what is wrong with a key, "" if nothing is.
func (k *EK) problem(hasCertificate bool) string {
	switch {
	case !isFingerprint(k.Fingerprint):
		return fmt.Sprintf("the EK's fingerprint %.80q is not a SHA-256 in lower-case hex", k.Fingerprint)
	case hasCertificate && !isFingerprint(k.CertificateFingerprint):
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
