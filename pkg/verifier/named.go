// SPDX-License-Identifier: Apache-2.0

package verifier

import "slices"

// naming compares the endorsement key in a machine's record with the keys that the sources of the policy name for that machine now.
type naming int

const (
	// agreed: a source names the record's key, or no source names any.
	agreed naming = iota + 1
	// warned: the sources name other keys, and that only warns. The record decides.
	warned
	// held: the source that vouched for the record's key names other keys, and the controller has not accepted that. The record decides.
	held
	// replaced: as held, and accepted. The source decides, and the record's key counts no longer.
	replaced
)

// namingOf returns how the key in the record of a machine compares with those named for it.
func (t *trial) namingOf(r *Record, m *Machine) naming {
	if r.EK == "" || !slices.ContainsFunc(m.EKs, t.rules.counts) || t.rules.names(m, r.EK) {
		return agreed
	}
	if !t.rules.ContradictsEK(*r, *m) {
		return warned
	}
	if r.EKReplaced {
		return replaced
	}
	return held
}

// NamesEK reports whether a source of the policy names an endorsement key for a machine.
func (r *Rules) NamesEK(m Machine, ek string) bool { return r.names(&m, ek) }

// ContradictsEK reports whether the source that vouched for the endorsement key in the record of a machine now names other keys for
// that machine, and the policy has that count (Policy.EKNotNamed). A source that names no key contradicts nothing, and neither does one
// that could not be read.
func (r *Rules) ContradictsEK(record Record, m Machine) bool {
	if record.EK == "" || record.Machine != m.Ref || m.EKsIncomplete || r.ekNotNamed(record.EKSource) != Required || r.names(&m, record.EK) {
		return false
	}
	return slices.ContainsFunc(m.EKs, func(n NamedEK) bool { return n.Source == record.EKSource && r.counts(n) })
}

// ekNotNamed returns how much it counts that a source names other keys than the one it vouched for. A key for which no source vouched,
// as in trust on first use, only warns.
//
// The default depends on who writes the source. An inventory and an annotation are statements about one machine, made on purpose. What
// a platform answers is computed, and some platforms list only a part of a machine's keys.
func (r *Rules) ekNotNamed(source EKSource) Mode {
	switch {
	case source == "":
		return Warn
	case r.policy.EKNotNamed != 0:
		return r.policy.EKNotNamed
	case source == EKPlatform:
		return Warn
	}
	return Required
}

// counts reports whether a key is named by a source of the policy.
func (r *Rules) counts(n NamedEK) bool {
	return n.EK != "" && slices.Contains(r.policy.EKSources, n.Source)
}

// names reports whether a source of the policy names this key for the machine.
func (r *Rules) names(m *Machine, ek string) bool {
	return slices.ContainsFunc(m.EKs, func(n NamedEK) bool { return n.EK == ek && r.counts(n) })
}

// sourceOf returns the source of the policy that names this key for the machine, and preferred if that does.
func (r *Rules) sourceOf(m *Machine, ek string, preferred EKSource) EKSource {
	found := EKSource("")
	for _, source := range r.policy.EKSources {
		if slices.Contains(m.EKs, NamedEK{source, ek}) && (found == "" || source == preferred) {
			found = source
		}
	}
	return found
}

// namedNow reports whether an authority says now that the evidence is the selected machine's: a source names the key, or the evidence
// itself says which machine it is of.
func (t *trial) namedNow() bool {
	if t.machine == nil {
		return false
	}
	return t.ek != "" && t.rules.names(t.machine, t.ek) || t.shown && t.in.Evidence.Machine != ""
}

// recordOf returns the record of a machine, nil if there is none.
func (t *trial) recordOf(m *Machine) *Record {
	for i := range t.in.Records {
		if t.in.Records[i].Machine == m.Ref {
			return &t.in.Records[i]
		}
	}
	return nil
}

// hasKey reports whether a record pins this request's key: a key that was replaced is pinned no more.
func (t *trial) hasKey(r *Record) bool {
	if t.ek == "" || r.EK != t.ek {
		return false
	}
	if !r.EKReplaced {
		return true
	}
	for i := range t.in.Machines {
		if m := &t.in.Machines[i]; m.Ref == r.Machine {
			return t.namingOf(r, m) != replaced
		}
	}
	return true
}

// selectContested handles a key over which the record and the sources disagree. It reports whether there is such a machine, and says
// what follows for the key in the request: the one that was replaced, or the one that is to replace it.
func (t *trial) selectContested() bool {
	for i := range t.in.Machines {
		m := &t.in.Machines[i]
		r := t.recordOf(m)
		if r == nil || m.Ref.Name == "" || t.ek == "" {
			continue
		}
		former := slices.Contains(r.FormerEKs, t.ek)
		if r.EK != t.ek && !former && !t.rules.names(m, t.ek) {
			continue
		}
		switch n := t.namingOf(r, m); {
		case former || n == replaced && r.EK == t.ek:
			t.machine = m
			t.deny(ReasonEKReplaced, "record: the source that named this endorsement key for the machine names another one now")
		case n == held:
			t.machine, t.pendingEK = m, true
			t.wait(ReasonEKChangePending, "record: this endorsement key is to replace the machine's, and the controller has not accepted the change yet")
		case n == warned:
			t.machine = m // its record refuses the key
		default:
			continue
		}
		return true
	}
	return false
}

// judgeNamed warns of an endorsement key that only the record says is the machine's, while sources name others. The record goes on deciding, or a
// mistake in a source would take nodes down; but this is also what is left of a first use that was an impostor's.
func (t *trial) judgeNamed(record *Record) {
	if t.machine == nil || record == nil {
		return
	}
	switch t.namingOf(record, t.machine) {
	case warned:
		t.warn(ReasonEKNotNamed, "record: its endorsement key is none of those named for the machine")
	case held:
		t.warn(ReasonEKChangePending, "record: its endorsement key is none of those named for the machine; the record decides until the change is accepted")
	}
}
