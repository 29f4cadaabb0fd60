// SPDX-License-Identifier: Apache-2.0

package authorizer

import (
	"cmp"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
)

// endDelay is the time that a certificate is remembered after its end, since the clock of an API
// server may be behind.
const endDelay = 10 * time.Minute

// Lists are what decisions read. They do not change: each change of an object makes new ones. The
// zero value denies nothing, except in strict mode.
type Lists struct {
	// byUser has the lists that name a node with a revoked certificate, by its user name.
	byUser map[string][]*list
	// revoked has the credential IDs of all revoked certificates.
	revoked map[string]bool
	// suspendedNodes are the names of suspended nodes.
	suspendedNodes map[string]bool
	// recorded has the certificates that the records name now and that are not revoked, by
	// credential ID. It is nil until the records were read.
	recorded map[string]Certificate
	// remembered has the certificates that a record named at any time. A certificate is forgotten
	// when it is revoked, or has ended. So a lost record, or an etcd restore, stops no node.
	remembered map[string]Certificate
	// specs are the RevocationSlices, without invalid ones.
	specs []v1alpha1.RevocationSliceSpec
	// problem says why RevocationSlices are invalid. The lists are made without these.
	problem error
}

// list is a RevocationSlice, with sets in place of the slices of revocation.Requesters.
type list struct{ suspendedNodes, suspended, current map[string]bool }

// Certificate is a certificate of a node, without its credential ID.
type Certificate struct {
	NodeName string    `json:"nodeName"`
	NotAfter time.Time `json:"notAfter"`
}

// objects are what Lists are made from.
type objects struct {
	slices      []v1alpha1.RevocationSlice
	suspensions []v1alpha1.NodeSuspension
	records     []v1alpha1.NodeAttestation
}

// newLists makes the lists from all objects. before are the previous lists.
func newLists(o objects, before *Lists, now time.Time) *Lists {
	var specs []v1alpha1.RevocationSliceSpec
	for i := range o.slices {
		specs = append(specs, o.slices[i].Spec)
	}
	l := listsOf(specs, revocation.SuspendedNodes(o.suspensions, o.records, revokedIn(o.slices)), before.remembered)
	l.recorded = make(map[string]Certificate, len(before.recorded))
	for i := range o.records {
		for _, c := range o.records[i].Status.Certificates {
			id := revocation.X509Prefix + c.SHA256
			l.revoked[id] = l.revoked[id] || c.Revoked
			if !l.revoked[id] {
				l.recorded[id] = Certificate{o.records[i].Spec.NodeName, c.NotAfter.Time}
				l.remembered[id] = l.recorded[id]
			}
		}
	}
	maps.DeleteFunc(l.remembered, func(id string, c Certificate) bool {
		return l.revoked[id] || now.After(c.NotAfter.Add(endDelay))
	})
	return l
}

func revokedIn(all []v1alpha1.RevocationSlice) iter.Seq[v1alpha1.RevokedCertificate] {
	return func(yield func(v1alpha1.RevokedCertificate) bool) {
		for i := range all {
			for _, c := range all[i].Spec.Certificates {
				if !yield(c) {
					return
				}
			}
		}
	}
}

// listsOf makes lists without records.
func listsOf(specs []v1alpha1.RevocationSliceSpec, suspendedNodes []string, remembered map[string]Certificate) *Lists {
	l := &Lists{
		byUser: map[string][]*list{}, revoked: map[string]bool{}, suspendedNodes: setOf(suspendedNodes), remembered: maps.Clone(remembered),
	}
	if l.remembered == nil {
		l.remembered = map[string]Certificate{}
	}
	withPolicy := map[string]bool{}
	for _, spec := range slices.SortedFunc(slices.Values(specs), func(a, b v1alpha1.RevocationSliceSpec) int { return cmp.Compare(a.Number, b.Number) }) {
		r, err := revocation.RequestersOf(spec)
		if err != nil {
			l.problem = errors.Join(l.problem, fmt.Errorf("RevocationSlice %d: %w", spec.Number, err))
			continue
		}
		l.specs = append(l.specs, spec)
		one := &list{suspendedNodes: setOf(r.SuspendedNodes), suspended: setOf(r.Suspended), current: setOf(r.Current)}
		for _, id := range r.Revoked {
			l.revoked[id] = true
		}
		for user := range setOf(r.Nodes) {
			// A list without a policy lacks the current certificates of nodes in other lists.
			if spec.Number > revocation.PolicyCount && withPolicy[user] {
				continue
			}
			withPolicy[user] = withPolicy[user] || spec.Number <= revocation.PolicyCount
			l.byUser[user] = append(l.byUser[user], one)
		}
	}
	return l
}

func setOf(all []string) map[string]bool {
	set := make(map[string]bool, len(all))
	for _, one := range all {
		set[one] = true
	}
	return set
}

// recordNames reports whether the node's record names one of the credentials now.
func (l *Lists) recordNames(node string, credentials []string) bool {
	return names(l.recorded, node, credentials)
}

// remembers reports whether a record of the node named one of the credentials at any time.
func (l *Lists) remembers(node string, credentials []string) bool {
	return names(l.remembered, node, credentials)
}

// unrecorded returns the number of certificates that are remembered, and that no record names now.
func (l *Lists) unrecorded() (count int) {
	for id := range l.remembered {
		if _, isRecorded := l.recorded[id]; !isRecorded {
			count++
		}
	}
	return count
}

func names(certificates map[string]Certificate, node string, credentials []string) bool {
	return slices.ContainsFunc(credentials, func(id string) bool {
		c, found := certificates[id]
		return found && c.NodeName == node
	})
}
