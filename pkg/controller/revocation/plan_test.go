// SPDX-License-Identifier: Apache-2.0

package revocation

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

var noon = time.Date(2026, 11, 24, 12, 0, 0, 0, time.UTC)

// digits returns a fingerprint that begins with a name.
func digits(name string) string {
	hex := fmt.Sprintf("%x", name)
	return hex + strings.Repeat("0", 64-len(hex))
}

// record returns the record of a machine that is node name, with certificates.
func record(name string, certificates ...v1alpha1.IssuedCertificate) v1alpha1.NodeAttestation {
	r := v1alpha1.NodeAttestation{ObjectMeta: metav1.ObjectMeta{Name: "machine-" + name, UID: types.UID("uid-" + name)}}
	r.Spec.NodeName, r.Spec.EK = name, &v1alpha1.EndorsementKey{Fingerprint: digits("ek-" + name)}
	r.Status.Certificates = certificates
	return r
}

// issued returns a certificate of an hour that was requested some time before noon.
func issued(name string, ago time.Duration) v1alpha1.IssuedCertificate {
	requested := metav1.NewTime(noon.Add(-ago))
	return v1alpha1.IssuedCertificate{SHA256: digits(name), Requested: &requested, NotAfter: metav1.NewTime(noon.Add(time.Hour))}
}

func suspension(ek string) v1alpha1.NodeSuspension {
	return v1alpha1.NodeSuspension{ObjectMeta: metav1.ObjectMeta{Name: "ek-" + ek}, Spec: v1alpha1.NodeSuspensionSpec{EK: ek, Reason: "stolen"}}
}

// revocation returns a revocation that was created at noon.
func revocation(mode v1alpha1.RevocationMode, nodes ...string) v1alpha1.NodeRevocation {
	r := v1alpha1.NodeRevocation{ObjectMeta: metav1.ObjectMeta{Name: "r", CreationTimestamp: metav1.NewTime(noon)}}
	r.Spec = v1alpha1.NodeRevocationSpec{Nodes: nodes, All: len(nodes) == 0, Mode: mode, Reason: "leaked"}
	return r
}

// listed returns the lists of a plan, as the next round finds them.
func (p plan) listed() (lists []v1alpha1.RevocationSlice) {
	for number, list := range p.lists {
		l := v1alpha1.RevocationSlice{Spec: list}
		l.Spec.Number = number
		lists = append(lists, l)
	}
	return lists
}

// current returns the names of the current certificates on lists.
func (p plan) current() (names []string) {
	for _, list := range p.lists {
		for _, c := range list.Current {
			var text []byte
			_, _ = fmt.Sscanf(c.SHA256[:6], "%x", &text)
			names = append(names, string(text))
		}
	}
	slices.Sort(names)
	return names
}

// revoked returns the names of the certificates on lists, those of suspended machines with a mark.
func (p plan) revoked() (names []string) {
	for _, list := range p.lists {
		for _, c := range list.Certificates {
			name := strings.TrimRight(c.SHA256, "0")
			var text []byte
			if _, err := fmt.Sscanf(name+strings.Repeat("0", len(name)%2), "%x", &text); err != nil {
				text = []byte(name)
			}
			if c.Suspended {
				text = append(text, '!')
			}
			names = append(names, string(text))
		}
	}
	slices.Sort(names)
	return names
}

