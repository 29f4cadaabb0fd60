// SPDX-License-Identifier: Apache-2.0

package verifier

import "slices"

// ekState compares the key in a machine's record with the keys that sources name for the machine
// now.
type ekState int

const (
	// ekStateConfirmed: a source names the record's key, no source names any, or the machine is
	// disputed.
	ekStateConfirmed ekState = iota + 1
	// ekStateNotNamed: sources name other keys, which only warns. The record decides.
	ekStateNotNamed
	// ekStateChangePending: the source that vouched for the record's key names other keys, and the
	// controller has not accepted that. The record decides.
	ekStateChangePending
	// ekStateReplaced: as ekStateChangePending, and accepted. The source decides, and the record's
	// key no longer counts.
	ekStateReplaced
)

// ekStateOf returns the state of the key in a machine's record. An accepted replacement stays
// accepted until a source names the record's key again, whatever the sources say meanwhile.
func (e *evaluation) ekStateOf(r *Record, m *Machine) ekState {
	switch {
	case r.EK == "" || !m.Disputed && e.rules.NamesEK(m, r.EK):
		return ekStateConfirmed
	case e.replacementAccepted(r):
		return ekStateReplaced
	case m.Disputed || !slices.ContainsFunc(m.EKs, e.rules.trustsSource):
		return ekStateConfirmed
	case e.rules.ContradictsEK(r, m):
		return ekStateChangePending
	}
	return ekStateNotNamed
}

// replacementAccepted reports whether the controller accepted other keys in place of the record's.
func (e *evaluation) replacementAccepted(r *Record) bool {
	return r.EKReplacedBy != nil && e.rules.RefusesUnnamed(r.EKSource)
}

// isAcceptedReplacement reports whether the key in the request was accepted in place of the
// record's, and a source names it for the machine now.
func (e *evaluation) isAcceptedReplacement(r *Record, m *Machine) bool {
	return e.ekStateOf(r, m) == ekStateReplaced && slices.Contains(r.EKReplacedBy, e.ek) && e.rules.NamesEK(m, e.ek)
}

// ContradictsEK reports whether the source of the record's EK now names other keys for the machine.
// It is false if that source names none or is unavailable, if the machine is disputed, or if
// Policy.EKNotNamed only warns.
func (r *Rules) ContradictsEK(record *Record, m *Machine) bool {
	if m.Disputed || record.EK == "" || record.Machine != m.Ref || slices.Contains(m.UnavailableSources, record.EKSource) || !r.RefusesUnnamed(record.EKSource) || r.NamesEK(m, record.EK) {
		return false
	}
	return slices.ContainsFunc(m.EKs, func(n NamedEK) bool { return n.Source == record.EKSource && r.trustsSource(n) })
}

// RefusesUnnamed reports whether the policy refuses a machine when this source, which vouched for
// its key, names other keys. A source that is not in the policy refuses nothing.
func (r *Rules) RefusesUnnamed(source EKSource) bool {
	return slices.Contains(r.policy.EKSources, source) && r.ekNotNamed(source) == Required
}

// ekNotNamed returns how much it counts that a source names other keys than the one it vouched for.
// If no source vouched for a key, as in trust on first use, that only warns.
//
// The default depends on who writes the source. An inventory and an annotation are deliberate
// statements about one machine. A platform computes its answer, and some platforms list only a part
// of a machine's keys.
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

// trustsSource reports whether a key is named by a source of the policy.
func (r *Rules) trustsSource(n NamedEK) bool {
	return n.EK != "" && slices.Contains(r.policy.EKSources, n.Source)
}

// NamesEK reports whether a source of the policy names an endorsement key for a machine.
func (r *Rules) NamesEK(m *Machine, ek string) bool {
	return slices.ContainsFunc(m.EKs, func(n NamedEK) bool { return n.EK == ek && r.trustsSource(n) })
}

// sourceOf returns the source of the policy that names this key for the machine. If preferred does,
// it returns that.
func (r *Rules) sourceOf(m *Machine, ek string, preferred EKSource) EKSource {
	chosen := EKSource("")
	for _, source := range r.policy.EKSources {
		if slices.Contains(m.EKs, NamedEK{source, ek}) && (chosen == "" || source == preferred) {
			chosen = source
		}
	}
	return chosen
}

// namedByAuthority reports whether an authority says now that the evidence is the selected
// machine's: a source names the key, or the evidence itself names the machine.
func (e *evaluation) namedByAuthority() bool {
	if e.machine == nil {
		return false
	}
	return e.ek != "" && e.rules.NamesEK(e.machine, e.ek) || e.evidenceAccepted && e.in.Evidence.Machine != ""
}

// recordOf returns the record of a machine, nil if there is none.
func (e *evaluation) recordOf(m *Machine) *Record {
	for i := range e.in.Records {
		if e.in.Records[i].Machine == m.Ref {
			return &e.in.Records[i]
		}
	}
	return nil
}

// pinsEK reports whether a record pins this request's key. A key that was replaced is no longer
// pinned, even if its machine is gone.
func (e *evaluation) pinsEK(r *Record) bool {
	if e.ek == "" || r.EK != e.ek {
		return false
	}
	if !e.replacementAccepted(r) {
		return true
	}
	for i := range e.in.Machines {
		if m := &e.in.Machines[i]; m.Ref == r.Machine {
			return e.ekStateOf(r, m) != ekStateReplaced
		}
	}
	return false
}

// judgeContestedEK judges a key on which the record and the sources of a machine disagree. A key
// that was replaced is denied. A key that is to replace it waits. It reports whether there is such
// a machine.
func (e *evaluation) judgeContestedEK() bool {
	if e.ek == "" {
		return false
	}
	named := slices.ContainsFunc(e.in.Machines, func(m Machine) bool { return e.rules.NamesEK(&m, e.ek) })
	for i := range e.in.Machines {
		m := &e.in.Machines[i]
		r := e.recordOf(m)
		if r == nil || m.Ref.Name == "" {
			continue
		}
		state, names := e.ekStateOf(r, m), e.rules.NamesEK(m, e.ek)
		switch {
		case !named && (slices.Contains(r.FormerEKs, e.ek) || state == ekStateReplaced && r.EK == e.ek):
			e.machine = m
			e.deny(ReasonEKReplaced, "record: the source that named this endorsement key for the machine names another one now")
		case names && (state == ekStateChangePending || state == ekStateReplaced):
			e.machine, e.ekChangePending = m, true
			e.wait(ReasonEKChangePending, "record: this endorsement key is to replace the machine's, and the controller has not accepted the change yet")
		case names && state == ekStateNotNamed:
			e.machine = m // its record refuses the key
		default:
			continue
		}
		return true
	}
	return false
}

// warnIfNotNamed warns of an endorsement key that is in the record and that no source names. It
// looks the same if an impostor came first under trust on first use.
func (e *evaluation) warnIfNotNamed(record *Record) {
	if e.machine == nil || record == nil {
		return
	}
	switch e.ekStateOf(record, e.machine) {
	case ekStateNotNamed:
		e.warn(ReasonEKNotNamed, "record: its endorsement key is none of those named for the machine")
	case ekStateChangePending:
		e.warn(ReasonEKChangePending, "record: its endorsement key is none of those named for the machine; the record decides until the change is accepted")
	}
}
