// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Inventory has the machines of all parts. It is immutable, and its methods return copies. The zero
// value and nil have no machines.
type Inventory struct {
	machines []Machine
	// owners has an index into machines for each claim. contested has the indexes of all claimants
	// of a claim, if there are several.
	owners    map[claim]int
	contested map[claim][]int

	conflicts  []Conflict
	duplicates int
	incomplete bool
}

// claim is a value that only one machine may have.
type claim struct{ field, value string }

// The fields of claims. A node's name may be a DNS name in its serving certificate, so no other
// machine may have it as an address.
const (
	fieldName       = "name"
	fieldNode       = "DNS name or nodeName"
	fieldProviderID = "providerID"
	fieldToken      = "bootstrapTokenID"
	fieldEK         = "EK"
	fieldIP         = "IP"
)

// claims calls add with each claim of the machine.
func (m *Machine) claims(add func(claim)) {
	add(claim{fieldName, m.Name})
	add(claim{fieldNode, m.NodeName})
	for _, name := range m.DNSNames {
		if name != m.NodeName {
			add(claim{fieldNode, name})
		}
	}
	if m.ProviderID != "" {
		add(claim{fieldProviderID, m.ProviderID})
	}
	if m.TokenID != "" {
		add(claim{fieldToken, m.TokenID})
	}
	for _, ek := range m.EKs {
		add(claim{fieldEK, ek.Fingerprint})
	}
	for _, ip := range m.IPs {
		add(claim{fieldIP, ip.String()})
	}
}

// Conflict is a contradiction between entries. Each machine in it is Disputed.
type Conflict struct {
	// Field and Value are the claim that several machines make. If one machine is listed several
	// times with different values, they are "name" and its name.
	Field string `json:"field"`
	Value string `json:"value"`
	// Entries are the entries that make the claim, two or more.
	Entries []Place `json:"entries"`
}

// Place is an entry of a machine.
type Place struct {
	Machine string `json:"machine"`
	Part    string `json:"part,omitempty"`
	Line    int    `json:"line"`
}

func (p Place) String() string {
	if p.Part == "" {
		return fmt.Sprintf("line %d", p.Line)
	}
	return fmt.Sprintf("%s:%d", p.Part, p.Line)
}

// maxEntries bounds the entries in the text of a conflict.
const maxEntries = 4

func (c Conflict) String() string {
	var entries []string
	for i, e := range c.Entries {
		switch {
		case i == maxEntries:
			entries = append(entries, fmt.Sprintf("%d more", len(c.Entries)-i))
		case i > maxEntries:
		case c.Field == fieldName:
			entries = append(entries, e.String())
		default:
			entries = append(entries, fmt.Sprintf("machine %q (%s)", e.Machine, e))
		}
	}
	if c.Field == fieldName {
		return fmt.Sprintf("machine %q is listed differently: %s", c.Value, strings.Join(entries, ", "))
	}
	return fmt.Sprintf("the %s %.80q is claimed by %s", c.Field, c.Value, strings.Join(entries, ", "))
}

// Parse parses an inventory of one part without a name.
func Parse(data []byte) (*Inventory, error) {
	part, err := ParsePart("", data)
	if err != nil {
		return nil, err
	}
	return Merge(part), nil
}

// Merge returns the machines of all parts, in their order. A part that is not known yet is nil.
// Equal entries count once. A contradiction affects only the machines in it: they become Disputed.
func Merge(parts ...*Part) *Inventory {
	size := 0
	for _, part := range parts {
		if part != nil {
			size += len(part.entries)
		}
	}
	m := merger{
		inventory: &Inventory{machines: make([]Machine, 0, size), owners: make(map[claim]int, 4*size), contested: map[claim][]int{}},
		byName:    make(map[string]int, size), entries: make([]located, 0, size), others: map[int][]located{},
	}
	for _, part := range parts {
		if part == nil {
			m.inventory.incomplete = true
			continue
		}
		for i := range part.entries {
			m.add(located{&part.entries[i], part.name})
		}
	}
	m.mergeNames()
	m.mergeClaims()
	return m.inventory
}

