// SPDX-License-Identifier: Apache-2.0

package revocation

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

const (
	// pruneDelay is how long after its end a certificate stays on its list: the clock of an API
	// server may be behind.
	pruneDelay = 10 * time.Minute
	// defaultSpread and defaultLimit are for a NodeRevocation that sets none.
	defaultSpread, defaultLimit = 10 * time.Minute, 2 * time.Hour
	// maxWaiting is how many names of nodes a status has.
	maxWaiting = 16
)

// input is what one round decides from.
type input struct {
	now         time.Time
	records     []v1alpha1.NodeAttestation
	suspensions []v1alpha1.NodeSuspension
	// revocations are those of the cluster.
	revocations []v1alpha1.NodeRevocation
	// existing are the lists of the cluster.
	existing []v1alpha1.RevocationSlice
	// inUse has the certificate that each node says its kubelet uses. It is a claim of the node.
	inUse map[string]string
}

// plan is what one round decides.
type plan struct {
	// lists is the content of each list, by number. A list that is empty from now on is there.
	lists map[int32][]v1alpha1.RevokedCertificate
	// marks are the records to change, by name.
	marks map[string]mark
	// suspendedNodes are the names of suspended nodes.
	suspendedNodes []string
	// announcement is what nodes read about renewals.
	announcement attestation.Announcement
	// statuses are those of the revocations, by name.
	statuses map[string]revocationStatus
	// asksNodes are the nodes whose report the next round needs.
	asksNodes []string
	// active says that the next round must come soon, without an event.
	active bool
}

// mark is what a record is to say.
type mark struct {
	// revoked are the certificates on a list.
	revoked map[string]bool
	// by is the revocation that revoked certificates of this record, nil if only a suspension did, or
	// the revocation is deleted.
	by *v1alpha1.NodeRevocation
	// suspension holds for the machine, nil if none does.
	suspension *v1alpha1.NodeSuspension
}

// revocationStatus is how far a revocation has come.
type revocationStatus struct {
	nodes, renewed, revoked int32
	waiting                 []string
	complete                bool
}

// planner makes a plan.
type planner struct {
	input
	plan
	// entries are the certificates that are on a list from now on. numbers has the list of those that
	// were on one before.
	entries map[string]v1alpha1.RevokedCertificate
	numbers map[string]int32
	// suspended has the suspension of an endorsement key.
	suspended map[string]*v1alpha1.NodeSuspension
}

// newPlan decides. It is pure.
func newPlan(in input) plan {
	p := &planner{
		input:   in,
		plan:    plan{lists: map[int32][]v1alpha1.RevokedCertificate{}, marks: map[string]mark{}, statuses: map[string]revocationStatus{}},
		entries: map[string]v1alpha1.RevokedCertificate{}, numbers: map[string]int32{},
		suspended: map[string]*v1alpha1.NodeSuspension{},
	}
	for i := range p.suspensions {
		p.suspended[p.suspensions[i].Spec.EK] = &p.suspensions[i]
	}
	p.keep()
	for i := range p.records {
		p.restore(&p.records[i])
		p.suspend(&p.records[i])
	}
	for i := range p.revocations {
		p.revoke(&p.revocations[i])
	}
	for i := range p.records {
		p.mark(&p.records[i])
	}
	p.fill()
	p.nameSuspended()
	return p.plan
}

// keep takes over what is on the lists, until it has ended. A certificate that is on two lists, as
// after a crash between two writes, stays on the first one.
func (p *planner) keep() {
	slices.SortFunc(p.existing, func(a, b v1alpha1.RevocationSlice) int { return cmp.Compare(a.Spec.Number, b.Spec.Number) })
	for _, list := range p.existing {
		p.lists[list.Spec.Number] = nil
		for _, c := range list.Spec.Certificates {
			if _, ok := p.entries[c.SHA256]; ok || p.now.After(c.NotAfter.Add(pruneDelay)) {
				continue
			}
			// After a suspension ends, its certificates stay revoked. They may ask for new ones again.
			c.Suspended = p.suspended[c.EK] != nil
			p.entries[c.SHA256], p.numbers[c.SHA256] = c, list.Spec.Number
		}
	}
}

