// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"slices"
	"time"
)

// MachineRef tells machines apart. The zero value is no machine.
type MachineRef struct {
	// Name is the machine's, with whatever makes it unique.
	Name string
	// UID is the object's, empty where machines are no objects. That of a record's owner stays right when objects are moved to another
	// management cluster.
	UID string
}

// Machine is what authorities say of a machine. Nothing in it may come from a node, but for
// NodeRef.
type Machine struct {
	Ref MachineRef
	// EKs are the endorsement keys that authorities name for it. Those count whose source is in the policy.
	EKs []NamedEK
	// Unread are the sources that could not be read: they may name keys that are not in EKs.
	Unread []EKSource
	// ProviderID is its spec.providerID, empty if there is none yet.
	ProviderID string
	// Names are the node names that it may have. The policy says which source decides.
	Names []NodeName
	// Addresses are those that it may serve under, beside its node name.
	Addresses Addresses
	// Ready says that its bootstrap data was made and its infrastructure is provisioned.
	Ready bool
	// Deleted is when its deletion began, zero if it is not being deleted.
	Deleted time.Time
	// Created is when it was made, by its object; zero if nothing says so. Only trust on first use asks.
	Created time.Time
	// NodeRef is the name of the Node that its object refers to, empty if there is none. Any node
	// can have a Machine refer to its Node, so that this is only ever a reason to refuse.
	NodeRef string
}

// NamedEK is an endorsement key and the authority that names it.
type NamedEK struct {
	Source EKSource
	// EK is in the form of Evidence.EK.
	EK string
}

// NodeName is a node name and where it comes from.
type NodeName struct {
	Source NameSource
	Value  string
}

// Presence is whether something exists. The zero value: it is not known yet.
type Presence int

// The presences.
const (
	Absent Presence = iota + 1
	Present
)

// selectMachine applies M1: the endorsement key selects the machine, or evidence that names it; under the insecure signer the token does, and
// on first use the provider ID may.
func (t *trial) selectMachine() {
	var found []*Machine
	for i := range t.in.Machines {
		if m := &t.in.Machines[i]; m.Ref.Name != "" && t.selects(m) {
			found = append(found, m)
		}
	}
	switch {
	case len(found) > 1:
		t.deny(ReasonAmbiguousMachine, "the evidence belongs to %d machines", len(found))
	case len(found) == 1:
		t.machine = found[0]
		if t.insecure && slices.ContainsFunc(t.machine.EKs, t.rules.counts) {
			t.deny(ReasonIdentityBound, "machine: it has an endorsement key, and can show it")
		}
	case t.judgeContestedKey():
	case t.trustFirstUse():
	case t.shown:
		t.wait(ReasonMachineNotFound, "no machine is known that the evidence belongs to")
	}
}

func (t *trial) selects(m *Machine) bool {
	if t.insecure {
		return t.in.Token.Known && t.in.Token.Machine == m.Ref
	}
	if t.shown && t.in.Evidence.Machine != "" {
		return m.Ref.Name == t.in.Evidence.Machine
	}
	if t.ek == "" {
		return false
	}
	r := t.recordOf(m)
	if r != nil && r.EK == t.ek {
		return t.namingOf(r, m) != keyReplaced
	}
	if !t.rules.NamesEK(m, t.ek) {
		return false
	}
	if r == nil || r.EK == "" {
		return true
	}
	switch t.namingOf(r, m) {
	case keyAgrees:
		return true
	case keyReplaced: // the key may still be another machine's
		return t.mayReplace(r, m) && !slices.ContainsFunc(t.in.Records, func(other Record) bool { return other.Machine != m.Ref && t.hasKey(&other) })
	}
	return false // the record decides
}