func TestRevokeImmediately(t *testing.T) {
	t.Parallel()
	old, fresh, ended, unknown := issued("old", time.Hour), issued("new", -time.Second), issued("end", time.Hour), issued("unk", 0)
	ended.NotAfter = metav1.NewTime(noon.Add(-pruneDelay - time.Second))
	unknown.Requested = nil
	in := input{
		now:         noon.Add(time.Second),
		records:     []v1alpha1.NodeAttestation{record("a", old, ended, fresh), record("b", unknown), record("c", issued("oth", time.Hour))},
		revocations: []v1alpha1.NodeRevocation{revocation(v1alpha1.RevokeImmediately, "a", "b", "unknown")},
	}
	p := newPlan(in)
	if got := p.revoked(); !slices.Equal(got, []string{"old", "unk"}) {
		t.Errorf("revoked: %q", got)
	}
	s := p.statuses["r"]
	if s.complete || s.nodes != 2 || s.renewed != 1 || s.revoked != 2 || !slices.Equal(s.waiting, []string{"b"}) || !p.active {
		t.Errorf("%+v, active %v", s, p.active)
	}
	if r := p.announcement.Renewals; len(r) != 1 || !r[0].IssuedBefore.Equal(noon) || r[0].SpreadSeconds != 0 || r[0].All || len(r[0].Nodes) != 3 {
		t.Errorf("announced: %+v", r)
	}
	if m, ok := p.marks["machine-a"]; !ok || !m.revoked[old.SHA256] || m.revoked[fresh.SHA256] || m.by == nil || m.suspension != nil {
		t.Errorf("%+v", m)
	}
	if _, ok := p.marks["machine-c"]; ok {
		t.Error("a record of another node is marked")
	}

	// The record is deleted, and so is the revocation. The list keeps the certificates until they
	// end.
	in.records, in.revocations, in.existing = nil, nil, p.listed()
	for after, want := range map[time.Duration]int{0: 2, time.Hour + pruneDelay: 2, time.Hour + pruneDelay + time.Second: 0} {
		in.now = noon.Add(after)
		if got := newPlan(in); len(got.revoked()) != want {
			t.Errorf("after %s: %q", after, got.revoked())
		} else if _, ok := got.lists[1]; !ok {
			t.Errorf("after %s the list is not written", after)
		}
	}
}

func TestRevocationEnds(t *testing.T) {
	t.Parallel()
	in := input{
		now:         noon.Add(time.Minute),
		records:     []v1alpha1.NodeAttestation{record("a", issued("old", time.Hour), issued("new", -time.Second))},
		revocations: []v1alpha1.NodeRevocation{revocation(v1alpha1.RevokeImmediately)},
	}
	p := newPlan(in)
	if s := p.statuses["r"]; !s.complete || len(p.announcement.Renewals) > 0 || p.active {
		t.Errorf("%+v, announced %+v", s, p.announcement)
	}
	in.revocations[0].Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionComplete, Status: metav1.ConditionTrue}}
	in.records = append(in.records, record("b", issued("b", time.Hour)))
	if got := newPlan(in).revoked(); len(got) > 0 {
		t.Errorf("a revocation that is complete revokes: %q", got)
	}
}

func TestRevokeAfterRenewal(t *testing.T) {
	t.Parallel()
	old, fresh := issued("old", time.Hour), issued("new", -time.Minute)
	limit := int32(600)
	r := revocation(v1alpha1.RevokeAfterRenewal, "a")
	r.Spec.LimitSeconds = &limit
	for name, c := range map[string]struct {
		after        time.Duration
		certificates []v1alpha1.IssuedCertificate
		inUse        string
		revoked      bool
		complete     bool
		asks         bool
	}{
		"not renewed":                       {time.Minute, []v1alpha1.IssuedCertificate{old}, "", false, false, false},
		"not renewed, and the old in use":   {time.Minute, []v1alpha1.IssuedCertificate{old}, old.SHA256, false, false, false},
		"renewed, and nothing known of use": {2 * time.Minute, []v1alpha1.IssuedCertificate{old, fresh}, "", false, false, true},
		"renewed, and the old in use":       {2 * time.Minute, []v1alpha1.IssuedCertificate{old, fresh}, old.SHA256, false, false, true},
		"renewed, and nonsense in use":      {2 * time.Minute, []v1alpha1.IssuedCertificate{old, fresh}, "abc", false, false, true},
		"the new one is in use":             {2 * time.Minute, []v1alpha1.IssuedCertificate{old, fresh}, fresh.SHA256, true, true, false},
		"shortly before the limit":          {10*time.Minute - time.Second, []v1alpha1.IssuedCertificate{old}, "", false, false, false},
		"at the limit":                      {10 * time.Minute, []v1alpha1.IssuedCertificate{old}, "", true, false, false},
		"at the limit, renewed":             {10 * time.Minute, []v1alpha1.IssuedCertificate{old, fresh}, "", true, true, false},
		"only new ones":                     {2 * time.Minute, []v1alpha1.IssuedCertificate{fresh}, "", false, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPlan(input{
				now: noon.Add(c.after), records: []v1alpha1.NodeAttestation{record("a", c.certificates...)},
				revocations: []v1alpha1.NodeRevocation{r}, inUse: map[string]string{"a": c.inUse},
			})
			if got := len(p.revoked()) == 1; got != c.revoked {
				t.Errorf("revoked: %q", p.revoked())
			}
			if p.statuses["r"].complete != c.complete || (len(p.reportsNeeded) > 0) != c.asks || (len(p.announcement.Renewals) == 0) != c.complete {
				t.Errorf("%+v, asks %q, announced %+v", p.statuses["r"], p.reportsNeeded, p.announcement)
			}
		})
	}
	if p := newPlan(input{now: noon, records: []v1alpha1.NodeAttestation{record("a", old)}, revocations: []v1alpha1.NodeRevocation{r}}); p.announcement.Renewals[0].SpreadSeconds != 600 {
		t.Errorf("the spread is not the default: %+v", p.announcement)
	}
}

