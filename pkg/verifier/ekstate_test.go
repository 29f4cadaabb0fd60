// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"slices"
	"testing"
	"time"
)

// replacing is a world in which the inventory vouched for ek1, and now names "b" for the honest
// machine. The policy is as controllers have it.
func replacing(w *world) *world {
	w.policy.Credential = Recover
	w.machine().EKs = []NamedEK{{EKInventory, "b"}}
	for i := range w.in.Records {
		w.in.Records[i].EKSource = EKInventory
	}
	return w
}

// shows has the request come from the TPM with this key.
func (w *world) shows(ek string) {
	w.in.Evidence.EK, w.in.Evidence.AK = ek, "ak of "+ek
	if w.in.Evidence.Boot != nil {
		w.in.Evidence.Boot = &Boot{1, 0, 10, true}
	}
}

// The source that vouched for a machine's key now names another. The test says which TPM is
// accepted: the TPM of the record (A), or the named one (B).
func TestReplacedEK(t *testing.T) {
	type reasons = []Reason
	accepted := func(w *world) { w.record().EKReplacedBy = []string{"b"} }
	pending := func(*world) {}
	annotated := func(w *world) {
		w.policy.EKSources = append(w.policy.EKSources, EKAnnotation)
		w.record().EKSource, w.machine().EKs = EKAnnotation, []NamedEK{{EKAnnotation, "b"}}
	}
	platform := func(w *world) {
		w.policy.EKSources = append(w.policy.EKSources, EKPlatform)
		w.record().EKSource, w.machine().EKs = EKPlatform, []NamedEK{{EKPlatform, "b"}}
	}
	firstUse := func(w *world) { w.record().EKSource = "" }
	all := func(bends ...func(*world)) func(*world) {
		return func(w *world) {
			for _, bend := range bends {
				bend(w)
			}
		}
	}
	for _, c := range []struct {
		name string
		bend func(*world)
		// a and b are what becomes of a proof by each TPM, "" for Approve; warns are the warnings
		// of the one that passes.
		a, b, warns Reason
	}{
		{"accepted", accepted, ReasonEKReplaced, "", ReasonEKReplaced},
		{"accepted, an annotation", all(annotated, accepted), ReasonEKReplaced, "", ReasonEKReplaced},
		{"accepted, Required for a platform", all(platform, accepted, func(w *world) { w.policy.EKNotNamed = Required }), ReasonEKReplaced, "", ReasonEKReplaced},
		{"not accepted yet", pending, "", ReasonEKChangePending, ReasonEKChangePending},

		// Whatever the record says, it goes on deciding where the policy, or what is known of the
		// source, says so.
		{"accepted, and switched off since", all(accepted, func(w *world) { w.policy.EKNotNamed = Warn }), "", ReasonIdentityBound, ReasonEKNotNamed},
		{"a platform only warns", all(platform, accepted), "", ReasonIdentityBound, ReasonEKNotNamed},
		{"another source vouched for it", all(annotated, func(w *world) { w.record().EKSource = EKInventory }), "", ReasonIdentityBound, ReasonEKNotNamed},
		{"the source counts no more", all(accepted, func(w *world) {
			w.policy.EKSources = []EKSource{EKAnnotation}
			w.machine().EKs = []NamedEK{{EKAnnotation, "b"}}
		}), "", ReasonIdentityBound, ReasonEKNotNamed},
		{"the source could not be read", func(w *world) { w.machine().UnavailableSources = []EKSource{EKInventory} }, "", ReasonIdentityBound, ReasonEKNotNamed},
		{"another source could not be read", func(w *world) { w.machine().UnavailableSources = []EKSource{EKPlatform} }, "", ReasonEKChangePending, ReasonEKChangePending},

		// An impostor that was first under trust on first use has a record without a source. A
		// source that refuses unnamed keys corrects it. A platform that only warns does not, nor
		// does a source that is not in the policy.
		{"first use, not accepted yet", firstUse, "", ReasonEKChangePending, ReasonEKChangePending},
		{"first use, accepted", all(firstUse, accepted), ReasonEKReplaced, "", ReasonEKReplaced},
		{"first use, an annotation", all(annotated, firstUse, accepted), ReasonEKReplaced, "", ReasonEKReplaced},
		{"first use, Required for a platform", all(platform, firstUse, accepted, func(w *world) { w.policy.EKNotNamed = Required }), ReasonEKReplaced, "", ReasonEKReplaced},
		{"first use, a platform only warns", all(platform, firstUse, accepted, func(w *world) { w.policy.EKSources = []EKSource{EKPlatform} }), "", ReasonIdentityBound, ReasonEKNotNamed},
		{"first use, another source that refuses names none", all(platform, firstUse), "", ReasonIdentityBound, ReasonEKNotNamed},
		{"first use, a source that does not count", all(platform, firstUse, accepted, func(w *world) {
			w.policy.EKSources, w.machine().EKs = []EKSource{EKPlatform}, []NamedEK{{EKInventory, "b"}, {EKPlatform, "b"}}
		}), "", ReasonIdentityBound, ReasonEKNotNamed},
		{"first use, switched off", all(firstUse, accepted, func(w *world) { w.policy.EKNotNamed = Warn }), "", ReasonIdentityBound, ReasonEKNotNamed},
		{"first use, the source could not be read", all(firstUse, func(w *world) { w.machine().UnavailableSources = []EKSource{EKInventory} }), "", ReasonIdentityBound, ReasonEKNotNamed},

		// What was accepted stays so, and is for the keys that were accepted.
		{"accepted, and the source could not be read", all(accepted, func(w *world) { w.machine().UnavailableSources = []EKSource{EKInventory} }), ReasonEKReplaced, "", ReasonEKReplaced},
		{"accepted, and then another key is named", all(accepted, func(w *world) { w.machine().EKs = []NamedEK{{EKInventory, "c"}} }), ReasonEKReplaced, ReasonNodeNameMismatch, ""},
		// A dispute changes nothing: it accepts no key, and takes back none that was accepted.
		{"disputed", disputed, "", ReasonAmbiguousMachine, ReasonAmbiguousMachine},
		{"disputed, accepted before", all(disputed, accepted), ReasonEKReplaced, ReasonAmbiguousMachine, ""},
		{"disputed, accepted before, and both are named", all(disputed, accepted, func(w *world) {
			w.machine().EKs = []NamedEK{{EKInventory, ek1}, {EKInventory, "b"}}
		}), ReasonEKChangePending, ReasonAmbiguousMachine, ""},
		{"another key was accepted", func(w *world) { w.record().EKReplacedBy = []string{"c"} }, ReasonEKReplaced, ReasonEKChangePending, ""},
	} {
		for _, class := range []Class{Again, Renewal} {
			for ek, want := range map[string]Reason{ek1: c.a, "b": c.b} {
				w := replacing(good(class))
				w.in.Token = good(First).in.Token
				w.shows(ek)
				c.bend(w)
				w.record().AK = "ak of " + ek1
				w.record().Boot = &Boot{1, 0, 5, true}
				d := w.judge(t)
				switch {
				case want == "":
					if d.Outcome != Approve || !slices.Equal(d.Warnings.Reasons(), reasons{c.warns}) || d.Grant.Record.EK != ek {
						t.Errorf("%s, %s, %s: %s, %v, warnings %v", c.name, class, ek, d.Outcome, d.Refusals, d.Warnings)
					}
				case want == ReasonEKChangePending, want == ReasonAmbiguousMachine:
					if d.Outcome != Wait || !slices.Equal(d.Refusals.Reasons(), reasons{want}) {
						t.Errorf("%s, %s, %s: %s, %v", c.name, class, ek, d.Outcome, d.Refusals)
					}
				case d.Outcome != Deny || d.Refusals.Reason() != want:
					t.Errorf("%s, %s, %s: %s, %v", c.name, class, ek, d.Outcome, d.Refusals)
				}
			}
		}
	}
}