// add puts a certificate on a list.
func (p *planner) add(record *v1alpha1.NodeAttestation, c *v1alpha1.IssuedCertificate, ek, revocation string) {
	entry, known := p.entries[c.SHA256]
	if !known {
		entry = v1alpha1.RevokedCertificate{SHA256: c.SHA256, NotAfter: c.NotAfter, NodeName: record.Spec.NodeName, EK: ek, Revocation: revocation}
	}
	if p.suspended[ek] != nil {
		entry.EK, entry.Suspended = ek, true
	}
	p.entries[c.SHA256] = entry
}

// restore adds certificates that are marked as revoked in their record, and are on no list:
// somebody deleted the list.
func (p *planner) restore(record *v1alpha1.NodeAttestation) {
	for _, c := range p.live(record) {
		if _, ok := p.entries[c.SHA256]; !ok && c.Revoked {
			p.add(record, c, ekOfCertificate(record, c), "")
		}
	}
}

// ekOfCertificate returns the endorsement key that a certificate was issued to, empty if that is not
// known.
func ekOfCertificate(record *v1alpha1.NodeAttestation, c *v1alpha1.IssuedCertificate) string {
	if c.FormerEK {
		return ""
	}
	return ekOf(record)
}

// live are the certificates of a record that have not ended.
func (p *planner) live(record *v1alpha1.NodeAttestation) (live []*v1alpha1.IssuedCertificate) {
	for i := range record.Status.Certificates {
		if c := &record.Status.Certificates[i]; p.now.Before(c.NotAfter.Add(pruneDelay)) {
			live = append(live, c)
		}
	}
	return live
}

// ekOf returns the endorsement key in a record, empty if there is none.
func ekOf(record *v1alpha1.NodeAttestation) string {
	if record.Spec.EK == nil {
		return ""
	}
	return record.Spec.EK.Fingerprint
}

// suspend puts the certificates of a suspended machine on a list. A record does not say which of
// several former keys a certificate was issued to. So each former certificate counts if one of the
// former keys is suspended.
func (p *planner) suspend(record *v1alpha1.NodeAttestation) {
	former := ""
	for _, ek := range record.Status.EKHistory {
		if p.suspended[ek.Fingerprint] != nil {
			former = ek.Fingerprint
		}
	}
	for _, c := range p.live(record) {
		switch {
		case p.suspended[ekOf(record)] != nil:
			p.add(record, c, ekOf(record), "")
			p.active = true
		case c.FormerEK && former != "":
			p.add(record, c, former, "")
		}
	}
}

// revoke applies one revocation.
func (p *planner) revoke(r *v1alpha1.NodeRevocation) {
	if meta.IsStatusConditionTrue(r.Status.Conditions, v1alpha1.ConditionComplete) {
		return
	}
	before := r.CreationTimestamp.Time
	if r.Spec.IssuedBefore != nil {
		before = r.Spec.IssuedBefore.Time
	}
	selected := map[string]bool{}
	for _, name := range r.Spec.Nodes {
		selected[name] = true
	}
	status := revocationStatus{complete: true}
	for i := range p.records {
		record := &p.records[i]
		if r.Spec.All || selected[record.Spec.NodeName] {
			p.revokeRecord(r, record, before, &status)
		}
	}
	slices.Sort(status.waiting)
	status.waiting = status.waiting[:min(len(status.waiting), maxWaiting)]
	p.statuses[r.Name] = status
	if status.complete {
		return
	}
	p.active = true
	renewal := attestation.Renewal{Name: r.Name, IssuedBefore: before, All: r.Spec.All, Nodes: r.Spec.Nodes, Start: r.CreationTimestamp.Time}
	if r.Spec.Mode == v1alpha1.RevokeAfterRenewal {
		renewal.SpreadSeconds = int(seconds(r.Spec.SpreadSeconds, defaultSpread) / time.Second)
	}
	p.announcement.Renewals = append(p.announcement.Renewals, renewal)
}

