// SPDX-License-Identifier: Apache-2.0

package verifier

import "slices"

// subject is the machine that a request comes from, as far as it is known.
type subject struct {
	class Class
	// id is the part of the evidence that selected the machine.
	id identity
	// machine and record are nil if there is none.
	machine *Machine
	record  *Record
	// claimedTwice says that the evidence belongs to more than one machine. If a record has the
	// key, machine is the record's machine nevertheless.
	claimedTwice bool
	// trustedOnFirstUse says that machine was selected on first use. It is valid only if nothing is
	// refused. I3 was then applied already.
	trustedOnFirstUse bool
	// ekChangePending says that id.ek will replace the key in record once the controller accepts
	// that.
	ekChangePending bool
}

// findSubject applies M1: it finds the machine, and then its record. class is that of the
// requester. It becomes Again for a bootstrap identity whose machine has a record. A record that
// this request created does not count until it has a certificate.
func (r *Rules) findSubject(in Input, q request, class Class, id identity) (subject, findings) {
	s, f := r.selectMachine(in, q, class, id)
	s.record = findRecord(in.Records, q.cert.nodeName, s)
	if s.class == First && s.record != nil && !s.record.isFirstProof(q.object) {
		s.class = Again
	}
	return s, f
}

// selectMachine finds the machine. The endorsement key selects it, or evidence that names a
// machine. With the insecure signer the token selects it. On first use the provider ID may select
// it. If a record has the key, no source can assign the key to another machine.
func (r *Rules) selectMachine(in Input, q request, class Class, id identity) (subject, findings) {
	s := subject{class: class, id: id}
	var f findings
	var selected, recorded []*Machine
	for i := range in.Machines {
		m := &in.Machines[i]
		if m.Ref.Name == "" || !r.selects(in, q, id, m) {
			continue
		}
		selected = append(selected, m)
		if record := recordOfMachine(in.Records, m); record != nil && id.ek != "" && record.EK == id.ek {
			recorded = append(recorded, m)
		}
	}
	s.claimedTwice = len(selected) > 1
	if len(recorded) == 1 {
		selected = recorded
	}
	switch {
	case len(selected) > 1:
		f.wait(ReasonAmbiguousMachine, "the evidence belongs to %d machines", len(selected))
		return s, f
	case len(selected) == 1:
		s.machine = selected[0]
		if q.kind.insecure && slices.ContainsFunc(s.machine.EKs, r.trustsSource) {
			f.deny(ReasonIdentityBound, "machine: it has an endorsement key, and can show it")
		}
		if id.machine != "" && id.ek != "" && !r.isRecorded(in.Records, s.machine, id.ek) {
			f.add(r.checkNaming(s.machine, id.ek))
		}
		return s, f
	}
	if m, pending, refused := r.findContested(in, id.ek); m != nil {
		s.machine, s.ekChangePending = m, pending
		return s, refused
	}
	m, f := r.selectOnFirstUse(in, q, s)
	if m == nil && id.accepted {
		f.wait(ReasonMachineNotFound, "no machine is known that the evidence belongs to")
	}
	s.machine, s.trustedOnFirstUse = m, m != nil
	return s, f
}

// selects reports whether the evidence, or with the insecure signer the token, selects a machine.
func (r *Rules) selects(in Input, q request, id identity, m *Machine) bool {
	if q.kind.insecure {
		return in.Token.Known && in.Token.Machine == m.Ref
	}
	if id.accepted && id.machine != "" {
		return m.Ref.Name == id.machine
	}
	if id.ek == "" {
		return false
	}
	record := recordOfMachine(in.Records, m)
	if record != nil && record.EK == id.ek {
		return r.ekStateOf(record, m) != ekStateReplaced
	}
	if !r.NamesEK(m, id.ek) {
		return false
	}
	if record == nil || record.EK == "" {
		return true
	}
	switch r.ekStateOf(record, m) {
	case ekStateNotContradicted:
		return true
	case ekStateReplaced: // the key may still belong to another machine
		return r.isAcceptedReplacement(record, m, id.ek) && !slices.ContainsFunc(in.Records, func(other Record) bool {
			return other.Machine != m.Ref && r.pinsEK(&other, id.ek, in.Machines)
		})
	}
	return false // the record decides
}

