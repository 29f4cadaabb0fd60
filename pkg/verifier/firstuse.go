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
// records of the key and of the token's machine. It does not check the evidence. Judge applies the
// same rule again.
func (r *Rules) TrustsOnFirstUse(in Input, ek string) (MachineRef, bool) {
	if r == nil || !r.policy.TrustOnFirstUse {
		return MachineRef{}, false
	}
	k, ours := r.kindOf(in.Request)
	if !ours || k.serving || k.unattested {
		return MachineRef{}, false
	}
	in.Records, _ = withoutOrphans(in.Records)
	q, f := r.parseRequest(in.Request, k)
	class, refused := r.checkRequester(q)
	f.add(refused)
	s, refused := r.selectMachine(in, q, class, identity{ek: ek, machine: in.Evidence.Machine})
	f.add(refused)
	if !s.trustedOnFirstUse || len(f.denied) > 0 || len(f.missing) > 0 {
		return MachineRef{}, false
	}
	return s.machine.Ref, true
}

// selectOnFirstUse selects a machine by the provider ID in the request, if the policy allows it and
// the endorsement key selects none. Then only the secrecy of the machine's bootstrap token protects
// the machine. It returns nil if there is no such machine, and the rules that the machine fails. It
// never selects a machine for which a source names a key: that key decides. Nor does it select one
// for the instance of a cloud, whose evidence says which provider ID it has.
func (r *Rules) selectOnFirstUse(in Input, q request, s subject) (*Machine, findings) {
	var f findings
	if !r.policy.TrustOnFirstUse || s.class != First || q.kind.insecure || s.id.ek == "" || q.cert.providerID == "" || s.id.machine != "" || in.Evidence.Instance != nil {
		return nil, f
	}
	var candidates []*Machine
	for i := range in.Machines {
		if m := &in.Machines[i]; m.Ref.Name != "" && m.ProviderID == q.cert.providerID {
			candidates = append(candidates, m)
		}
	}
	if len(candidates) > 1 {
		f.deny(ReasonAmbiguousMachine, "first use: the provider ID is that of %d machines", len(candidates))
	}
	if len(candidates) != 1 || slices.ContainsFunc(candidates[0].EKs, r.trustsSource) {
		return nil, f
	}
	m := candidates[0]
	f.add(checkTokenOf(m, q.object.Spec.Username, in.Token, Required)) // the policy must require it, too
	f.add(r.checkFirstUse(in, s.id.ek, m))
	f.add(checkMachineAge(m, in.Now))
	return m, f
}

// checkFirstUse refuses a machine or an endorsement key that was used before.
func (r *Rules) checkFirstUse(in Input, ek string, m *Machine) (f findings) {
	// The record of an earlier machine of this name will be deleted. It counts until then.
	if slices.ContainsFunc(in.Records, func(record Record) bool { return record.Machine.Name == m.Ref.Name }) {
		f.deny(ReasonIdentityBound, "first use: the machine has a record")
	}
	if slices.ContainsFunc(in.Records, func(record Record) bool { return record.EK == ek }) ||
		slices.ContainsFunc(in.Machines, func(other Machine) bool { return r.NamesEK(&other, ek) }) {
		f.deny(ReasonIdentityBound, "first use: the endorsement key is another machine's")
	}
	// If an attested node registers with this machine's provider ID, the Machine refers to that
	// Node. That must not lock this machine out.
	recordedForAnother := slices.ContainsFunc(in.Records, func(record Record) bool { return record.NodeName == m.NodeRef && record.Machine != m.Ref })
	if m.NodeRef != "" && !recordedForAnother {
		f.deny(ReasonNodeAlreadyRegistered, "first use: the machine has, or had, a Node")
	}
	return f
}

// checkMachineAge refuses a machine that is too old. If the age is not known, the request waits: a
// source may name its key later.
func checkMachineAge(m *Machine, now time.Time) (f findings) {
	switch age := now.Sub(m.Created); {
	case m.Created.IsZero():
		f.wait(ReasonMachineNotFound, "first use: nothing says when the machine was made")
	case age < -maxClockSkew:
		f.wait(ReasonMachineNotFound, "first use: the machine was created in the future: a clock is wrong")
	case age >= maxFirstUseAge:
		f.deny(ReasonTrustExpired, "first use: the machine was made %s ago or earlier", maxFirstUseAge)
	}
	return f
}