// revokeRecord applies a revocation to the certificates of one machine.
func (p *planner) revokeRecord(r *v1alpha1.NodeRevocation, record *v1alpha1.NodeAttestation, before time.Time, status *revocationStatus) {
	var old, newer []*v1alpha1.IssuedCertificate
	for _, c := range p.live(record) {
		switch {
		case c.Requested == nil || c.Requested.Time.Before(before):
			old = append(old, c)
		case !c.FormerEK:
			newer = append(newer, c)
		}
	}
	if len(old) == 0 && len(newer) == 0 {
		return
	}
	status.nodes++
	if len(newer) > 0 {
		status.renewed++
	} else {
		status.waiting, status.complete = append(status.waiting, record.Spec.NodeName), false
	}
	now := r.Spec.Mode == v1alpha1.RevokeImmediately || !p.now.Before(r.CreationTimestamp.Add(seconds(r.Spec.LimitSeconds, defaultLimit)))
	if !now && len(newer) > 0 && len(old) > 0 {
		now = slices.ContainsFunc(newer, func(c *v1alpha1.IssuedCertificate) bool { return c.SHA256 == p.inUse[record.Spec.NodeName] })
		if !now {
			p.asksNodes = append(p.asksNodes, record.Spec.NodeName)
		}
	}
	for _, c := range old {
		if _, done := p.entries[c.SHA256]; done {
			status.revoked++
			continue
		}
		if !now {
			status.complete = false
			continue
		}
		p.add(record, c, ekOfCertificate(record, c), r.Name)
		status.revoked++
	}
}

// seconds returns a duration that an object has in seconds.
func seconds(value *int32, otherwise time.Duration) time.Duration {
	if value == nil {
		return otherwise
	}
	return time.Duration(*value) * time.Second
}

// mark says what a record is to say, if it does not say that yet.
func (p *planner) mark(record *v1alpha1.NodeAttestation) {
	m := mark{revoked: map[string]bool{}, suspension: p.suspended[ekOf(record)]}
	changed := (m.suspension != nil) != (record.Status.Suspension != nil)
	for _, c := range record.Status.Certificates {
		entry, ok := p.entries[c.SHA256]
		if !ok {
			continue
		}
		m.revoked[c.SHA256] = true
		changed = changed || !c.Revoked
		if i := slices.IndexFunc(p.revocations, func(r v1alpha1.NodeRevocation) bool { return r.Name == entry.Revocation }); i >= 0 && !c.Revoked {
			m.by = &p.revocations[i]
		}
	}
	if changed {
		p.marks[record.Name] = m
	}
}

// nameSuspended collects the names of suspended nodes: those that have records or certificates, and
// those that suspensions name.
func (p *planner) nameSuspended() {
	names := map[string]bool{}
	for _, s := range p.suspensions {
		names[s.Spec.NodeName] = true
	}
	for i := range p.records {
		if p.suspended[ekOf(&p.records[i])] != nil {
			names[p.records[i].Spec.NodeName] = true
		}
	}
	for _, c := range p.entries {
		if c.Suspended {
			names[c.NodeName] = true
		}
	}
	delete(names, "")
	p.suspendedNodes = slices.Sorted(maps.Keys(names))
}

// fill distributes the certificates over the lists. One that is on a list stays there. If that list
// has no policy, the certificate moves to a list with a policy as soon as there is room.
func (p *planner) fill() {
	used := map[int32]int{}
	for _, number := range p.numbers {
		used[number]++
	}
	room := func() int32 {
		number := int32(1)
		for used[number] >= SliceCapacity {
			number++
		}
		return number
	}
	for _, sum := range slices.Sorted(maps.Keys(p.entries)) {
		number := p.numbers[sum]
		if to := room(); number == 0 || number > Policies && to <= Policies {
			used[to]++
			if number > 0 {
				used[number]--
			}
			number = to
		}
		p.lists[number] = append(p.lists[number], p.entries[sum])
	}
}