// A certificate of the key that was replaced does not show that the node has renewed.
func TestFormerKeysDoNotCount(t *testing.T) {
	t.Parallel()
	old, former := issued("old", time.Hour), issued("for", -time.Minute)
	former.FormerEK = true
	p := newPlan(input{
		now: noon.Add(2 * time.Minute), records: []v1alpha1.NodeAttestation{record("a", old, former)},
		revocations: []v1alpha1.NodeRevocation{revocation(v1alpha1.RevokeAfterRenewal)}, inUse: map[string]string{"a": former.SHA256},
	})
	if len(p.revoked()) > 0 || p.statuses["r"].renewed > 0 {
		t.Errorf("%q, %+v", p.revoked(), p.statuses["r"])
	}
}

func TestSuspension(t *testing.T) {
	t.Parallel()
	a := record("a", issued("one", time.Hour), issued("two", time.Minute))
	in := input{now: noon, records: []v1alpha1.NodeAttestation{a, record("b", issued("oth", time.Hour))}, suspensions: []v1alpha1.NodeSuspension{suspension(a.Spec.EK.Fingerprint)}}
	p := newPlan(in)
	if got := p.revoked(); !slices.Equal(got, []string{"one!", "two!"}) || !p.active {
		t.Fatalf("suspended: %q", got)
	}
	if m := p.marks["machine-a"]; m.suspension == nil || len(m.revoked) != 2 {
		t.Errorf("%+v", m)
	}
	// The record is deleted, and the machine gets another one under another name.
	in.existing, in.records = p.listed(), []v1alpha1.NodeAttestation{record("c", issued("new", 0))}
	in.records[0].Spec.EK.Fingerprint = a.Spec.EK.Fingerprint
	p = newPlan(in)
	if got := p.revoked(); !slices.Equal(got, []string{"new!", "one!", "two!"}) {
		t.Errorf("with another record: %q", got)
	}
	// After the machine is resumed, its suspended certificates stay revoked.
	in.existing, in.suspensions = p.listed(), nil
	in.records[0].Status.Suspension = &v1alpha1.AppliedSuspension{}
	p = newPlan(in)
	if got := p.revoked(); !slices.Equal(got, []string{"new", "one", "two"}) {
		t.Errorf("resumed: %q", got)
	}
	if m, ok := p.marks["machine-c"]; !ok || m.suspension != nil {
		t.Errorf("resumed: %+v", m)
	}
}

