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

// MachineIndex finds the machines that a decision depends on, without going through all of them.
// Make one for each set of machines.
type MachineIndex struct {
	machines                           []Machine
	byName, byEK, byNode, byProviderID map[string][]int
}

// NewMachineIndex returns an index of machines. Nobody may change the slice afterwards.
func NewMachineIndex(machines []Machine) *MachineIndex {
	x := &MachineIndex{
		machines: machines,
		byName:   map[string][]int{}, byEK: map[string][]int{}, byNode: map[string][]int{}, byProviderID: map[string][]int{},
	}
	for i := range machines {
		m := &machines[i]
		x.byName[m.Ref.Name] = append(x.byName[m.Ref.Name], i)
		for _, ek := range m.EKs {
			x.byEK[ek.EK] = append(x.byEK[ek.EK], i)
		}
		for _, name := range m.Names {
			x.byNode[name.Value] = append(x.byNode[name.Value], i)
		}
		if m.ProviderID != "" {
			x.byProviderID[m.ProviderID] = append(x.byProviderID[m.ProviderID], i)
		}
	}
	return x
}

// Relevant returns the machines that Input.Machines must have for a request with this claim. It
// selects them by ek, the claimed endorsement key or "", and by the fields of in that are already
// set. It keeps the order of the whole set.
func (x *MachineIndex) Relevant(claim Claim, ek string, in Input) []Machine {
	if claim.Serving { // all machines: another one may have the same addresses
		return x.machines
	}
	var found []int
	for _, ek := range []string{ek, in.Evidence.EK} {
		found = append(found, x.byEK[ek]...)
	}
	found = append(found, x.byNode[claim.NodeName]...)
	found = append(found, x.byProviderID[claim.ProviderID]...)
	for _, name := range []string{in.Evidence.Machine, in.Token.Machine.Name} {
		found = append(found, x.byName[name]...)
	}
	for i := range in.Records {
		found = append(found, x.byName[in.Records[i].Machine.Name]...)
	}
	slices.Sort(found)
	found = slices.Compact(found)
	machines := make([]Machine, len(found))
	for i, at := range found {
		machines[i] = x.machines[at]
	}
	return machines
}

// checkMachine applies the rest of M1, and M2 and M3.
func checkMachine(in Input, q request, s subject) (f findings) {
	if s.machine == nil {
		return f
	}
	f.add(checkReady(s.machine))
	f.add(checkDispute(s))
	f.add(checkProviderID(q.cert.providerID, s, in.Machines))
	f.add(checkDeletion(s.machine, s.class, in.Now))
	return f
}

// checkReady applies M2.
func checkReady(m *Machine) (f findings) {
	if !m.Ready {
		f.wait(ReasonMachineNotReady, "the machine is not provisioned yet, or is paused")
	}
	return f
}

// checkDispute applies M1 to a disputed machine, and to a machine whose key is also claimed by
// another machine. Only an attested machine with the key in its record passes.
func checkDispute(s subject) (f findings) {
	attested := s.class != First && s.record != nil && s.record.EK == s.id.ek
	switch {
	case !s.claimedTwice && !s.machine.Disputed:
	case attested:
		f.warn(ReasonAmbiguousMachine, "the sources contradict each other about the machine or its endorsement key; its record decides")
	default:
		f.wait(ReasonAmbiguousMachine, "the sources contradict each other about the machine or its endorsement key")
	}
	return f
}

// checkProviderID applies M1 and M2 to the provider ID in the request.
func checkProviderID(requested string, s subject, machines []Machine) (f findings) {
	own := s.machine.ProviderID
	if s.machine.Disputed && s.record != nil {
		own = s.record.ProviderID
	}
	switch {
	case requested == "" || requested == own:
	case own == "":
		f.wait(ReasonMachineNotReady, "the machine has no provider ID yet")
	case slices.ContainsFunc(machines, func(other Machine) bool { return other.Ref != s.machine.Ref && other.ProviderID == requested }):
		f.deny(ReasonProviderIDMismatch, "the provider ID belongs to another machine; the firmware of both may have the same UUID")
	default:
		f.deny(ReasonProviderIDMismatch, "the provider ID is not the machine's")
	}
	return f
}

