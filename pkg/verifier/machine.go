// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"slices"
	"time"
)

// MachineRef identifies a machine. The zero value means no machine.
type MachineRef struct {
	// Name is the machine's unique name. It includes a namespace, if machines have one.
	Name string
	// UID is the UID of the machine's object, "" if machines are not objects. The UID of a record's
	// owner is updated when objects move to another management cluster.
	UID string
}

// Machine has the statements of authorities about a machine. Nothing in it may come from a node,
// except NodeRef.
type Machine struct {
	Ref MachineRef
	// EKs are the endorsement keys that sources name for it. The rules ignore sources that are not
	// in the policy.
	EKs []NamedEK
	// UnavailableSources could not be read: they may name keys that are not in EKs.
	UnavailableSources []EKSource
	// Disputed says that a source contradicts itself about the machine, such as an inventory whose
	// parts differ. Then nobody is admitted as this machine, and no key is replaced. The holder of
	// the key in its record can still renew.
	Disputed bool
	// ProviderID is its spec.providerID, empty if there is none yet.
	ProviderID string
	// Names are its possible node names, by source. The policy says which source decides.
	Names []NodeName
	// Addresses are the addresses that it may have in a serving certificate, beside its node name.
	Addresses Addresses
	// Ready says that its bootstrap data exists and its infrastructure is provisioned.
	Ready bool
	// Deleted is the time when its deletion began, zero if it is not being deleted.
	Deleted time.Time
	// Created is the creation time of its object, zero if it is not known. Only trust on first use
	// needs it.
	Created time.Time
	// NodeRef is the name of the Node that its object refers to, empty if there is none. Any node
	// can make a Machine refer to its Node. So NodeRef must only be a reason to refuse, never a
	// reason to accept.
	NodeRef string
}

// NamedEK is an endorsement key and the source that names it.
type NamedEK struct {
	Source EKSource
	// EK is in the form of Evidence.EK.
	EK string
}

// NodeName is a node name and its source.
type NodeName struct {
	Source NameSource
	Value  string
}

// Presence says whether something exists. The zero value: not known yet.
type Presence int

// The presences.
const (
	Absent Presence = iota + 1
	Present
)

// selectMachine applies M1. The endorsement key selects the machine, or evidence that names a
// machine. With the insecure signer the token selects it. On first use the provider ID may select
// it. If a record has the key, no source can assign the key to another machine.
func (e *evaluation) selectMachine() {
	var selected, recorded []*Machine
	for i := range e.in.Machines {
		m := &e.in.Machines[i]
		if m.Ref.Name == "" || !e.selects(m) {
			continue
		}
		selected = append(selected, m)
		if r := e.recordOf(m); r != nil && e.ek != "" && r.EK == e.ek {
			recorded = append(recorded, m)
		}
	}
	e.claimedTwice = len(selected) > 1
	if len(recorded) == 1 {
		selected = recorded
	}
	switch {
	case len(selected) > 1:
		e.wait(ReasonAmbiguousMachine, "the evidence belongs to %d machines", len(selected))
	case len(selected) == 1:
		e.machine = selected[0]
		if e.insecure && slices.ContainsFunc(e.machine.EKs, e.rules.trustsSource) {
			e.deny(ReasonIdentityBound, "machine: it has an endorsement key, and can show it")
		}
	case e.judgeContestedEK():
	case e.selectOnFirstUse():
	case e.evidenceAccepted:
		e.wait(ReasonMachineNotFound, "no machine is known that the evidence belongs to")
	}
}

func (e *evaluation) selects(m *Machine) bool {
	if e.insecure {
		return e.in.Token.Known && e.in.Token.Machine == m.Ref
	}
	if e.evidenceAccepted && e.in.Evidence.Machine != "" {
		return m.Ref.Name == e.in.Evidence.Machine
	}
	if e.ek == "" {
		return false
	}
	r := e.recordOf(m)
	if r != nil && r.EK == e.ek {
		return e.ekStateOf(r, m) != ekStateReplaced
	}
	if !e.rules.NamesEK(m, e.ek) {
		return false
	}
	if r == nil || r.EK == "" {
		return true
	}
	switch e.ekStateOf(r, m) {
	case ekStateNotContradicted:
		return true
	case ekStateReplaced: // the key may still belong to another machine
		return e.isAcceptedReplacement(r, m) && !slices.ContainsFunc(e.in.Records, func(other Record) bool { return other.Machine != m.Ref && e.pinsEK(&other) })
	}
	return false // the record decides
}

// judgeMachine applies the rest of M1, and M2 and M3.
func (e *evaluation) judgeMachine() {
	m := e.machine
	if m == nil {
		return
	}
	if !m.Ready {
		e.wait(ReasonMachineNotReady, "the machine is not provisioned yet, or is paused")
	}
	e.judgeDispute()
	providerID := m.ProviderID
	if m.Disputed && e.record != nil {
		providerID = e.record.ProviderID
	}
	switch {
	case e.requested.providerID == "" || e.requested.providerID == providerID:
	case providerID == "":
		e.wait(ReasonMachineNotReady, "the machine has no provider ID yet")
	case slices.ContainsFunc(e.in.Machines, func(other Machine) bool { return other.Ref != m.Ref && other.ProviderID == e.requested.providerID }):
		e.deny(ReasonProviderIDMismatch, "the provider ID belongs to another machine; the firmware of both may have the same UUID")
	default:
		e.deny(ReasonProviderIDMismatch, "the provider ID is not the machine's")
	}
	e.judgeDeletion()
}

