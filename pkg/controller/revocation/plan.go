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
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/records"
)

const (
	// pruneDelay is the time that an expired certificate stays on its list, since the clock of an
	// API server may be behind.
	pruneDelay = 10 * time.Minute
	// defaultSpread and defaultLimit are for a NodeRevocation that sets none.
	defaultSpread, defaultLimit = 10 * time.Minute, 2 * time.Hour
	// maxWaiting bounds the names of nodes in a status.
	maxWaiting = 16
)

// input has the inputs of one round.
type input struct {
	now         time.Time
	records     []v1alpha1.NodeAttestation
	suspensions []v1alpha1.NodeSuspension
	// revocations are the NodeRevocations of the cluster.
	revocations []v1alpha1.NodeRevocation
	// existing are the RevocationSlices of the cluster. They may be stale.
	existing []v1alpha1.RevocationSlice
	// inUse has, by node, the certificate that the kubelet uses. It is the node's own claim, so it
	// must not keep a certificate from being revoked.
	inUse map[string]string
}

// plan is the decision of one round.
type plan struct {
	// lists has the desired content of each list, by number. A list that becomes empty has an
	// entry, too.
	lists map[int32]v1alpha1.RevocationSliceSpec
	// marks are the changes of records, by name.
	marks map[string]mark
	// suspendedNodes are the names of suspended nodes.
	suspendedNodes []string
	// announcement names the nodes that must renew.
	announcement attestation.Announcement
	// statuses are the statuses of the revocations, by name.
	statuses map[string]revocationStatus
	// reportsNeeded are the nodes whose report can decide now. The caller reads the reports, and
	// plans again.
	reportsNeeded []string
	// unenforced are the nodes with a revoked certificate for which the lists with a policy have no
	// room, sorted.
	unenforced []string
	// active says that the next round must come soon, without an event.
	active bool
}

func (p *plan) isUnenforced(node string) bool {
	_, found := slices.BinarySearch(p.unenforced, node)
	return found
}

// mark has the desired marks of a record.
type mark struct {
	// revoked has the fingerprints of the certificates on a list.
	revoked map[string]bool
	// by is the revocation that revoked certificates of this record. It is nil if only a suspension
	// did, or if the revocation is deleted.
	by *v1alpha1.NodeRevocation
	// suspension is the suspension of the machine, nil if there is none.
	suspension *v1alpha1.NodeSuspension
}

// revocationStatus is the progress of a revocation.
type revocationStatus struct {
	nodes, renewed, revoked int32
	waiting                 []string
	complete                bool
}

// planner makes a plan.
type planner struct {
	input
	plan
	// entries has the certificates that must be on a list. numbers has the list of each certificate
	// that is on one already. places has, by node, the first list with a policy that names it.
	entries         map[string]v1alpha1.RevokedCertificate
	numbers, places map[string]int32
	// suspended has the suspensions, by endorsement key.
	suspended map[string]*v1alpha1.NodeSuspension
	// unrecorded has, by node, the current certificates on the lists that no record has: somebody
	// deleted the record. eks has their endorsement keys, by fingerprint.
	unrecorded map[string][]v1alpha1.IssuedCertificate
	eks        map[string]string
}

// newPlan makes the plan. It does no I/O.
func newPlan(in input) plan {
	p := &planner{
		input:   in,
		plan:    plan{lists: map[int32]v1alpha1.RevocationSliceSpec{}, marks: map[string]mark{}, statuses: map[string]revocationStatus{}},
		entries: map[string]v1alpha1.RevokedCertificate{}, numbers: map[string]int32{}, places: map[string]int32{},
		suspended: map[string]*v1alpha1.NodeSuspension{}, unrecorded: map[string][]v1alpha1.IssuedCertificate{},
		eks: map[string]string{},
	}
	for i := range p.suspensions {
		p.suspended[p.suspensions[i].Spec.EK] = &p.suspensions[i]
	}
	p.keep()
	p.findUnrecorded()
	for i := range p.records {
		p.restore(&p.records[i])
		p.suspend(&p.records[i])
	}
	p.suspendUnrecorded()
	for i := range p.revocations {
		p.revoke(&p.revocations[i])
	}
	for i := range p.records {
		p.mark(&p.records[i])
	}
	p.nameSuspended()
	p.fill()
	return p.plan
}