// The source names the old key again, beside the new one, or none: the record's key is as good as
// before.
func TestEKIsNamedAgain(t *testing.T) {
	for name, eks := range map[string][]NamedEK{
		"again":          {{EKInventory, ek1}},
		"beside another": {{EKInventory, "b"}, {EKInventory, ek1}},
	} {
		w := replacing(good(Renewal))
		w.machine().EKs, w.record().EKReplacedBy = eks, []string{"b"}
		if d := w.judge(t); d.Outcome != Approve || len(d.Warnings) > 0 {
			t.Errorf("%s: %s, %v, warnings %v", name, d.Outcome, d.Refusals, d.Warnings)
		}
	}
}

// The record of a replaced key keeps the name and the history of requests, and is signed as any
// other. The token is not asked: a source names the key.
func TestReplacementIsRecorded(t *testing.T) {
	for _, class := range []Class{Again, Renewal} {
		for _, credential := range []Mode{Recover, Required} {
			w := replacing(good(class))
			w.policy.Credential = credential
			w.record().EKReplacedBy, w.record().AK = []string{"b"}, "ak of "+ek1
			w.shows("b")
			d := w.judge(t)
			if d.Outcome != Approve {
				t.Fatalf("%s: %s, %v", class, d.Outcome, d.Refusals)
			}
			r := d.Grant.Record
			if r.EK != "b" || r.AK != "ak of b" || r.EKSource != EKInventory || r.EKReplacedBy != nil || r.NodeName != nodeName || r.FirstProofUID != "uid-older" ||
				r.Boot == nil || *r.Boot != *w.in.Evidence.Boot {
				t.Errorf("%s: %+v", class, r)
			}
			w.approve()
			if d := w.judge(t); d.Outcome != Sign || d.Class != class {
				t.Errorf("%s: %s, %s, %v", class, d.Outcome, d.Class, d.Refusals)
			}
			// The former key's certificates count no more, the one that asked neither.
			w.in.Records[1].Certificates, w.in.Records[1].FormerEKs = nil, []string{ek1}
			if d := w.judge(t); d.Outcome != Sign || slices.Contains(d.Warnings.Reasons(), ReasonRecordRecovered) {
				t.Errorf("%s: %s, %v, warnings %v", class, d.Outcome, d.Refusals, d.Warnings)
			}
			// The other TPM is refused for good.
			w.in.Records[1].Certificates, w.signing, w.in.Request.Status.Conditions = recordOf(nodeName, "b").Certificates, false, nil
			w.in.Request.UID, w.in.Records[1].FormerEKs = "another", []string{ek1}
			w.shows(ek1)
			if d := w.judge(t); d.Outcome != Deny || d.Refusals.Reason() != ReasonEKReplaced {
				t.Errorf("%s: the key that was replaced: %s, %v", class, d.Outcome, d.Refusals)
			}
			// Unless the source names it again, for this machine or another.
			w.machine().EKs = []NamedEK{{EKInventory, ek1}}
			w.in.Records[1].EKReplacedBy, w.in.Hello.UID = []string{ek1}, "another-hello"
			if d := w.judge(t); d.Outcome != Approve {
				t.Errorf("%s: named again: %s, %v", class, d.Outcome, d.Refusals)
			}
		}
	}
}