// The replaced board is stolen. The certificates that were issued to it are refused. The current
// board continues.
func TestSuspensionOfAFormerKey(t *testing.T) {
	t.Parallel()
	former := issued("for", time.Hour)
	former.FormerEK = true
	a := record("a", former, issued("now", time.Minute))
	a.Status.EKHistory = []v1alpha1.FormerEK{{Fingerprint: digits("stolen")}}
	in := input{now: noon, records: []v1alpha1.NodeAttestation{a}, suspensions: []v1alpha1.NodeSuspension{suspension(digits("stolen"))}}
	p := newPlan(in)
	if got := p.revoked(); !slices.Equal(got, []string{"for!"}) {
		t.Errorf("%q", got)
	}
	in.existing, in.suspensions = p.listed(), nil
	if got := newPlan(in).revoked(); !slices.Equal(got, []string{"for"}) {
		t.Errorf("resumed: %q", got)
	}
}

// An operator deletes a list. It is restored from the records.
func TestDeletedListIsRestored(t *testing.T) {
	t.Parallel()
	revoked := issued("rev", time.Hour)
	revoked.Revoked = true
	p := newPlan(input{now: noon, records: []v1alpha1.NodeAttestation{record("a", revoked, issued("oth", time.Minute))}})
	if got := p.revoked(); !slices.Equal(got, []string{"rev"}) {
		t.Errorf("%q", got)
	}
}

func TestLists(t *testing.T) {
	t.Parallel()
	var records []v1alpha1.NodeAttestation
	for i := range PolicyCount*SliceCapacity + 1 {
		records = append(records, record(fmt.Sprintf("n%05d", i), issued(fmt.Sprintf("c%05d", i), time.Hour)))
	}
	in := input{now: noon.Add(time.Second), records: records, revocations: []v1alpha1.NodeRevocation{revocation(v1alpha1.RevokeImmediately)}}
	p := newPlan(in)
	for number := int32(1); number <= PolicyCount; number++ {
		if got := len(p.lists[number].Certificates); got != SliceCapacity {
			t.Errorf("list %d has %d", number, got)
		}
	}
	if got := len(p.lists[PolicyCount+1].Certificates); got != 1 {
		t.Errorf("beyond the policies there are %d", got)
	}
	if got := len(p.statuses["r"].waiting); got != maxWaiting {
		t.Errorf("%d names", got)
	}
	// Nothing moves without a cause, and the one without a policy moves as soon as one has ended.
	in.existing = p.listed()
	again := newPlan(in)
	for number, list := range p.lists {
		if !slices.Equal(list.Certificates, again.lists[number].Certificates) {
			t.Errorf("list %d has changed", number)
		}
	}
	ended := p.lists[3].Certificates[7]
	for i := range in.existing {
		for j := range in.existing[i].Spec.Certificates {
			if c := &in.existing[i].Spec.Certificates[j]; c.SHA256 == ended.SHA256 {
				c.NotAfter = metav1.NewTime(noon.Add(-time.Hour))
			}
		}
	}
	in.records, in.revocations = nil, nil
	moved := newPlan(in)
	if len(moved.lists[PolicyCount+1].Certificates) != 0 || len(moved.lists[3].Certificates) != SliceCapacity || len(moved.revoked()) != PolicyCount*SliceCapacity {
		t.Errorf("%d are left beyond the policies", len(moved.lists[PolicyCount+1].Certificates))
	}
	// A crash between two writes leaves a certificate on two lists.
	in.existing = moved.listed()
	for i := range in.existing {
		if in.existing[i].Spec.Number == PolicyCount+1 {
			in.existing[i].Spec.Certificates = p.lists[PolicyCount+1].Certificates
		}
	}
	if got := newPlan(in); len(got.lists[PolicyCount+1].Certificates) != 0 || len(got.revoked()) != PolicyCount*SliceCapacity {
		t.Errorf("it is on two lists: %d", len(got.revoked()))
	}
}

