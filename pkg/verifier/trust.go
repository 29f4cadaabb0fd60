// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"slices"
	"time"
)

// Limits of trust on first use.
const (
	// trustAge is how old a machine may be at most.
	trustAge = 2 * time.Hour
	// trustSkew is how far ahead of the clock a machine may have been made: its object was stamped by another one.
	trustSkew = 5 * time.Minute
)

// Proposes reports whether a request is trusted on first use, and with which machine: the endorsement key that it claims then counts as one
// that an authority names. Of in, it takes Now, Request, Machines, Token and Records; these have to hold the records of that
// key and of the token's machine. The evidence is judged later, and Judge decides by the same rule again.
func (r *Rules) Proposes(in Input, ek string) (MachineRef, bool) {
	if r == nil || !r.policy.TrustOnFirstUse {
		return MachineRef{}, false
	}
	t := r.open(in)
	if t == nil {
		return MachineRef{}, false
	}
	t.judgeRequest() // one for a serving certificate, or of a node that is left alone, is none here
	t.judgeRequester()
	t.ek = ek
	t.selectMachine()
	if !t.proposed || len(t.denied) > 0 || len(t.missing) > 0 {
		return MachineRef{}, false
	}
	return t.machine.Ref, true
}

// trustFirstUse has the provider ID propose a machine for an endorsement key that selects none, where the policy allows it: all that stands
// for the machine is that its bootstrap token is a secret. It reports whether there is such a machine, and says what speaks against it. A
// machine for which a source names a key is not proposed: that key decides.
func (t *trial) trustFirstUse() bool {
	if !t.rules.policy.TrustOnFirstUse || t.class != First || t.insecure || t.ek == "" || t.asks.providerID == "" || t.in.Evidence.Machine != "" {
		return false
	}
	var found []*Machine
	for i := range t.in.Machines {
		if m := &t.in.Machines[i]; m.Ref.Name != "" && m.ProviderID == t.asks.providerID {
			found = append(found, m)
		}
	}
	if len(found) > 1 {
		t.deny(ReasonAmbiguousMachine, "first use: the provider ID is that of %d machines", len(found))
	}
	if len(found) != 1 || slices.ContainsFunc(found[0].EKs, t.rules.counts) {
		return false
	}
	t.machine, t.proposed = found[0], true
	t.judgeToken()
	t.judgeUnused()
	t.judgeAge()
	return true
}

// judgeUnused refuses a machine, or an endorsement key, that is not used for the first time.
func (t *trial) judgeUnused() {
	// A record of the machine that had this name before is about to go, and counts as long as it is there.
	if slices.ContainsFunc(t.in.Records, func(r Record) bool { return r.Machine.Name == t.machine.Ref.Name }) {
		t.deny(ReasonIdentityBound, "first use: the machine has a record")
	}
	if slices.ContainsFunc(t.in.Records, func(r Record) bool { return r.EK == t.ek }) ||
		slices.ContainsFunc(t.in.Machines, func(m Machine) bool { return t.rules.NamesEK(&m, t.ek) }) {
		t.deny(ReasonIdentityBound, "first use: the endorsement key is another machine's")
	}
	if node := t.machine.NodeRef; node != "" && !t.isAnothers(node) {
		t.deny(ReasonNodeAlreadyRegistered, "first use: the machine has, or had, a Node")
	}
}

// isAnothers reports whether another machine's record has this node name. If an attested node
// registers with this machine's provider ID, the Machine refers to that Node. That must not keep
// this machine out.
func (t *trial) isAnothers(node string) bool {
	return slices.ContainsFunc(t.in.Records, func(r Record) bool { return r.NodeName == node && r.Machine != t.machine.Ref })
}

// judgeAge refuses a machine that is too old. One whose age is not known waits: a source may yet name its key.
func (t *trial) judgeAge() {
	switch age := t.in.Now.Sub(t.machine.Created); {
	case t.machine.Created.IsZero():
		t.wait(ReasonMachineNotFound, "first use: nothing says when the machine was made")
	case age < -trustSkew:
		t.wait(ReasonMachineNotFound, "first use: the machine is yet to be made: a clock is wrong")
	case age >= trustAge:
		t.deny(ReasonTrustExpired, "first use: the machine was made %s ago or earlier", trustAge)
	}
}