// judgeMachine applies the rest of M1, and M2 and M3.
func (t *trial) judgeMachine() {
	m := t.machine
	if m == nil {
		return
	}
	if !m.Ready {
		t.wait(ReasonMachineNotReady, "the machine is not provisioned yet, or is paused")
	}
	switch {
	case t.asks.providerID == "" || t.asks.providerID == m.ProviderID:
	case m.ProviderID == "":
		t.wait(ReasonMachineNotReady, "the machine has no provider ID yet")
	default:
		t.deny(ReasonProviderIDMismatch, "the provider ID is not the machine's")
	}
	t.judgeDeletion()
}

// judgeDeletion applies M3. A node that has a certificate gets another for a while.
func (t *trial) judgeDeletion() {
	switch deleted := t.machine.Deleted; {
	case deleted.IsZero():
	case (t.class == Renewal || t.class == Serving) && t.in.Now.Sub(deleted) <= deletingRenewal:
		t.maxLifetime = deletingRenewal
	default:
		t.deny(ReasonMachineDeleting, "the machine is being deleted")
	}
}

// judgeName applies M4.
func (t *trial) judgeName() {
	name := t.asks.nodeName
	if name == "" {
		return
	}
	if t.machine == nil {
		t.judgeOwner(name)
		return
	}
	for _, r := range t.in.Records {
		if r.NodeName == name && r.Machine != t.machine.Ref {
			t.deny(ReasonAmbiguousName, "the node name is in another machine's record")
		}
	}
	if t.record != nil && t.record.NodeName != name {
		t.deny(ReasonNodeNameMismatch, "the node name is not the one in the machine's record")
	}
	if t.record != nil && t.class != First {
		return
	}
	switch names := t.names(t.machine); {
	case len(names) == 0:
		t.wait(ReasonNodeNameUnknown, "nothing says yet which node name the machine has")
	case len(names) > 1:
		t.deny(ReasonAmbiguousName, "the machine has %d node names", len(names))
	case names[0] != name:
		t.deny(ReasonNodeNameMismatch, "the node name is not the machine's")
	}
	for i := range t.in.Machines {
		if m := &t.in.Machines[i]; m.Ref != t.machine.Ref && t.claims(m, name) {
			t.deny(ReasonAmbiguousName, "the node name is claimed by another machine")
		}
	}
}

// judgeOwner refuses evidence that belongs to no machine known, if the name is that of one whose endorsement keys are known: waiting
// would not make it this one.
func (t *trial) judgeOwner(name string) {
	if t.ek == "" {
		return
	}
	for i := range t.in.Machines {
		m := &t.in.Machines[i]
		if slices.ContainsFunc(m.EKs, t.rules.counts) && !t.selects(m) && t.claims(m, name) {
			t.deny(ReasonNodeNameMismatch, "the machine of that node name has another endorsement key")
		}
	}
}

// names returns the node names that the machine has by the policy.
func (t *trial) names(m *Machine) []string { return m.NodeNames(t.rules.policy.NameSources) }

// claims reports whether a name is one of those. There may be very many machines: of most this is plain at a glance.
func (t *trial) claims(m *Machine, name string) bool {
	return slices.ContainsFunc(m.Names, func(n NodeName) bool { return n.Value == name }) && slices.Contains(t.names(m), name)
}

// NodeNames returns what the first of the sources says that has any name for the machine, each once.
func (m Machine) NodeNames(sources []NameSource) []string {
	for _, source := range sources {
		var names []string
		for _, n := range m.Names {
			if n.Source == source && n.Value != "" && !slices.Contains(names, n.Value) {
				names = append(names, n.Value)
			}
		}
		if len(names) > 0 {
			return names
		}
	}
	return nil
}

// judgeNodeObject applies M5. Only that a Node exists is taken from it: a node writes the rest.
func (t *trial) judgeNodeObject() {
	if t.class != First {
		return
	}
	switch t.in.Node {
	case Absent:
	case Present:
		t.deny(ReasonNodeAlreadyRegistered, "a Node of that name exists, and no record ties it to this machine. If it is this machine: kubectl delete node %s", t.asks.nodeName)
	default:
		t.wait(ReasonNodeAlreadyRegistered, "it is not known yet whether a Node of that name exists")
	}
}