// Two machines exchange their TPMs, and the inventory says so. Each is known by the key that is
// named for it.
func TestExchangedEKs(t *testing.T) {
	w := replacing(good(Renewal))
	w.machine().EKs, w.in.Machines[0].EKs = []NamedEK{{EKInventory, ek2}}, []NamedEK{{EKInventory, ek1}}

	// Until both changes are accepted the records decide, and no key belongs to two machines.
	if d := w.judge(t); d.Outcome != Approve || !slices.Equal(d.Warnings.Reasons(), []Reason{ReasonEKChangePending}) {
		t.Errorf("not accepted: %s, %v, warnings %v", d.Outcome, d.Refusals, d.Warnings)
	}
	w.in.Records[0].EKReplacedBy, w.in.Records[1].EKReplacedBy = []string{ek1}, []string{ek2}
	if d := w.judge(t); d.Outcome != Deny {
		t.Errorf("the old key under the old name: %s, %v", d.Outcome, d.Refusals)
	}
	w.shows(ek2)
	if d := w.judge(t); d.Outcome != Approve || d.Grant.Record.EK != ek2 || d.Grant.Record.Machine != machine(nodeName).Ref {
		t.Errorf("the new key: %s, %v", d.Outcome, d.Refusals)
	}
}

// After A was accepted to be replaced, the source falls silent: A stays refused, or changes could
// be made in steps that are never counted.
func TestReplacedEKStaysRefused(t *testing.T) {
	for _, source := range []EKSource{EKInventory, ""} { // "" is trust on first use
		w := replacing(good(Renewal))
		w.record().EKSource, w.record().EKReplacedBy, w.machine().EKs = source, []string{"b"}, nil
		if d := w.judge(t); d.Outcome != Deny || d.Refusals.Reason() != ReasonEKReplaced {
			t.Errorf("%q: %s, %v", source, d.Outcome, d.Refusals)
		}
	}
}

