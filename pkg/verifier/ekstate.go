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
func (e *evaluation) ekStateOf(r *Record, m *Machine) ekState {
	switch {
	case r.EK == "" || !m.Disputed && e.rules.NamesEK(m, r.EK):
		return ekStateNotContradicted
	case e.replacementAccepted(r):
		return ekStateReplaced
	case m.Disputed || !slices.ContainsFunc(m.EKs, e.rules.trustsSource):
		return ekStateNotContradicted
	}
	if _, named := e.rules.ContradictedBy(r, m); len(named) > 0 {
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

// pinsEK reports whether a record still binds this request's key to the record's machine. It no
// longer binds a key that was replaced, even if the machine is gone.
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

// judgeContestedEK judges a key on which the record and the sources of a machine disagree. A
// replaced key is denied. Its replacement waits. judgeContestedEK reports whether there is such a
// machine.
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
			e.deny(ReasonEKReplaced, "record: a source names another endorsement key than this one for the machine now")
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

// warnIfNotNamed warns of an endorsement key that is in the record and that no source names. The
// key may be that of an impostor that enrolled first, under trust on first use.
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
