// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

func machineNamed(name string, eks ...string) verifier.Machine {
	m := verifier.Machine{Ref: verifier.MachineRef{Name: name}, Names: []verifier.NodeName{{Source: verifier.NameInventory, Value: name}}}
	for _, ek := range eks {
		m.EKs = append(m.EKs, verifier.NamedEK{Source: verifier.EKInventory, EK: ek})
	}
	return m
}

func TestListMachines(t *testing.T) {
	nameless := machineNamed("")
	list := listMachines([]verifier.Machine{machineNamed("a", "ek-a", "ek-b"), machineNamed("b"), machineNamed("c", ""), nameless})
	for claim, want := range map[fairqueue.Claim]bool{
		{EK: "ek-a"}:                    true,
		{EK: "ek-b", Node: "elsewhere"}: true,
		{Node: "b"}:                     true,
		{Node: "a"}:                     false, // its EK is named
		{Node: "c"}:                     false, // an EK is named, though it is empty
		{EK: "ek-c"}:                    false,
		{}:                              false,
	} {
		if got := list.Has(claim); got != want {
			t.Errorf("%+v: %t", claim, got)
		}
	}
	var none *ListedMachines
	if none.Has(fairqueue.Claim{Node: "b"}) || list.equal(none) || !list.equal(list) || list.equal(listMachines(nil)) {
		t.Error("before the machines are known none is listed")
	}
}