// checkDeletion applies M3. A node with a certificate may renew for deletingRenewal.
func checkDeletion(m *Machine, class Class, now time.Time) (f findings) {
	renews := (class == Renewal || class == Serving) && now.Sub(m.Deleted) <= deletingRenewal
	if !m.Deleted.IsZero() && !renews {
		f.deny(ReasonMachineDeleting, "the machine is being deleted")
	}
	return f
}

// maxLifetime returns the bound on the lifetime of a certificate that M3 allows, zero if there is
// none.
func maxLifetime(m *Machine) time.Duration {
	if m == nil || m.Deleted.IsZero() {
		return 0
	}
	return deletingRenewal
}

// checkName applies M4.
func (r *Rules) checkName(in Input, q request, s subject) (f findings) {
	name := q.cert.nodeName
	if name == "" {
		return f
	}
	if s.machine == nil {
		return r.checkNameOwner(in, q, s)
	}
	for _, record := range in.Records {
		if record.NodeName == name && record.Machine != s.machine.Ref {
			f.deny(ReasonAmbiguousName, "the node name is in another machine's record")
		}
	}
	if s.record != nil && s.record.NodeName != name {
		f.deny(ReasonNodeNameMismatch, "the node name is not the one in the machine's record")
	}
	if s.record != nil && s.class != First {
		return f
	}
	switch names := r.nodeNames(s.machine); {
	case len(names) == 0:
		f.wait(ReasonNodeNameUnknown, "nothing says yet which node name the machine has")
	case len(names) > 1:
		f.deny(ReasonAmbiguousName, "the machine has %d node names", len(names))
	case names[0] != name:
		f.deny(ReasonNodeNameMismatch, "the node name is not the machine's")
	}
	for i := range in.Machines {
		if m := &in.Machines[i]; m.Ref != s.machine.Ref && r.hasNodeName(m, name) {
			f.deny(ReasonAmbiguousName, "the node name is claimed by another machine")
		}
	}
	return f
}

// checkNameOwner applies M4 if no machine was selected. It denies if a machine with other
// endorsement keys has the node name, since waiting would not help. If that machine is disputed, it
// waits.
func (r *Rules) checkNameOwner(in Input, q request, s subject) (f findings) {
	if s.id.ek == "" {
		return f
	}
	for i := range in.Machines {
		m := &in.Machines[i]
		if !slices.ContainsFunc(m.EKs, r.trustsSource) || r.selects(in, q, s.id, m) || !r.hasNodeName(m, q.cert.nodeName) {
			continue
		}
		if m.Disputed {
			f.wait(ReasonAmbiguousMachine, "the sources contradict each other about the machine of that node name")
		} else {
			f.deny(ReasonNodeNameMismatch, "the machine of that node name has another endorsement key")
		}
	}
	return f
}

// nodeNames returns the node names that the machine has by the policy.
func (r *Rules) nodeNames(m *Machine) []string { return m.NodeNames(r.policy.NameSources) }

// hasNodeName reports whether the machine has this node name. There may be very many machines, so a
// cheap check comes first.
func (r *Rules) hasNodeName(m *Machine, name string) bool {
	return slices.ContainsFunc(m.Names, func(n NodeName) bool { return n.Value == name }) && slices.Contains(r.nodeNames(m), name)
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

// checkNodeObject applies M5 to proofs. Hellos need no check, since a challenge grants nothing. The
// rules only use that a Node exists: a node writes the rest of it.
func checkNodeObject(node Presence, q request, class Class) (f findings) {
	if class != First || q.kind.hello {
		return f
	}
	switch node {
	case Absent:
	case Present:
		f.deny(ReasonNodeAlreadyRegistered, "a Node of that name exists, and no record ties it to this machine. If it is this machine: kubectl delete node %s", q.cert.nodeName)
	default:
		f.wait(ReasonNodeAlreadyRegistered, "it is not known yet whether a Node of that name exists")
	}
	return f
}

// HasEK reports whether a source names this endorsement key for the machine.
func (m *Machine) HasEK(ek string) bool {
	return ek != "" && slices.ContainsFunc(m.EKs, func(n NamedEK) bool { return n.EK == ek })
}