// A board moves from worker-2 to the honest machine, and worker-2's new key never comes. worker-2's
// old record does not block any machine, whether worker-2 comes back or not.
func TestMovedBoard(t *testing.T) {
	for name, bend := range map[string]func(*world){
		"another key is named for it": func(w *world) { w.in.Machines[0].EKs = []NamedEK{{EKInventory, "c"}} },
		"no key is named for it":      func(w *world) { w.in.Machines[0].EKs = nil },
		"its source is unread": func(w *world) {
			w.in.Machines[0].EKs, w.in.Machines[0].UnavailableSources = nil, []EKSource{EKInventory}
		},
		"it is gone": func(w *world) { w.in.Machines = w.in.Machines[1:] },
	} {
		for _, enrolled := range []bool{false, true} {
			w := replacing(good(Renewal))
			w.machine().EKs = []NamedEK{{EKInventory, ek2}}
			w.record().EKReplacedBy = []string{ek2}
			if enrolled {
				w.record().EK, w.record().FormerEKs, w.record().EKReplacedBy = ek2, []string{ek1}, nil
			}
			w.in.Records[0].EKReplacedBy = []string{"c"}
			w.record().AK = "ak of " + ek2
			w.record().Boot = nil
			w.shows(ek2)
			bend(w)
			if d := w.judge(t); d.Outcome != Approve || d.Grant.NodeName != nodeName {
				t.Errorf("%s, enrolled %t: %s, %v", name, enrolled, d.Outcome, d.Refusals)
			}
		}
	}
}

// A source gives a healthy machine's key to another machine, by mistake, and that is accepted. The
// healthy machine keeps its name: its own record pins the key.
func TestAcceptedMistakeTakesNoOtherDown(t *testing.T) {
	w := replacing(good(Renewal))
	w.machine().EKs = []NamedEK{{EKInventory, ek1}}
	w.in.Machines[0].EKs = []NamedEK{{EKInventory, ek1}} // worker-2's is ek2
	w.in.Records[0].EKReplacedBy = []string{ek1}
	if d := w.judge(t); d.Outcome != Approve || d.Grant.NodeName != nodeName {
		t.Errorf("%s, %v", d.Outcome, d.Refusals)
	}
	// Its own change is held: the record decides.
	w.machine().EKs = []NamedEK{{EKInventory, "x"}}
	if d := w.judge(t); d.Outcome != Approve || d.Grant.NodeName != nodeName {
		t.Errorf("held: %s, %v", d.Outcome, d.Refusals)
	}
}

// A goes out and comes back: while that is not accepted, A waits and is not denied.
func TestFormerEKComesBack(t *testing.T) {
	w := replacing(good(Renewal))
	w.record().EK, w.record().FormerEKs = "b", []string{ek1}
	w.machine().EKs = []NamedEK{{EKInventory, ek1}}
	if d := w.judge(t); d.Outcome != Wait || d.Refusals.Reason() != ReasonEKChangePending {
		t.Errorf("%s, %v", d.Outcome, d.Refusals)
	}
}

// A request that the record names was approved with the record's key, and no other.
func TestReplacementAfterTheApproval(t *testing.T) {
	w := replacing(goodSigning(Renewal))
	w.record().EKReplacedBy = []string{"b"}
	if d := w.judge(t); d.Outcome != Fail || !slices.Equal(d.Refusals.Reasons(), []Reason{ReasonEKReplaced}) {
		t.Errorf("the key is replaced before it is signed: %s, %v", d.Outcome, d.Refusals)
	}
	w.shows("b")
	if d := w.judge(t); d.Outcome != Fail {
		t.Errorf("another key in a request that was approved: %s, %v", d.Outcome, d.Refusals)
	}
}

func TestServingWithAReplacedEK(t *testing.T) {
	for _, source := range []EKSource{EKInventory, ""} { // "" is trust on first use
		w := goodServing()
		w.record().EKSource = source
		w.machine().EKs = []NamedEK{{EKInventory, "b"}}
		if d := w.judge(t); d.Outcome != ApproveServing || !slices.Equal(d.Warnings.Reasons(), []Reason{ReasonEKChangePending}) {
			t.Errorf("%q, not accepted: %s, %v, warnings %v", source, d.Outcome, d.Refusals, d.Warnings)
		}
		w.record().EKReplacedBy = []string{"b"}
		if d := w.judge(t); d.Outcome != Deny || !slices.Equal(d.Refusals.Reasons(), []Reason{ReasonEKReplaced}) {
			t.Errorf("%q, accepted: %s, %v", source, d.Outcome, d.Refusals)
		}
	}
}

