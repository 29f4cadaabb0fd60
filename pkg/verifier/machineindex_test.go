// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"slices"
	"strings"
	"testing"
)

// A machine that decides about a request is relevant although nothing else refers to it.
// world.judge compares the decision with the one by all machines.
func TestRelevantMachines(t *testing.T) {
	for name, c := range map[string]struct {
		world *world
		bend  func(w *world, other *Machine)
		want  []Reason
	}{
		"it has the node name":      {good(First), func(_ *world, m *Machine) { m.Names = []NodeName{{NameInventory, nodeName}} }, []Reason{ReasonAmbiguousName}},
		"it has the EK":             {good(First), func(_ *world, m *Machine) { m.EKs = []NamedEK{{EKInventory, ek1}} }, []Reason{ReasonAmbiguousMachine}},
		"it has the provider ID":    {trusting(good(First)), func(_ *world, m *Machine) { m.ProviderID = providerID }, []Reason{ReasonAmbiguousMachine}},
		"the token was made for it": {good(First), func(w *world, m *Machine) { w.in.Token.Machine = m.Ref }, []Reason{ReasonTokenNotForMachine}},
		"the evidence names it":     {goodCloud(First), func(w *world, m *Machine) { w.in.Evidence.Machine = m.Ref.Name }, []Reason{ReasonProviderIDMismatch}},
		"a record is of it": {good(First), func(w *world, m *Machine) {
			w.in.Records = append(w.in.Records, Record{Cluster: w.policy.Cluster, Machine: m.Ref, EK: ek1, EKSource: EKInventory, NodeName: "other"})
		}, nil},
		"it has nothing in common": {good(First), func(*world, *Machine) {}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			other := machine("other")
			other.Names, other.EKs, other.ProviderID = nil, nil, "other://1"
			c.bend(c.world, &other)
			c.world.in.Machines = append(c.world.in.Machines, other)
			d := c.world.judge(t)
			for _, reason := range c.want {
				if !slices.Contains(d.Refusals.Reasons(), reason) {
					t.Errorf("%s, %v, without %s", d.Outcome, d.Refusals, reason)
				}
			}
		})
	}
	w := good(First)
	claim, _ := must(New(w.policy)).ParseClaim(w.in.Request)
	if got := NewMachineIndex(append(w.in.Machines, machine("x"), machine("y"))).Relevant(claim, "", w.in); len(got) > 2 {
		t.Errorf("%d machines are relevant", len(got))
	}
}

// A denied provider ID that another machine has is said to be that one's, so that a UUID which
// several machines share is found. The node reads the same text.
func TestProviderIDOfAnotherMachineIsNamed(t *testing.T) {
	for shared, says := range map[bool]string{true: "belongs to another machine", false: "not the machine's"} {
		w := good(First)
		w.named(nodeName, "acme://zone/shared")
		if other := machine("other"); shared {
			other.ProviderID = "acme://zone/shared"
			w.in.Machines = append(w.in.Machines, other)
		}
		if d := w.judge(t); d.Outcome != Deny || d.Refusals.Reason() != ReasonProviderIDMismatch || !strings.Contains(d.Refusals.Error(), says) {
			t.Errorf("shared %t: %s, %v", shared, d.Outcome, d.Refusals)
		}
	}
}
