// SPDX-License-Identifier: Apache-2.0

package revocation

import (
	"context"
	"fmt"
	"math"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

// order says which requests are older than which revocations. Requests and revocations can be on
// different API servers, with different clocks, so the order does not compare times. When this
// process first sees a revocation, it lists the requests. The listed requests may be older than the
// revocation. Each later request is newer.
//
// After a restart, the requests of that moment count as older than all revocations. Each change
// makes a new order. A nil order has no revocation.
type order struct {
	// last is the number of the newest revocation.
	last int64
	// numbers has the numbers of the revocations that this process has seen, by UID.
	numbers map[types.UID]int64
	// all is the number of the newest revocation of all nodes. nodes has, by node, the number of
	// the newest revocation that names the node.
	all   int64
	nodes map[string]int64
	// first has, by the UID of a listed request, the number of the first revocation that may be
	// newer.
	first map[types.UID]int64
}

// numberOf returns the number of a revocation, 0 if this process has not seen it.
func (o *order) numberOf(r *v1alpha1.NodeRevocation) int64 {
	if o == nil {
		return 0
	}
	return o.numbers[r.UID]
}

// firstAfter returns the number of the first revocation that may be newer than one of the requests.
func (o *order) firstAfter(requests []types.UID) int64 {
	first := o.last + 1
	for _, uid := range requests {
		if number, older := o.first[uid]; older {
			first = min(first, number)
		}
	}
	return first
}

// LastBefore returns the number of the last revocation that is older than each of the requests,
// which are a proof and its hello. Call it before you write the certificate into its record.
func (e *Enforcer) LastBefore(requests ...types.UID) int64 {
	if e == nil {
		return 0
	}
	o := e.order.Load()
	if o == nil {
		return 0
	}
	return o.firstAfter(requests) - 1
}

// RevokedSince reports whether one of these requests may be older than the last revocation of the
// node. Such a request must get no certificate, because its key may be older than the revocation,
// too.
func (e *Enforcer) RevokedSince(node string, requests ...types.UID) bool {
	if e == nil {
		return false
	}
	o := e.order.Load()
	return o != nil && max(o.all, o.nodes[node]) >= o.firstAfter(requests)
}

// assignNumbers gives a number to each revocation that this process sees for the first time, and
// lists the requests that may be older. It reports whether it has written a number. It writes a
// number before anything uses it. Otherwise a later revocation could get the same number after a
// crash.
func (e *Enforcer) assignNumbers(ctx context.Context, in input) (written bool, err error) {
	before := e.order.Load()
	next := &order{last: in.lastNumber(), numbers: map[types.UID]int64{}, nodes: map[string]int64{}, first: map[types.UID]int64{}}
	if before != nil {
		next.last = max(next.last, before.last)
	}
	var unseen []*v1alpha1.NodeRevocation
	taken := map[int64]bool{}
	for i := range in.revocations {
		r := &in.revocations[i]
		isOld := r.Status.Number == 0 && len(r.Status.Conditions) > 0 // an older release has seen it
		if number := before.numberOf(r); number > 0 {
			next.add(r, number)
			taken[number] = true
		} else if !isOld {
			unseen = append(unseen, r)
		}
	}
	if len(unseen) == 0 {
		return false, nil
	}
	requests, err := e.requests(ctx)
	if err != nil {
		return false, err
	}
	first := int64(math.MaxInt64)
	for _, r := range unseen {
		number := r.Status.Number
		if number == 0 || taken[number] { // two leaders can give the same number
			next.last++
			number = next.last
			if err := e.writeNumber(ctx, r, number); err != nil {
				return false, err
			}
			written = true
		}
		next.add(r, number)
		taken[number], first = true, min(first, number)
	}
	for _, uid := range requests {
		next.first[uid] = first
		if before == nil {
			continue
		}
		if earlier, known := before.first[uid]; known {
			next.first[uid] = min(first, earlier)
		}
	}
	e.order.Store(next)
	return written, nil
}

// add adds a revocation.
func (o *order) add(r *v1alpha1.NodeRevocation, number int64) {
	o.numbers[r.UID] = number
	if r.Spec.All {
		o.all = max(o.all, number)
	}
	for _, node := range r.Spec.Nodes {
		o.nodes[node] = max(o.nodes[node], number)
	}
}

// lastNumber returns the highest number. Records may have the number of a deleted revocation.
func (in *input) lastNumber() (last int64) {
	for i := range in.revocations {
		last = max(last, in.revocations[i].Status.Number)
	}
	for i := range in.records {
		for _, c := range in.records[i].Status.Certificates {
			last = max(last, c.AfterRevocation)
		}
	}
	for i := range in.existing {
		for _, c := range in.existing[i].Spec.Current {
			last = max(last, c.AfterRevocation)
		}
	}
	return last
}

// writeNumber writes the number of a revocation into its status.
func (e *Enforcer) writeNumber(ctx context.Context, r *v1alpha1.NodeRevocation, number int64) error {
	object := r.DeepCopy()
	object.Status.Number = number
	if err := e.Objects.Status().Update(ctx, object); err != nil {
		return fmt.Errorf("revocation %s: %w", r.Name, err)
	}
	if object.Status.Number != number {
		return fmt.Errorf("revocation %s: its CRD is of an older release: apply packaging/kubernetes-revocation", r.Name)
	}
	return nil
}

// requests returns the UIDs of all requests. It reads live, because a cache could lack a request
// that is older than a revocation.
func (e *Enforcer) requests(ctx context.Context) (uids []types.UID, err error) {
	for next := ""; ; {
		page := &metav1.PartialObjectMetadataList{}
		page.SetGroupVersionKind(certificatesv1.SchemeGroupVersion.WithKind("CertificateSigningRequest"))
		if err := e.Joined.List(ctx, page, client.Limit(nodesPerPage), client.Continue(next)); err != nil {
			return nil, fmt.Errorf("requests: %w", err)
		}
		for i := range page.Items {
			uids = append(uids, page.Items[i].UID)
		}
		if next = page.Continue; next == "" {
			return uids, nil
		}
	}
}