// Which source contradicts a record, and with which keys. At most one source does: a machine has at
// most 16 keys of one source, and a record has room for 16.
func TestContradictedBy(t *testing.T) {
	const a, platform, annotation = ek1, EKPlatform, EKAnnotation
	for name, c := range map[string]struct {
		recorded EKSource
		named    []NamedEK
		by       EKSource
		eks      []string
	}{
		"the same source":                   {annotation, []NamedEK{{annotation, "c"}, {annotation, "b"}, {annotation, "c"}}, annotation, []string{"b", "c"}},
		"another source":                    {EKInventory, []NamedEK{{annotation, "b"}}, "", nil},
		"a source that only warns":          {platform, []NamedEK{{platform, "b"}}, "", nil},
		"first use":                         {"", []NamedEK{{annotation, "b"}}, annotation, []string{"b"}},
		"first use, two sources":            {"", []NamedEK{{EKInventory, "c"}, {annotation, "b"}}, annotation, []string{"b"}},
		"first use, one source only warns":  {"", []NamedEK{{platform, "b"}, {EKInventory, "c"}}, EKInventory, []string{"c"}},
		"first use, only such a source":     {"", []NamedEK{{platform, "b"}}, "", nil},
		"first use, and one names the key":  {"", []NamedEK{{annotation, "b"}, {platform, a}}, "", nil},
		"first use, a source without a key": {"", []NamedEK{{annotation, ""}}, "", nil},
		"first use, nothing is named":       {"", nil, "", nil},
	} {
		w := good(Renewal)
		w.policy.EKSources = []EKSource{annotation, platform, EKInventory}
		w.machine().EKs, w.record().EKSource = c.named, c.recorded
		rules := must(New(w.policy))
		if by, eks := rules.ContradictedBy(w.record(), w.machine()); by != c.by || !slices.Equal(eks, c.eks) {
			t.Errorf("%s: %q, %q", name, by, eks)
		}
		w.machine().UnavailableSources = []EKSource{c.by}
		if by, eks := rules.ContradictedBy(w.record(), w.machine()); c.by != "" && by == c.by {
			t.Errorf("%s, and that source is unavailable: %q", name, eks)
		}
	}
	for recorded, refuses := range map[EKSource]bool{"": true, annotation: true, EKInventory: false, platform: false} {
		w := good(Renewal)
		w.policy.EKSources = []EKSource{annotation, platform}
		if got := must(New(w.policy)).RefusesUnnamed(recorded); got != refuses {
			t.Errorf("RefusesUnnamed(%q): %t", recorded, got)
		}
		w.policy.EKSources = []EKSource{platform}
		if must(New(w.policy)).RefusesUnnamed(recorded) {
			t.Errorf("RefusesUnnamed(%q), although the only source warns", recorded)
		}
	}
}

