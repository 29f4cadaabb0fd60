// SPDX-License-Identifier: Apache-2.0

package verifier

import "slices"

// ekState compares the key in a machine's record with the keys that sources name for the machine
// now.
type ekState int

const (
	// ekStateNotContradicted: the record has no key, or a source names the record's key and the
	// machine is not disputed. Without an accepted replacement, it is also the state if the machine
	// is disputed, or if no source names any key.
	ekStateNotContradicted ekState = iota + 1
	// ekStateNotNamed: sources name other keys. But they may not replace the record's key, are
	// unavailable, or the policy only warns. The record decides.
	ekStateNotNamed
	// ekStateChangePending: a source contradicts the record's key (Rules.ContradictedBy), and the
	// controller has not accepted that. The record decides.
	ekStateChangePending
	// ekStateReplaced: as ekStateChangePending, but accepted. The source decides, and the record's
	// key is refused.
	ekStateReplaced
)

// ekStateOf returns the state of the key in a machine's record. An accepted replacement stays
// accepted until a source names the record's key again, even if the sources change otherwise.
func (r *Rules) ekStateOf(record *Record, m *Machine) ekState {
	switch {
	case record.EK == "" || !m.Disputed && r.NamesEK(m, record.EK):
		return ekStateNotContradicted
	case r.replacementAccepted(record):
		return ekStateReplaced
	case m.Disputed || !slices.ContainsFunc(m.EKs, r.trustsSource):
		return ekStateNotContradicted
	}
	if _, named := r.ContradictedBy(record, m); len(named) > 0 {
		return ekStateChangePending
	}
	return ekStateNotNamed
}

// replacementAccepted reports whether the controller accepted other keys in place of the record's.
func (r *Rules) replacementAccepted(record *Record) bool {
	return record.EKReplacedBy != nil && r.RefusesUnnamed(record.EKSource)
}

// isAcceptedReplacement reports whether a key was accepted in place of the record's, and a source
// names it for the machine now.
func (r *Rules) isAcceptedReplacement(record *Record, m *Machine, ek string) bool {
	return r.ekStateOf(record, m) == ekStateReplaced && slices.Contains(record.EKReplacedBy, ek) && r.NamesEK(m, ek)
}

// ContradictedBy returns the first source of the policy that contradicts the record's EK, and the
// keys that this source names for the machine instead, sorted, each once. There are none if a
// source of the policy names the record's EK, or if the machine is disputed.
//
// Only the source that vouched for the record's EK can contradict it. If none vouched, as in trust
// on first use, each source of the policy can. An unavailable source cannot, nor can a source for
// which Policy.EKNotNamed only warns.
func (r *Rules) ContradictedBy(record *Record, m *Machine) (EKSource, []string) {
	if m.Disputed || record.EK == "" || record.Machine != m.Ref || r.NamesEK(m, record.EK) {
		return "", nil
	}
	for _, source := range r.policy.EKSources {
		if !r.mayReplace(source, record.EKSource) || slices.Contains(m.UnavailableSources, source) {
			continue
		}
		var named []string
		for _, ek := range m.EKs {
			if ek.Source == source && ek.EK != "" {
				named = append(named, ek.EK)
			}
		}
		if len(named) > 0 {
			slices.Sort(named)
			return source, slices.Compact(named)
		}
	}
	return "", nil
}

// mayReplace reports whether a source may replace a key that the source recorded vouched for. Any
// source may replace a key for which recorded is "": no source vouched for it.
func (r *Rules) mayReplace(source, recorded EKSource) bool {
	return (recorded == source || recorded == "") && r.ekNotNamed(source) == Required
}

// RefusesUnnamed reports whether a source of the policy may replace a key that the source recorded
// vouched for. recorded is "" for a key that no source vouched for. The result is false for a
// recorded source that is not in the policy.
func (r *Rules) RefusesUnnamed(recorded EKSource) bool {
	return slices.ContainsFunc(r.policy.EKSources, func(source EKSource) bool { return r.mayReplace(source, recorded) })
}

// ekNotNamed returns the mode of this rule: if a source names keys for a machine, the machine's key
// must be among them.
//
// The default depends on who writes the source. An inventory and an annotation are deliberate
// statements about one machine. A platform computes its answer, and some platforms list only some
// of a machine's keys.
func (r *Rules) ekNotNamed(source EKSource) Mode {
	switch {
	case r.policy.EKNotNamed != 0:
		return r.policy.EKNotNamed
	case source == EKPlatform:
		return Warn
	}
	return Required
}

// trustsSource reports whether a source of the policy names the key.
func (r *Rules) trustsSource(n NamedEK) bool {
	return n.EK != "" && slices.Contains(r.policy.EKSources, n.Source)
}

// NamesEK reports whether a source of the policy names an endorsement key for a machine.
func (r *Rules) NamesEK(m *Machine, ek string) bool {
	return slices.ContainsFunc(m.EKs, func(n NamedEK) bool { return n.EK == ek && r.trustsSource(n) })
}

// sourceOf returns the source of the policy that names this key for the machine. If several do, it
// prefers preferred.
func (r *Rules) sourceOf(m *Machine, ek string, preferred EKSource) EKSource {
	chosen := EKSource("")
	for _, source := range r.policy.EKSources {
		if slices.Contains(m.EKs, NamedEK{source, ek}) && (chosen == "" || source == preferred) {
			chosen = source
		}
	}
	return chosen
}

// namedByAuthority reports whether an authority currently assigns the evidence to the selected
// machine: a source names the key, or the evidence itself names the machine.
func (r *Rules) namedByAuthority(s subject) bool {
	if s.machine == nil {
		return false
	}
	return s.id.ek != "" && r.NamesEK(s.machine, s.id.ek) || s.id.accepted && s.id.machine != ""
}

// pinsEK reports whether a record still binds this key to the record's machine. It no longer binds
// a key that was replaced, even if the machine is gone.
func (r *Rules) pinsEK(record *Record, ek string, machines []Machine) bool {
	if ek == "" || record.EK != ek {
		return false
	}
	if !r.replacementAccepted(record) {
		return true
	}
	for i := range machines {
		if m := &machines[i]; m.Ref == record.Machine {
			return r.ekStateOf(record, m) != ekStateReplaced
		}
	}
	return false
}

// warnIfNotNamed warns of an endorsement key that is in the record and that no source names. The
// key may be that of an impostor that enrolled first, under trust on first use.
func (r *Rules) warnIfNotNamed(record *Record, m *Machine) (f findings) {
	if m == nil {
		return f
	}
	switch r.ekStateOf(record, m) {
	case ekStateNotNamed:
		f.warn(ReasonEKNotNamed, "record: its endorsement key is none of those named for the machine")
	case ekStateChangePending:
		f.warn(ReasonEKChangePending, "record: its endorsement key is none of those named for the machine; the record decides until the change is accepted")
	}
	return f
}