// keep keeps the certificates on the lists until they have expired. After a crash between two
// writes a certificate may be on two lists. It stays on the first one.
func (p *planner) keep() {
	p.existing = slices.Clone(p.existing)
	slices.SortFunc(p.existing, func(a, b v1alpha1.RevocationSlice) int { return cmp.Compare(a.Spec.Number, b.Spec.Number) })
	for _, list := range p.existing {
		number := list.Spec.Number
		p.lists[number] = v1alpha1.RevocationSliceSpec{}
		for _, c := range list.Spec.Certificates {
			if number <= PolicyCount && p.places[c.NodeName] == 0 {
				p.places[c.NodeName] = number
			}
			if _, ok := p.entries[c.SHA256]; ok || p.now.After(c.NotAfter.Add(pruneDelay)) {
				continue
			}
			// After a suspension ends, its certificates stay revoked. But their machines may
			// request new ones again.
			c.Suspended = p.suspended[c.EK] != nil
			p.entries[c.SHA256], p.numbers[c.SHA256] = c, number
		}
	}
}

// findUnrecorded finds the current certificates that no record has.
func (p *planner) findUnrecorded() {
	known := map[string]bool{}
	for i := range p.records {
		for _, c := range p.records[i].Status.Certificates {
			known[c.SHA256] = true
		}
	}
	for _, list := range p.existing {
		for _, c := range list.Spec.Current {
			if _, revoked := p.entries[c.SHA256]; !revoked && !known[c.SHA256] {
				known[c.SHA256] = true
				p.unrecorded[c.NodeName] = append(p.unrecorded[c.NodeName], v1alpha1.IssuedCertificate{SHA256: c.SHA256, NotAfter: c.NotAfter, Requested: c.Requested, AfterRevocation: c.AfterRevocation})
				p.eks[c.SHA256] = c.EK
			}
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

// restore adds certificates that their record marks as revoked and that are on no list: somebody
// deleted the list.
func (p *planner) restore(record *v1alpha1.NodeAttestation) {
	for _, c := range p.notPruned(record) {
		if _, ok := p.entries[c.SHA256]; !ok && c.Revoked {
			p.add(record, c, p.ekOfCertificate(record, c), "")
		}
	}
}

// ekOfCertificate returns the endorsement key that a certificate was issued to, "" if it is not
// known.
func (p *planner) ekOfCertificate(record *v1alpha1.NodeAttestation, c *v1alpha1.IssuedCertificate) string {
	if ek, unrecorded := p.eks[c.SHA256]; unrecorded {
		return ek
	}
	if c.FormerEK {
		return ""
	}
	return ekOf(record)
}

// notPruned returns the certificates of a node, in its record or unrecorded, that have not expired
// or expired less than pruneDelay ago.
func (p *planner) notPruned(record *v1alpha1.NodeAttestation) (kept []*v1alpha1.IssuedCertificate) {
	for _, all := range [][]v1alpha1.IssuedCertificate{p.unrecorded[record.Spec.NodeName], record.Status.Certificates} {
		for i := range all {
			if p.now.Before(all[i].NotAfter.Add(pruneDelay)) {
				kept = append(kept, &all[i])
			}
		}
	}
	return kept
}

// ekOf returns the endorsement key in a record, "" if there is none.
func ekOf(record *v1alpha1.NodeAttestation) string {
	if record.Spec.EK == nil {
		return ""
	}
	return record.Spec.EK.Fingerprint
}

// suspend puts the certificates of a suspended machine on a list. A record does not say to which of
// several former keys a certificate was issued. So all certificates of former keys are listed if
// one of these keys is suspended.
func (p *planner) suspend(record *v1alpha1.NodeAttestation) {
	former := ""
	for _, ek := range record.Status.EKHistory {
		if p.suspended[ek.Fingerprint] != nil {
			former = ek.Fingerprint
		}
	}
	for i := range record.Status.Certificates {
		c := &record.Status.Certificates[i]
		switch {
		case !p.now.Before(c.NotAfter.Add(pruneDelay)):
		case p.suspended[ekOf(record)] != nil:
			p.add(record, c, ekOf(record), "")
			p.active = true
		case c.FormerEK && former != "":
			p.add(record, c, former, "")
		}
	}
}

// suspendUnrecorded puts the unrecorded certificates of suspended machines on a list. A certificate
// whose endorsement key is not known belongs to the suspended node of its name.
func (p *planner) suspendUnrecorded() {
	named := map[string]string{}
	for _, s := range p.suspensions {
		named[s.Spec.NodeName] = s.Spec.EK
	}
	for _, record := range p.nodes() {
		name := record.Spec.NodeName
		for i := range p.unrecorded[name] {
			c := &p.unrecorded[name][i]
			ek := p.eks[c.SHA256]
			if ek == "" {
				ek = named[name]
			}
			if p.suspended[ek] != nil {
				p.add(record, c, ek, "")
			}
		}
	}
}

// revoke applies one revocation.
func (p *planner) revoke(r *v1alpha1.NodeRevocation) {
	if meta.IsStatusConditionTrue(r.Status.Conditions, v1alpha1.ConditionComplete) {
		return
	}
	selected := map[string]bool{}
	for _, name := range r.Spec.Nodes {
		selected[name] = true
	}
	status := revocationStatus{complete: true}
	for _, record := range p.nodes() {
		if r.Spec.All || selected[record.Spec.NodeName] {
			p.revokeRecord(r, record, &status)
		}
	}
	slices.Sort(status.waiting)
	status.waiting = status.waiting[:min(len(status.waiting), maxWaiting)]
	p.statuses[r.Name] = status
	if status.complete {
		return
	}
	p.active = true
	before := r.CreationTimestamp.Time
	if r.Spec.IssuedBefore != nil {
		before = r.Spec.IssuedBefore.Time
	}
	renewal := attestation.Renewal{Name: r.Name, IssuedBefore: before, All: r.Spec.All, Nodes: r.Spec.Nodes, Start: r.CreationTimestamp.Time}
	if r.Spec.Mode == v1alpha1.RevokeAfterRenewal {
		renewal.SpreadSeconds = int(seconds(r.Spec.SpreadSeconds, defaultSpread) / time.Second)
	}
	p.announcement.Renewals = append(p.announcement.Renewals, renewal)
}

// nodes returns the records. A node that has only unrecorded certificates has an empty record.
func (p *planner) nodes() (all []*v1alpha1.NodeAttestation) {
	recorded := map[string]bool{}
	for i := range p.records {
		all = append(all, &p.records[i])
		recorded[p.records[i].Spec.NodeName] = true
	}
	for _, name := range slices.Sorted(maps.Keys(p.unrecorded)) {
		if !recorded[name] {
			all = append(all, &v1alpha1.NodeAttestation{Spec: v1alpha1.NodeAttestationSpec{NodeName: name}})
		}
	}
	return all
}

// revokeRecord applies a revocation to the certificates of one machine.
func (p *planner) revokeRecord(r *v1alpha1.NodeRevocation, record *v1alpha1.NodeAttestation, status *revocationStatus) {
	var old, newer []*v1alpha1.IssuedCertificate
	for _, c := range p.notPruned(record) {
		switch {
		case r.Selects(c):
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
	due := r.Spec.Mode == v1alpha1.RevokeImmediately || !p.now.Before(r.CreationTimestamp.Add(seconds(r.Spec.LimitSeconds, defaultLimit)))
	if !due && len(newer) > 0 && len(old) > 0 {
		due = slices.ContainsFunc(newer, func(c *v1alpha1.IssuedCertificate) bool { return c.SHA256 == p.inUse[record.Spec.NodeName] })
		if !due {
			p.reportsNeeded = append(p.reportsNeeded, record.Spec.NodeName)
		}
	}
	for _, c := range old {
		if _, done := p.entries[c.SHA256]; done {
			status.revoked++
			continue
		}
		if !due {
			status.complete = false
			continue
		}
		p.add(record, c, p.ekOfCertificate(record, c), r.Name)
		status.revoked++
	}
}

// seconds converts an optional field in seconds to a duration.
func seconds(value *int32, otherwise time.Duration) time.Duration {
	if value == nil {
		return otherwise
	}
	return time.Duration(*value) * time.Second
}

// mark adds the desired marks of a record to the plan, if the record differs from them.
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

// nameSuspended collects the names of suspended nodes, and marks their certificates.
func (p *planner) nameSuspended() {
	p.suspendedNodes = SuspendedNodes(p.suspensions, p.records, maps.Values(p.entries))
	// A list with a policy may have any one of a node's certificates, so each has this mark.
	suspended := map[string]bool{}
	for _, c := range p.entries {
		_, named := slices.BinarySearch(p.suspendedNodes, c.NodeName)
		suspended[c.NodeName] = suspended[c.NodeName] || c.Suspended && named
	}
	for sum, c := range p.entries {
		c.NodeSuspended = suspended[c.NodeName]
		p.entries[sum] = c
	}
}

// fill distributes the certificates over the lists. A policy refuses all certificates of a node
// that are not current. So a node needs one place on the lists with a policy, for one revoked
// certificate. The node's further certificates are on lists without a policy. Otherwise a few nodes
// with many certificates could take all places.
//
// A certificate that is on a list stays there. A node keeps its place until its last revoked
// certificate has ended.
func (p *planner) fill() {
	type content struct{ certificates, nameBytes int }
	used := map[int32]content{}
	nameLength := func(c v1alpha1.RevokedCertificate) int { return len("'',") + len(UserPrefix) + len(c.NodeName) }
	put := func(number int32, sum string) {
		u := used[number]
		used[number] = content{u.certificates + 1, u.nameBytes + nameLength(p.entries[sum])}
		p.numbers[sum] = number
	}
	firstWithRoom := func(number int32, c v1alpha1.RevokedCertificate) int32 {
		for used[number].certificates >= SliceCapacity || used[number].nameBytes+nameLength(c) > maxNames {
			number++
		}
		return number
	}
	hasPolicy := func(sum string) bool { return p.numbers[sum] > 0 && p.numbers[sum] <= PolicyCount }
	sums := slices.Sorted(maps.Keys(p.entries))
	// first has, by node, the certificate that takes the node's place: a certificate that is on a
	// list with a policy already, else the one that ends last.
	first := map[string]string{}
	for _, sum := range sums {
		c := p.entries[sum]
		before, known := first[c.NodeName]
		if !known || !hasPolicy(before) && (hasPolicy(sum) || c.NotAfter.After(p.entries[before].NotAfter.Time)) {
			first[c.NodeName] = sum
		}
	}
	var unplaced, further []string
	for _, sum := range sums {
		node := p.entries[sum].NodeName
		switch {
		case hasPolicy(sum):
			put(p.numbers[sum], sum)
		case first[node] == sum && p.places[node] > 0: // the certificate that had the place has ended
			put(p.places[node], sum)
		case first[node] == sum:
			unplaced = append(unplaced, sum)
		case p.numbers[sum] > 0:
			put(p.numbers[sum], sum)
		default:
			further = append(further, sum)
		}
	}
	for _, sum := range unplaced {
		number := firstWithRoom(1, p.entries[sum])
		if number > PolicyCount {
			p.unenforced = append(p.unenforced, p.entries[sum].NodeName)
			number = cmp.Or(p.numbers[sum], number)
		}
		put(number, sum)
	}
	for _, sum := range further {
		put(firstWithRoom(PolicyCount+1, p.entries[sum]), sum)
	}
	slices.Sort(p.unenforced)
	for _, sum := range sums {
		list := p.lists[p.numbers[sum]]
		list.Certificates = append(list.Certificates, p.entries[sum])
		p.lists[p.numbers[sum]] = list
	}
	current := p.currentByNode()
	for number, list := range p.lists {
		named := list.Certificates
		if number > PolicyCount { // the list of a node's place has its current certificates
			named = slices.DeleteFunc(slices.Clone(named), func(c v1alpha1.RevokedCertificate) bool {
				return !p.isUnenforced(c.NodeName)
			})
		}
		list.Current = currentOf(named, current)
		p.lists[number] = list
	}
}

// currentByNode returns the certificates that are not revoked, the newest first, of each node with
// a revoked one.
func (p *planner) currentByNode() map[string][]v1alpha1.CurrentCertificate {
	current := map[string][]v1alpha1.CurrentCertificate{}
	for _, c := range p.entries {
		current[c.NodeName] = nil
	}
	for _, record := range p.nodes() {
		name := record.Spec.NodeName
		if _, affected := current[name]; !affected {
			continue
		}
		for _, c := range p.notPruned(record) {
			if _, revoked := p.entries[c.SHA256]; !revoked {
				current[name] = append(current[name], v1alpha1.CurrentCertificate{
					SHA256: c.SHA256, NotAfter: c.NotAfter, NodeName: name, Requested: c.Requested, AfterRevocation: c.AfterRevocation, EK: p.ekOfCertificate(record, c),
				})
			}
		}
	}
	for name, certificates := range current {
		slices.SortFunc(certificates, func(a, b v1alpha1.CurrentCertificate) int {
			return cmp.Or(cmp.Compare(b.AfterRevocation, a.AfterRevocation), requestTime(b).Compare(requestTime(a)), cmp.Compare(a.SHA256, b.SHA256))
		})
		// two records can have one node name
		current[name] = slices.CompactFunc(certificates, func(a, b v1alpha1.CurrentCertificate) bool { return a.SHA256 == b.SHA256 })
	}
	return current
}

func requestTime(c v1alpha1.CurrentCertificate) time.Time {
	if c.Requested == nil {
		return time.Time{}
	}
	return c.Requested.Time
}

// currentOf returns the current certificates of the nodes on a list. If there are more than
// maxCurrent, it returns the newest of each node, and at least three.
func currentOf(revoked []v1alpha1.RevokedCertificate, current map[string][]v1alpha1.CurrentCertificate) (all []v1alpha1.CurrentCertificate) {
	names := map[string]bool{}
	for _, c := range revoked {
		names[c.NodeName] = true
	}
	for most := records.MaxCertificates; ; most-- {
		all = nil
		for _, name := range slices.Sorted(maps.Keys(names)) {
			all = append(all, current[name][:min(most, len(current[name]))]...)
		}
		if len(all) <= maxCurrent {
			return all
		}
	}
}
