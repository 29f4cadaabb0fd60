// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"slices"
	"time"
)

// Limits of trust on first use.
const (
	// maxFirstUseAge is the maximum age of a machine.
	maxFirstUseAge = 2 * time.Hour
	// maxClockSkew bounds how far in the future the creation of a machine may be, since another
	// clock set its time.
	maxClockSkew = 5 * time.Minute
)

// TrustsOnFirstUse reports whether a request is trusted on first use, and returns the machine. If
// it is, treat the claimed endorsement key as named by a source.
//
// It reads the fields Now, Request, Machines, Token and Records of in. Records must have the
// records of the key and of the token's machine. It does not judge the evidence. Judge applies the
// same rule again.
func (r *Rules) TrustsOnFirstUse(in Input, ek string) (MachineRef, bool) {
	if r == nil || !r.policy.TrustOnFirstUse {
		return MachineRef{}, false
	}
	e := r.newEvaluation(in)
	if e == nil {
		return MachineRef{}, false
	}
	e.judgeRequest() // serving certificates and unattested nodes are never a first use
	e.judgeRequester()
	e.ek = ek
	e.selectMachine()
	if !e.trustedOnFirstUse || len(e.denied) > 0 || len(e.missing) > 0 {
		return MachineRef{}, false
	}
	return e.machine.Ref, true
}

// selectOnFirstUse selects a machine by the provider ID in the request, if the policy allows it and
// the endorsement key selects none. Then only the secrecy of the machine's bootstrap token protects
// the machine. It reports whether there is such a machine, and adds the rules that the machine
// fails. It never selects a machine for which a source names a key: that key decides.
func (e *evaluation) selectOnFirstUse() bool {
	if !e.rules.policy.TrustOnFirstUse || e.class != First || e.insecure || e.ek == "" || e.requested.providerID == "" || e.in.Evidence.Machine != "" {
		return false
	}
	var candidates []*Machine
	for i := range e.in.Machines {
		if m := &e.in.Machines[i]; m.Ref.Name != "" && m.ProviderID == e.requested.providerID {
			candidates = append(candidates, m)
		}
	}
	if len(candidates) > 1 {
		e.deny(ReasonAmbiguousMachine, "first use: the provider ID is that of %d machines", len(candidates))
	}
	if len(candidates) != 1 || slices.ContainsFunc(candidates[0].EKs, e.rules.trustsSource) {
		return false
	}
	e.machine, e.trustedOnFirstUse = candidates[0], true
	e.judgeToken()
	e.judgeFirstUse()
	e.judgeMachineAge()
	return true
}

// judgeFirstUse refuses a machine or an endorsement key that was used before.
func (e *evaluation) judgeFirstUse() {
	// The record of an earlier machine of this name will be deleted. It counts until then.
	if slices.ContainsFunc(e.in.Records, func(r Record) bool { return r.Machine.Name == e.machine.Ref.Name }) {
		e.deny(ReasonIdentityBound, "first use: the machine has a record")
	}
	if slices.ContainsFunc(e.in.Records, func(r Record) bool { return r.EK == e.ek }) ||
		slices.ContainsFunc(e.in.Machines, func(m Machine) bool { return e.rules.NamesEK(&m, e.ek) }) {
		e.deny(ReasonIdentityBound, "first use: the endorsement key is another machine's")
	}
	if node := e.machine.NodeRef; node != "" && !e.isRecordedForAnother(node) {
		e.deny(ReasonNodeAlreadyRegistered, "first use: the machine has, or had, a Node")
	}
}

// isRecordedForAnother reports whether another machine's record has this node name. If an attested
// node registers with this machine's provider ID, the Machine refers to that Node. That must not
// lock this machine out.
func (e *evaluation) isRecordedForAnother(node string) bool {
	return slices.ContainsFunc(e.in.Records, func(r Record) bool { return r.NodeName == node && r.Machine != e.machine.Ref })
}

// judgeMachineAge refuses a machine that is too old. If the age is not known, the request waits: a
// source may name its key later.
func (e *evaluation) judgeMachineAge() {
	switch age := e.in.Now.Sub(e.machine.Created); {
	case e.machine.Created.IsZero():
		e.wait(ReasonMachineNotFound, "first use: nothing says when the machine was made")
	case age < -maxClockSkew:
		e.wait(ReasonMachineNotFound, "first use: the machine was created in the future: a clock is wrong")
	case age >= maxFirstUseAge:
		e.deny(ReasonTrustExpired, "first use: the machine was made %s ago or earlier", maxFirstUseAge)
	}
}
