// SPDX-License-Identifier: Apache-2.0

package verifier

import "slices"

// naming compares the key in a machine's record with the keys that the sources name for it now.
type naming int

const (
	// keyAgrees: a source names the record's key, or no source names any.
	keyAgrees naming = iota + 1
	// keyWarned: the sources name other keys, and that only warns. The record decides.
	keyWarned
	// keyHeld: the source that vouched for the record's key names other keys, and the controller
	// has not accepted that. The record decides.
	keyHeld
	// keyReplaced: as keyHeld, and accepted. The source decides, and the record's key counts no
	// longer.
	keyReplaced
)

// namingOf returns how the key in the record of a machine compares with those named for it. What
// was accepted stays so until a source names the record's key again, whatever the sources say
// meanwhile.
func (t *trial) namingOf(r *Record, m *Machine) naming {
	switch {
	case r.EK == "" || t.rules.NamesEK(m, r.EK):
		return keyAgrees
	case t.replaced(r):
		return keyReplaced
	case !slices.ContainsFunc(m.EKs, t.rules.counts):
		return keyAgrees
	case t.rules.ContradictsEK(r, m):
		return keyHeld
	}
	return keyWarned
}

// replaced reports whether other keys were accepted in the place of a record's.
func (t *trial) replaced(r *Record) bool {
	return r.EKReplacedBy != nil && t.rules.RefusesUnnamed(r.EKSource)
}

// mayReplace reports whether the key in the request is one that was accepted in the place of the
// record's, and is named for its machine now.
func (t *trial) mayReplace(r *Record, m *Machine) bool {
	return t.namingOf(r, m) == keyReplaced && slices.Contains(r.EKReplacedBy, t.ek) && t.rules.NamesEK(m, t.ek)
}

// ContradictsEK reports whether the source of the record's EK now names other keys for the machine.
// It is false if that source is silent or unreadable, or if Policy.EKNotNamed only warns.
func (r *Rules) ContradictsEK(record *Record, m *Machine) bool {
	if record.EK == "" || record.Machine != m.Ref || slices.Contains(m.Unread, record.EKSource) || !r.RefusesUnnamed(record.EKSource) || r.NamesEK(m, record.EK) {
		return false
	}
	return slices.ContainsFunc(m.EKs, func(n NamedEK) bool { return n.Source == record.EKSource && r.counts(n) })
}

// RefusesUnnamed reports whether the policy refuses a machine when this source, which vouched for
// its key, names other keys. A source that the policy does not have refuses nothing.
func (r *Rules) RefusesUnnamed(source EKSource) bool {
	return slices.Contains(r.policy.EKSources, source) && r.ekNotNamed(source) == Required
}

// ekNotNamed returns how much it counts that a source names other keys than the one it vouched for.
// A key for which no source vouched, as in trust on first use, only warns.
//
// The default depends on who writes the source. An inventory and an annotation are statements about
// one machine, made on purpose. A platform's answer is computed, and some platforms list only a
// part of a machine's keys.
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

// NamesEK reports whether a source of the policy names an endorsement key for a machine.
func (r *Rules) NamesEK(m *Machine, ek string) bool {
	return slices.ContainsFunc(m.EKs, func(n NamedEK) bool { return n.EK == ek && r.counts(n) })
}

// sourceOf returns the source of the policy that names this key for the machine, and preferred if
// that does.
func (r *Rules) sourceOf(m *Machine, ek string, preferred EKSource) EKSource {
	found := EKSource("")
	for _, source := range r.policy.EKSources {
		if slices.Contains(m.EKs, NamedEK{source, ek}) && (found == "" || source == preferred) {
			found = source
		}
	}
	return found
}

// namedNow reports whether an authority says now that the evidence is the selected machine's: a
// source names the key, or the evidence itself says which machine it is of.
func (t *trial) namedNow() bool {
	if t.machine == nil {
		return false
	}
	return t.ek != "" && t.rules.NamesEK(t.machine, t.ek) || t.shown && t.in.Evidence.Machine != ""
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

// hasKey reports whether a record pins this request's key. A key that was replaced is pinned no
// more, also where its machine is gone.
func (t *trial) hasKey(r *Record) bool {
	if t.ek == "" || r.EK != t.ek {
		return false
	}
	if !t.replaced(r) {
		return true
	}
	for i := range t.in.Machines {
		if m := &t.in.Machines[i]; m.Ref == r.Machine {
			return t.namingOf(r, m) != keyReplaced
		}
	}
	return false
}

// judgeContestedKey judges a key over which the record and the sources of a machine disagree: one
// that was replaced is denied, one that is to replace it waits. It reports whether there is such a
// machine.
func (t *trial) judgeContestedKey() bool {
	if t.ek == "" {
		return false
	}
	named := slices.ContainsFunc(t.in.Machines, func(m Machine) bool { return t.rules.NamesEK(&m, t.ek) })
	for i := range t.in.Machines {
		m := &t.in.Machines[i]
		r := t.recordOf(m)
		if r == nil || m.Ref.Name == "" {
			continue
		}
		n, names := t.namingOf(r, m), t.rules.NamesEK(m, t.ek)
		switch {
		case !named && (slices.Contains(r.FormerEKs, t.ek) || n == keyReplaced && r.EK == t.ek):
			t.machine = m
			t.deny(ReasonEKReplaced, "record: the source that named this endorsement key for the machine names another one now")
		case names && (n == keyHeld || n == keyReplaced):
			t.machine, t.pendingEK = m, true
			t.wait(ReasonEKChangePending, "record: this endorsement key is to replace the machine's, and the controller has not accepted the change yet")
		case names && n == keyWarned:
			t.machine = m // its record refuses the key
		default:
			continue
		}
		return true
	}
	return false
}

// judgeNamed warns of an endorsement key that the record has and the sources do not name. An
// impostor who came first under trust on first use looks the same.
func (t *trial) judgeNamed(record *Record) {
	if t.machine == nil || record == nil {
		return
	}
	switch t.namingOf(record, t.machine) {
	case keyWarned:
		t.warn(ReasonEKNotNamed, "record: its endorsement key is none of those named for the machine")
	case keyHeld:
		t.warn(ReasonEKChangePending, "record: its endorsement key is none of those named for the machine; the record decides until the change is accepted")
	}
}
