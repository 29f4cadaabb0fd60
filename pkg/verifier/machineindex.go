// SPDX-License-Identifier: Apache-2.0

package verifier

import "slices"

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