// A record that was lost, or restored from a backup, is made again in a renewal, where a source
// names the key.
func TestRecordIsRecovered(t *testing.T) {
	lost := func(w *world) { w.in.Records = w.in.Records[:1] }
	restored := func(w *world) {
		w.record().Certificates = []Certificate{{SHA256: "older", ProofUID: "uid-older", NotAfter: testNow.Add(-time.Second)}}
	}
	for _, c := range []struct {
		name string
		bend func(*world)
		want Outcome
		why  Reason
	}{
		{"lost", lost, Approve, ReasonRecordRecovered},
		{"restored", restored, Approve, ReasonRecordRecovered},
		{"restored while a certificate was awaited", func(w *world) { restored(w); w.record().ProofUID = "newer" }, Approve, ReasonRecordRecovered},
		{"restored without any certificate", func(w *world) { w.record().Certificates = nil }, Approve, ReasonRecordRecovered},
		{"neither", func(*world) {}, Approve, ""},
		{"recovered, and the new certificate never arrived", func(w *world) {
			w.record().Certificates = []Certificate{{SHA256: certificate1, ProofUID: "recovered", NotAfter: testNow.Add(recoveredLifetime), Recovered: true}, {SHA256: "c9", ProofUID: "uid-older", NotAfter: testNow.Add(time.Hour)}}
		}, Approve, ""},
		{"recovered, and then restored", func(w *world) {
			w.record().Certificates = []Certificate{{SHA256: "c8", ProofUID: "recovered", NotAfter: testNow.Add(recoveredLifetime), Recovered: true}, {SHA256: "c9", ProofUID: "uid-older", NotAfter: testNow.Add(-time.Second)}}
		}, Approve, ReasonRecordRecovered},

		// Beside a live certificate in the record, another one was not issued by evidence.
		{"a live certificate is in the record", credential(x509Prefix + "00"), Deny, ReasonUnknownCredential},
		{"one that ends at nobody knows when", func(w *world) { w.record().Certificates = []Certificate{{SHA256: "c9", ProofUID: "uid-older"}} }, Deny, ReasonUnknownCredential},

		{"lost, Required", func(w *world) { lost(w); w.policy.Credential = Required }, Deny, ReasonUnknownCredential},
		{"restored, Required", func(w *world) { restored(w); w.policy.Credential = Required }, Deny, ReasonUnknownCredential},
		{"lost, and no source names the key", func(w *world) { lost(w); w.machine().EKs = nil }, Wait, ReasonMachineNotFound},
		{"restored, and no source names the key", func(w *world) { restored(w); w.machine().EKs = nil }, Deny, ReasonUnknownCredential},
		{"restored, and the source names another key", func(w *world) { replacing(w); restored(w) }, Deny, ReasonUnknownCredential},
		{"lost, and the key is denied", func(w *world) {
			lost(w)
			w.in.Evidence = Evidence{EK: ek1, Err: Refusals{{"AttestationEKDenied", "x"}}}
		}, Deny, "AttestationEKDenied"},
		{"lost, by a certificate of another node", func(w *world) { lost(w); user(userNode+"worker-2", groupNodes)(w) }, Deny, ReasonRequesterNotAllowed},
		{"lost, without a certificate", func(w *world) { lost(w); w.in.Request.Spec.Extra = nil }, Deny, ReasonUnknownCredential},
		{"lost, with two", func(w *world) { lost(w); credential(x509Prefix+"a", x509Prefix+"b")(w) }, Deny, ReasonUnknownCredential},
		{"lost, by an empty fingerprint", func(w *world) { lost(w); credential(x509Prefix)(w) }, Deny, ReasonUnknownCredential},
		{"restored, by a certificate of another machine's record", func(w *world) {
			restored(w)
			credential(x509Prefix + w.in.Records[0].Certificates[0].SHA256)(w)
		}, Deny, ReasonUnknownCredential},
		{"lost, and the name is another machine's", func(w *world) { lost(w); w.in.Records[0].NodeName = nodeName }, Deny, ReasonAmbiguousName},
		{"lost, and the sources give another name", func(w *world) { lost(w); w.machine().Names[0].Value = "worker-9" }, Deny, ReasonNodeNameMismatch},
		{"a first request over an existing Node", func(w *world) {
			*w = *good(First)
			w.policy.Credential, w.in.Node = Recover, Present
		}, Deny, ReasonNodeAlreadyRegistered},
	} {
		w := good(Renewal)
		w.policy.Credential = Recover
		c.bend(w)
		d := w.judge(t)
		why := d.Refusals.Reasons()
		if d.Outcome == Approve {
			why = d.Warnings.Reasons()
		}
		if d.Outcome != c.want || len(why) > 1 && d.Outcome == Approve || c.why != "" && (len(why) == 0 || why[0] != c.why) || c.why == "" && len(why) > 0 {
			t.Errorf("%s: %s, %v, warnings %v", c.name, d.Outcome, d.Refusals, d.Warnings)
		}
		if d.Outcome == Approve {
			want := Certificate{SHA256: certificate1, NotAfter: testNow.Add(recoveredLifetime), Recovered: true}
			if got := slices.Contains(d.Grant.Record.Certificates, want); got != (c.why == ReasonRecordRecovered) {
				t.Errorf("%s: the next record has %+v", c.name, d.Grant.Record.Certificates)
			}
			w.approve()
			if d := w.judge(t); d.Outcome != Sign {
				t.Errorf("%s: %s, %v", c.name, d.Outcome, d.Refusals)
			}
		}
	}
	serving := goodServing()
	serving.policy.Credential, serving.record().Certificates = Recover, []Certificate{{SHA256: "older", ProofUID: "uid-older", NotAfter: testNow.Add(-time.Second)}}
	if d := serving.judge(t); d.Outcome != Deny || d.Refusals.Reason() != ReasonUnknownCredential {
		t.Errorf("a serving certificate: %s, %v", d.Outcome, d.Refusals)
	}
}
