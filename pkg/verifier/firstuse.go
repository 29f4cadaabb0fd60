// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"slices"
	"time"
)

// Limits of trust on first use.
const (
	// maxFirstUseAge is how old a machine may be at most.
	maxFirstUseAge = 2 * time.Hour
	// maxClockSkew is how far in the future a machine may have been made. Another clock stamped its
	// object.
	maxClockSkew = 5 * time.Minute
)

// TrustsOnFirstUse reports whether a request is trusted on first use, and returns the machine. The
// endorsement key that the request claims then counts as named by a source.
//
// Of in, it takes Now, Request, Machines, Token and Records. Records must have those of the key and
// of the token's machine. The evidence is judged later, and Judge applies the same rule again.
func (r *Rules) TrustsOnFirstUse(in Input, ek string) (MachineRef, bool) {
	if r == nil || !r.policy.TrustOnFirstUse {
		return MachineRef{}, false
	}
	e := r.newEvaluation(in)
	if e == nil {
		return MachineRef{}, false
	}
	e.judgeRequest() // one for a serving certificate, or of a node that is left alone, is none here
	e.judgeRequester()
	e.ek = ek
	e.selectMachine()
	if !e.trustedOnFirstUse || len(e.denied) > 0 || len(e.missing) > 0 {
		return MachineRef{}, false
	}
	return e.machine.Ref, true
}

// selectOnFirstUse selects a machine by the provider ID in the request, for an endorsement key that
// selects none, if the policy allows it. Only the secrecy of the machine's bootstrap token vouches
// for the machine then. It reports whether there is such a machine, and adds what speaks against
// it. It never selects a machine for which a source names a key: that key decides.
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

// judgeFirstUse refuses a machine, or an endorsement key, that is not used for the first time.
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
// keep this machine out.
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
		e.wait(ReasonMachineNotFound, "first use: the machine is yet to be made: a clock is wrong")
	case age >= maxFirstUseAge:
		e.deny(ReasonTrustExpired, "first use: the machine was made %s ago or earlier", maxFirstUseAge)
	}
}