// checkNaming applies M1 to an instance that its provider ID selected: sources may name something
// stronger for the machine. While a source is unavailable, it may.
func (r *Rules) checkNaming(m *Machine, ek string) (f findings) {
	ofPolicy := func(s EKSource) bool { return slices.Contains(r.policy.EKSources, s) }
	switch {
	case r.NamesEK(m, ek):
	case slices.ContainsFunc(m.EKs, r.trustsSource):
		f.deny(ReasonIdentityBound, "machine: a source names another endorsement key or instance for it")
	case slices.ContainsFunc(m.UnavailableSources, ofPolicy):
		f.wait(ReasonMachineNotFound, "machine: a source that may name its endorsement key is unavailable")
	}
	return f
}

// isRecorded reports whether the machine's record has this key, and no other was accepted in its
// place.
func (r *Rules) isRecorded(records []Record, m *Machine, ek string) bool {
	record := recordOfMachine(records, m)
	return record != nil && record.EK == ek && r.ekStateOf(record, m) != ekStateReplaced
}

// findContested finds a machine whose record and sources disagree on a key. It denies a replaced
// key, and waits with its replacement. pending says that the key is to replace the record's.
func (r *Rules) findContested(in Input, ek string) (found *Machine, pending bool, f findings) {
	if ek == "" {
		return nil, false, f
	}
	named := slices.ContainsFunc(in.Machines, func(m Machine) bool { return r.NamesEK(&m, ek) })
	for i := range in.Machines {
		m := &in.Machines[i]
		record := recordOfMachine(in.Records, m)
		if record == nil || m.Ref.Name == "" {
			continue
		}
		state, names := r.ekStateOf(record, m), r.NamesEK(m, ek)
		switch {
		case !named && (slices.Contains(record.FormerEKs, ek) || state == ekStateReplaced && record.EK == ek):
			f.deny(ReasonEKReplaced, "record: a source names another endorsement key than this one for the machine now")
			return m, false, f
		case names && (state == ekStateChangePending || state == ekStateReplaced):
			f.wait(ReasonEKChangePending, "record: this endorsement key is to replace the machine's, and the controller has not accepted the change yet")
			return m, true, f
		case names && state == ekStateNotNamed:
			return m, false, f // its record refuses the key
		}
	}
	return nil, false, f
}

// recordOfMachine returns the record of a machine, nil if there is none.
func recordOfMachine(records []Record, m *Machine) *Record {
	for i := range records {
		if records[i].Machine == m.Ref {
			return &records[i]
		}
	}
	return nil
}

// findRecord returns the record of the machine, or of its key if the machine is not known. It
// returns nil if there is none.
func findRecord(records []Record, name string, s subject) (found *Record) {
	for i := range records {
		r := &records[i]
		if s.machine != nil && r.Machine == s.machine.Ref || s.machine == nil && s.id.ek != "" && r.EK == s.id.ek {
			found = r
		}
		if !s.id.accepted && s.id.ek == "" && name != "" && r.NodeName == name {
			// Without an EK the machine is unknown. A record with the node name makes the request
			// Again, so that the rules for first requests add no refusals.
			found = r
		}
	}
	return found
}

// withoutOrphans splits the records into those of machines that exist, and orphans.
func withoutOrphans(records []Record) (counting, orphans []Record) {
	if !slices.ContainsFunc(records, func(r Record) bool { return r.Orphaned }) {
		return records, nil
	}
	for _, r := range records {
		if r.Orphaned {
			orphans = append(orphans, r)
		} else {
			counting = append(counting, r)
		}
	}
	return counting, orphans
}