// The policy of a list allows the certificates of its nodes that are not revoked, and no others.
// They stay on the list if the record is lost, and can be revoked then, too.
func TestCurrentCertificates(t *testing.T) {
	t.Parallel()
	in := input{
		now: noon.Add(time.Second),
		records: []v1alpha1.NodeAttestation{
			record("a", issued("old", time.Hour), issued("new", -time.Second)), record("b", issued("oth", time.Hour)),
		},
		revocations: []v1alpha1.NodeRevocation{revocation(v1alpha1.RevokeImmediately, "a")},
	}
	p := newPlan(in)
	if got := p.current(); !slices.Equal(got, []string{"new"}) {
		t.Fatalf("current: %q", got)
	}
	in.existing, in.revocations = p.listed(), nil
	in.records[0].Status.Certificates = append(in.records[0].Status.Certificates, issued("two", -2*time.Second))
	if got := newPlan(in).current(); !slices.Equal(got, []string{"new", "two"}) {
		t.Errorf("renewed: %q", got)
	}
	// the record is lost, and then recreated
	in.records = in.records[1:]
	if got := newPlan(in).current(); !slices.Equal(got, []string{"new"}) {
		t.Errorf("without the record: %q", got)
	}
	in.records = append(in.records, record("a", issued("tri", -3*time.Second)))
	if got := newPlan(in).current(); !slices.Equal(got, []string{"new", "tri"}) {
		t.Errorf("with another record: %q", got)
	}
	// the node is revoked again, without a record
	in.records = in.records[:1]
	again := revocation(v1alpha1.RevokeImmediately, "a")
	again.CreationTimestamp = metav1.NewTime(noon.Add(time.Minute))
	in.now, in.revocations = noon.Add(time.Minute), []v1alpha1.NodeRevocation{again}
	p = newPlan(in)
	if got := p.revoked(); !slices.Equal(got, []string{"new", "old"}) || len(p.current()) > 0 {
		t.Errorf("revoked again: %q, current: %q", got, p.current())
	}
	if s := p.statuses["r"]; s.complete || s.nodes != 1 || s.revoked != 1 || len(p.marks) > 0 {
		t.Errorf("revoked again: %+v, marks %+v", s, p.marks)
	}
	// after the end of the revoked certificate nothing of the node is refused
	in.revocations, in.now = nil, noon.Add(time.Hour+pruneDelay+time.Second)
	if p := newPlan(in); len(p.revoked())+len(p.current()) > 0 {
		t.Errorf("ended: %q, %q", p.revoked(), p.current())
	}
}

// A list with too many current certificates keeps the newest of each node.
func TestTooManyCurrentCertificates(t *testing.T) {
	t.Parallel()
	in := input{now: noon.Add(time.Hour / 2), revocations: []v1alpha1.NodeRevocation{revocation(v1alpha1.RevokeImmediately)}}
	for i := range SliceCapacity {
		r := record(fmt.Sprintf("n%03d", i), issued(fmt.Sprintf("o%03d", i), time.Hour))
		for k := range 8 {
			r.Status.Certificates = append(r.Status.Certificates, issued(fmt.Sprintf("c%03d-%d", i, k), -time.Duration(k)*time.Second))
		}
		in.records = append(in.records, r)
	}
	list := newPlan(in).lists[1]
	if len(list.Current) != maxCurrent {
		t.Fatalf("%d", len(list.Current))
	}
	for i, c := range list.Current {
		if want := digits(fmt.Sprintf("c%03d-%d", i/3, 7-i%3)); c.SHA256 != want {
			t.Fatalf("%d is %s, want %s", i, c.SHA256, want)
		}
	}
}

// A list takes fewer certificates if the names of their nodes are long.
func TestLongNames(t *testing.T) {
	t.Parallel()
	in := input{now: noon.Add(time.Second), revocations: []v1alpha1.NodeRevocation{revocation(v1alpha1.RevokeImmediately)}}
	for i := range SliceCapacity {
		in.records = append(in.records, record(fmt.Sprintf("n%03d", i), issued(fmt.Sprintf("c%03d", i), time.Hour)))
		in.records[i].Spec.NodeName = strings.Repeat("x", 249) + fmt.Sprintf("-%03d", i)
	}
	p := newPlan(in)
	if len(p.lists) != 3 {
		t.Errorf("%d lists", len(p.lists))
	}
	for number, list := range p.lists {
		if spec, err := RenderPolicy(list, signers); err != nil || len(spec.MatchConditions[0].Expression) > 100_000 {
			t.Errorf("list %d: %v, %d", number, err, len(spec.MatchConditions[0].Expression))
		}
	}
	in.existing = p.listed()
	if again := newPlan(in); len(again.lists) != 3 || len(again.lists[1].Certificates) != len(p.lists[1].Certificates) {
		t.Error("they move without a cause")
	}
}