// located is an entry and its part.
type located struct {
	*entry
	part string
}

func (l located) place() Place { return Place{l.machine.Name, l.part, l.line} }

type merger struct {
	inventory *Inventory
	byName    map[string]int
	// entries has the first entry of each machine, and others has those that differ from it.
	entries []located
	others  map[int][]located
}

func (m *merger) add(e located) {
	n, known := m.byName[e.machine.Name]
	if !known {
		n = len(m.entries)
		m.byName[e.machine.Name] = n
		m.entries, m.inventory.machines = append(m.entries, e), append(m.inventory.machines, e.machine)
		return
	}
	if slices.ContainsFunc(m.of(n), func(before located) bool { return equal(before.machine, e.machine) }) {
		m.inventory.duplicates++
		return
	}
	m.others[n] = append(m.others[n], e)
}

// of returns the entries of a machine that differ.
func (m *merger) of(n int) []located { return append([]located{m.entries[n]}, m.others[n]...) }

// mergeNames merges the entries of machines that are listed with different values.
func (m *merger) mergeNames() {
	for n, e := range m.entries {
		if len(m.others[n]) == 0 {
			continue
		}
		conflict := Conflict{Field: fieldName, Value: e.machine.Name}
		machine := e.machine.clone()
		for _, e := range m.of(n) {
			conflict.Entries = append(conflict.Entries, e.place())
			machine.agreeWith(e.machine)
		}
		machine.Disputed = true
		m.inventory.machines[n] = machine
		m.inventory.conflicts = append(m.inventory.conflicts, conflict)
	}
}

// agreeWith keeps only the values that equal those of another entry of the machine, and keeps the
// EKs of both.
func (m *Machine) agreeWith(other Machine) {
	for _, field := range []struct {
		own   *string
		other string
	}{{&m.NodeName, other.NodeName}, {&m.ProviderID, other.ProviderID}, {&m.TokenID, other.TokenID}} {
		if *field.own != field.other {
			*field.own = ""
		}
	}
	m.DNSNames = slices.DeleteFunc(m.DNSNames, func(name string) bool { return !slices.Contains(other.DNSNames, name) })
	m.IPs = slices.DeleteFunc(m.IPs, func(ip netip.Addr) bool { return !slices.Contains(other.IPs, ip) })
	for _, ek := range other.EKs {
		if !slices.ContainsFunc(m.EKs, func(known EK) bool { return known.Fingerprint == ek.Fingerprint }) {
			m.EKs = append(m.EKs, ek)
		}
	}
}

// mergeClaims marks the machines that share a claim as disputed.
func (m *merger) mergeClaims() {
	i := m.inventory
	var order []claim
	for n := range m.entries {
		add := func(c claim) {
			owner, taken := i.owners[c]
			switch all := i.contested[c]; {
			case !taken:
				i.owners[c] = n
			case owner == n || len(all) > 0 && all[len(all)-1] == n:
				// another entry of the same machine
			case len(all) == 0:
				order = append(order, c)
				i.contested[c] = []int{owner, n}
			default:
				i.contested[c] = append(all, n)
			}
		}
		m.entries[n].machine.claims(add)
		for _, e := range m.others[n] {
			e.machine.claims(add)
		}
	}
	for _, c := range order {
		conflict := Conflict{Field: c.field, Value: c.value}
		for _, n := range i.contested[c] {
			i.machines[n].dispute(c)
			conflict.Entries = append(conflict.Entries, m.claimant(n, c))
		}
		i.conflicts = append(i.conflicts, conflict)
	}
}

// dispute marks a machine that has a contested claim. It removes a contested address, so that no
// machine gets a serving certificate for it. Comparing the machines later would not suffice:
// agreeWith may have removed the address from one of them.
func (m *Machine) dispute(c claim) {
	m.Disputed = true
	switch c.field {
	case fieldNode:
		m.DNSNames = slices.DeleteFunc(slices.Clone(m.DNSNames), func(name string) bool { return name == c.value })
	case fieldIP:
		m.IPs = slices.DeleteFunc(slices.Clone(m.IPs), func(ip netip.Addr) bool { return ip.String() == c.value })
	}
}