// judgeDispute applies M1 to a disputed machine, and to a machine whose key is also claimed by
// another machine. Only an attested machine with the key in its record passes.
func (e *evaluation) judgeDispute() {
	attested := e.class != First && e.record != nil && e.record.EK == e.ek
	switch {
	case !e.claimedTwice && !e.machine.Disputed:
	case attested:
		e.warn(ReasonAmbiguousMachine, "the sources contradict each other about the machine or its endorsement key; its record decides")
	default:
		e.wait(ReasonAmbiguousMachine, "the sources contradict each other about the machine or its endorsement key")
	}
}

// judgeDeletion applies M3. A node with a certificate may renew for deletingRenewal.
func (e *evaluation) judgeDeletion() {
	switch deleted := e.machine.Deleted; {
	case deleted.IsZero():
	case (e.class == Renewal || e.class == Serving) && e.in.Now.Sub(deleted) <= deletingRenewal:
		e.maxLifetime = deletingRenewal
	default:
		e.deny(ReasonMachineDeleting, "the machine is being deleted")
	}
}

// judgeName applies M4.
func (e *evaluation) judgeName() {
	name := e.requested.nodeName
	if name == "" {
		return
	}
	if e.machine == nil {
		e.judgeNameOwner(name)
		return
	}
	for _, r := range e.in.Records {
		if r.NodeName == name && r.Machine != e.machine.Ref {
			e.deny(ReasonAmbiguousName, "the node name is in another machine's record")
		}
	}
	if e.record != nil && e.record.NodeName != name {
		e.deny(ReasonNodeNameMismatch, "the node name is not the one in the machine's record")
	}
	if e.record != nil && e.class != First {
		return
	}
	switch names := e.nodeNames(e.machine); {
	case len(names) == 0:
		e.wait(ReasonNodeNameUnknown, "nothing says yet which node name the machine has")
	case len(names) > 1:
		e.deny(ReasonAmbiguousName, "the machine has %d node names", len(names))
	case names[0] != name:
		e.deny(ReasonNodeNameMismatch, "the node name is not the machine's")
	}
	for i := range e.in.Machines {
		if m := &e.in.Machines[i]; m.Ref != e.machine.Ref && e.hasNodeName(m, name) {
			e.deny(ReasonAmbiguousName, "the node name is claimed by another machine")
		}
	}
}

// judgeNameOwner applies if no machine was selected. It denies if a machine with other endorsement
// keys has the node name, since waiting would not help. If that machine is disputed, it waits.
func (e *evaluation) judgeNameOwner(name string) {
	if e.ek == "" {
		return
	}
	for i := range e.in.Machines {
		m := &e.in.Machines[i]
		if !slices.ContainsFunc(m.EKs, e.rules.trustsSource) || e.selects(m) || !e.hasNodeName(m, name) {
			continue
		}
		if m.Disputed {
			e.wait(ReasonAmbiguousMachine, "the sources contradict each other about the machine of that node name")
		} else {
			e.deny(ReasonNodeNameMismatch, "the machine of that node name has another endorsement key")
		}
	}
}

// nodeNames returns the node names that the machine has by the policy.
func (e *evaluation) nodeNames(m *Machine) []string { return m.NodeNames(e.rules.policy.NameSources) }

// hasNodeName reports whether the machine has this node name. There may be very many machines, so a
// cheap check comes first.
func (e *evaluation) hasNodeName(m *Machine, name string) bool {
	return slices.ContainsFunc(m.Names, func(n NodeName) bool { return n.Value == name }) && slices.Contains(e.nodeNames(m), name)
}

// NodeNames returns the names from the first source that has any for the machine, each once.
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

// judgeNodeObject applies M5 to proofs. Hellos need no check, since a challenge grants nothing. The
// rules only use that a Node exists: a node writes the rest of it.
func (e *evaluation) judgeNodeObject() {
	if e.class != First || e.hello {
		return
	}
	switch e.in.Node {
	case Absent:
	case Present:
		e.deny(ReasonNodeAlreadyRegistered, "a Node of that name exists, and no record ties it to this machine. If it is this machine: kubectl delete node %s", e.requested.nodeName)
	default:
		e.wait(ReasonNodeAlreadyRegistered, "it is not known yet whether a Node of that name exists")
	}
}

// HasEK reports whether a source names this endorsement key for the machine.
func (m *Machine) HasEK(ek string) bool {
	return ek != "" && slices.ContainsFunc(m.EKs, func(n NamedEK) bool { return n.EK == ek })
}