// Tokens are refused by the name of their node. Another machine that has that name now keeps its
// tokens.
func TestNamesOfSuspendedNodes(t *testing.T) {
	t.Parallel()
	a, b := record("a", issued("one", time.Hour)), record("b")
	in := input{now: noon, records: []v1alpha1.NodeAttestation{a, b}, suspensions: []v1alpha1.NodeSuspension{
		suspension(digits("ek-a")), suspension(digits("lost")), suspension(digits("replaced")),
	}}
	in.suspensions[1].Spec.NodeName, in.suspensions[2].Spec.NodeName = "lost", "b"
	p := newPlan(in)
	if !slices.Equal(p.suspendedNodes, []string{"a", "lost"}) || !p.lists[1].Certificates[0].NodeSuspended {
		t.Errorf("%q, %+v", p.suspendedNodes, p.lists)
	}
	// machine b replaces machine a: the certificate of a stays suspended, and the node is not
	in.existing, in.records = p.listed(), in.records[1:]
	in.records[0].Spec.NodeName = "a"
	p = newPlan(in)
	if c := p.lists[1].Certificates[0]; !slices.Equal(p.suspendedNodes, []string{"b", "lost"}) || c.NodeSuspended || !c.Suspended {
		t.Errorf("%q, %+v", p.suspendedNodes, p.lists)
	}
}

// A machine is suspended after its record was deleted, and after another machine got its name. Its
// current certificates are refused, and those of the other machine are not.
func TestSuspensionWithoutRecord(t *testing.T) {
	t.Parallel()
	a := record("a", issued("old", time.Hour), issued("new", -time.Second))
	in := input{now: noon.Add(time.Minute), records: []v1alpha1.NodeAttestation{a}, revocations: []v1alpha1.NodeRevocation{revocation(v1alpha1.RevokeImmediately)}}
	in.existing = newPlan(in).listed()
	in.revocations, in.suspensions = nil, []v1alpha1.NodeSuspension{suspension(a.Spec.EK.Fingerprint)}
	other := record("b", issued("oth", -time.Second))
	other.Spec.NodeName = "a"
	for name, records := range map[string][]v1alpha1.NodeAttestation{"no record": nil, "another machine": {other}} {
		in.records = records
		p := newPlan(in)
		if got := p.revoked(); !slices.Equal(got, []string{"new!", "old!"}) {
			t.Errorf("%s: %q", name, got)
		}
		if got := len(p.current()); got != len(records) {
			t.Errorf("%s: current: %q", name, p.current())
		}
	}
	// a list of an earlier release does not say which key a certificate was issued to
	in.records = nil
	in.existing[0].Spec.Current[0].EK = ""
	if got := newPlan(in).revoked(); !slices.Equal(got, []string{"old!"}) {
		t.Errorf("without a key: %q", got)
	}
	in.suspensions[0].Spec.NodeName = "a"
	if got := newPlan(in).revoked(); !slices.Equal(got, []string{"new!", "old!"}) {
		t.Errorf("by the name of the node: %q", got)
	}
}

// Two records with one node name do not put a certificate on a list twice.
func TestCurrentCertificateOfTwoRecords(t *testing.T) {
	t.Parallel()
	in := input{
		now:         noon.Add(time.Minute),
		records:     []v1alpha1.NodeAttestation{record("a", issued("old", time.Hour), issued("new", -time.Second))},
		revocations: []v1alpha1.NodeRevocation{revocation(v1alpha1.RevokeImmediately)},
	}
	in.existing, in.revocations = newPlan(in).listed(), nil
	in.records = []v1alpha1.NodeAttestation{record("a"), record("b")}
	in.records[1].Spec.NodeName = "a"
	if got := newPlan(in).current(); !slices.Equal(got, []string{"new"}) {
		t.Errorf("%q", got)
	}
}