// claimant returns the entry of a machine that has a claim.
func (m *merger) claimant(n int, c claim) Place {
	all := m.of(n)
	at := slices.IndexFunc(all, func(e located) (has bool) {
		e.machine.claims(func(own claim) { has = has || own == c })
		return has
	})
	return all[at].place()
}

// equal reports whether two entries of a machine are the same for decisions. It ignores templates,
// certificates and the order of lists.
func equal(a, b Machine) bool {
	return a.NodeName == b.NodeName && a.ProviderID == b.ProviderID && a.TokenID == b.TokenID &&
		slices.Equal(fingerprints(a), fingerprints(b)) && slices.Equal(addresses(a), addresses(b))
}

func fingerprints(m Machine) []string {
	all := make([]string, 0, len(m.EKs))
	for _, ek := range m.EKs {
		all = append(all, ek.Fingerprint)
	}
	slices.Sort(all)
	return all
}

// addresses returns the machine's DNS names and IPs, sorted.
func addresses(m Machine) []string {
	all := slices.Clone(m.DNSNames)
	for _, ip := range m.IPs {
		all = append(all, ip.String())
	}
	slices.Sort(all)
	return all
}

// ByEK returns the machines with the endorsement key of that fingerprint. If there are several,
// they are Disputed.
func (i *Inventory) ByEK(fingerprint string) []Machine { return i.by(claim{fieldEK, fingerprint}) }

// ByName returns the machine of that name.
func (i *Inventory) ByName(name string) (Machine, bool) { return i.first(claim{fieldName, name}) }

// ByNodeName returns the machine whose node has that name. If several claim it, it returns one of
// them, which is Disputed.
func (i *Inventory) ByNodeName(name string) (Machine, bool) {
	for _, m := range i.by(claim{fieldNode, name}) {
		if m.NodeName == name {
			return m, true
		}
	}
	return Machine{}, false
}

// HasAddress reports whether a machine has, or claims, this DNS name or this node name.
func (i *Inventory) HasAddress(name string) bool { return len(i.by(claim{fieldNode, name})) > 0 }

// ByProviderID returns the machine with that provider ID. If several claim it, it returns one of
// them, which is Disputed.
func (i *Inventory) ByProviderID(id string) (Machine, bool) {
	return i.first(claim{fieldProviderID, id})
}

// ByToken returns the machine that the bootstrap token with that ID was made for. If several claim
// it, it returns one of them, which is Disputed.
func (i *Inventory) ByToken(id string) (Machine, bool) { return i.first(claim{fieldToken, id}) }

// All returns all machines, in the order of the parts.
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

// Len returns the number of machines.
func (i *Inventory) Len() int {
	if i == nil {
		return 0
	}
	return len(i.machines)
}

// Conflicts returns the contradictions between entries.
func (i *Inventory) Conflicts() []Conflict {
	if i == nil {
		return nil
	}
	return slices.Clone(i.conflicts)
}

// Duplicates returns the number of entries that equal an earlier one. They do not count.
func (i *Inventory) Duplicates() int {
	if i == nil {
		return 0
	}
	return i.duplicates
}

// Complete reports whether all parts are known. Otherwise there may be more machines, and more
// conflicts.
func (i *Inventory) Complete() bool { return i != nil && !i.incomplete }

func (i *Inventory) by(c claim) []Machine {
	if i == nil {
		return nil
	}
	owners := i.contested[c]
	if n, ok := i.owners[c]; ok && len(owners) == 0 {
		owners = []int{n}
	}
	var found []Machine
	for _, n := range owners {
		found = append(found, i.machines[n].clone())
	}
	return found
}

func (i *Inventory) first(c claim) (Machine, bool) {
	found := i.by(c)
	if len(found) == 0 {
		return Machine{}, false
	}
	return found[0], true
}

func (m Machine) clone() Machine {
	m.DNSNames, m.IPs, m.EKs = slices.Clone(m.DNSNames), slices.Clone(m.IPs), slices.Clone(m.EKs)
	return m
}