// enforcedOn returns the number of the first list with a policy that names a node, 0 if there is
// none.
func (p plan) enforcedOn(node string) int32 {
	for number := int32(1); number <= PolicyCount; number++ {
		if slices.ContainsFunc(p.lists[number].Certificates, func(c v1alpha1.RevokedCertificate) bool { return c.NodeName == node }) {
			return number
		}
	}
	return 0
}

// A policy refuses each certificate of a node that is not current, so one entry enforces the node.
// Nodes with many revoked certificates leave room for all others, before and after these.
func TestManyCertificatesOfFewNodes(t *testing.T) {
	t.Parallel()
	flood := func(prefix string) (hostile []v1alpha1.NodeAttestation) {
		for i := range 157 {
			r := record(fmt.Sprintf("%s%03d", prefix, i))
			for k := range 64 {
				c := issued(fmt.Sprintf("%s%03d-%02d", prefix, i, k), time.Hour)
				c.NotAfter = metav1.NewTime(noon.Add(90*24*time.Hour + time.Duration(k)*time.Second))
				r.Status.Certificates = append(r.Status.Certificates, c)
			}
			hostile = append(hostile, r)
		}
		return hostile
	}
	in := input{now: noon.Add(time.Second), records: flood("a"), revocations: []v1alpha1.NodeRevocation{revocation(v1alpha1.RevokeImmediately)}}
	in.existing = newPlan(in).listed()
	in.records = append(in.records, record("honest", issued("leaked", time.Hour)))
	p := newPlan(in)
	was := p.enforcedOn("honest")
	if was == 0 || len(p.unenforced) > 0 {
		t.Fatalf("no policy refuses the honest node's key; not enforced: %d nodes", len(p.unenforced))
	}
	in.existing = p.listed()
	in.records = append(in.records, flood("b")...)
	p = newPlan(in)
	if got := p.enforcedOn("honest"); got != was {
		t.Errorf("later nodes move the honest node from list %d to %d", was, got)
	}
	for _, r := range in.records {
		if p.enforcedOn(r.Spec.NodeName) == 0 {
			t.Fatalf("no policy refuses node %s", r.Spec.NodeName)
		}
	}
	if got, want := len(p.revoked()), 2*157*64+1; got != want {
		t.Errorf("%d certificates are on lists, want %d", got, want)
	}
	// a restart reads the same lists, and changes none
	in.existing = p.listed()
	for number, list := range newPlan(in).lists {
		if !slices.Equal(list.Certificates, p.lists[number].Certificates) {
			t.Errorf("list %d changes without a cause", number)
		}
	}
}

// A node keeps its place when its entry ends and another certificate of it is still revoked.
func TestNodeKeepsItsPlace(t *testing.T) {
	t.Parallel()
	short, long := issued("one", time.Hour), issued("two", time.Hour)
	long.NotAfter = metav1.NewTime(noon.Add(24 * time.Hour))
	a := record("a", short)
	in := input{now: noon.Add(time.Second), records: []v1alpha1.NodeAttestation{a}, revocations: []v1alpha1.NodeRevocation{revocation(v1alpha1.RevokeImmediately)}}
	in.existing = newPlan(in).listed()
	in.records[0].Status.Certificates = append(in.records[0].Status.Certificates, long)
	for i := range PolicyCount*SliceCapacity + 1 {
		in.records = append(in.records, record(fmt.Sprintf("n%05d", i), issued(fmt.Sprintf("c%05d", i), time.Hour)))
		in.records[i+1].Status.Certificates[0].NotAfter = long.NotAfter
	}
	p := newPlan(in)
	if got := p.unenforced; len(got) != 2 || slices.Contains(got, "a") {
		t.Fatalf("not enforced: %q", got)
	}
	in.existing, in.now = p.listed(), noon.Add(time.Hour+pruneDelay+time.Second)
	if p = newPlan(in); p.enforcedOn("a") != 1 || len(p.unenforced) != 2 {
		t.Errorf("on list %d; not enforced: %q", p.enforcedOn("a"), p.unenforced)
	}
}
