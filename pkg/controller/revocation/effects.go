// SPDX-License-Identifier: Apache-2.0

package revocation

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/records"
)

const (
	// marksPerRound bounds the records that one round writes, so that the next revocation does not
	// wait longer. markWorkers is the number of concurrent writes.
	marksPerRound, markWorkers = 200, 8
	// fewNodes is the largest number of Nodes that are read one by one. More are read in lists with
	// pages of nodesPerPage.
	fewNodes, nodesPerPage = 20, 500
	// announcementInterval is the time between two reads of an unchanged announcement.
	announcementInterval = idleInterval
)

// Action names the change that was applied to a machine.
type Action string

// The actions.
const (
	Revoked   Action = "Revoked"
	Suspended Action = "Suspended"
	Resumed   Action = "Resumed"
)

// Application describes a change that was applied to a machine.
type Application struct {
	Action Action
	// Record is the machine's record as it was written.
	Record *v1alpha1.NodeAttestation
	// Object is the name of the NodeRevocation or NodeSuspension, empty if it is deleted. Reason is
	// the reason that the operator gave. After Resumed it is that of the suspension.
	Object, Reason string
	// Certificates are the certificates of the record that this change revokes.
	Certificates []v1alpha1.IssuedCertificate
}

// reports returns the certificates that Nodes claim to use, by node.
func (e *Enforcer) reports(ctx context.Context, names []string) (map[string]string, error) {
	inUse := map[string]string{}
	kind := corev1.SchemeGroupVersion.WithKind("Node")
	if len(names) <= fewNodes {
		for _, name := range names {
			node := &metav1.PartialObjectMetadata{}
			node.SetGroupVersionKind(kind)
			if err := e.Joined.Get(ctx, client.ObjectKey{Name: name}, node); client.IgnoreNotFound(err) != nil {
				return inUse, err
			}
			inUse[name] = node.Annotations[attestation.AnnotationCertificate]
		}
		return inUse, nil
	}
	for next := ""; ; {
		page := &metav1.PartialObjectMetadataList{}
		page.SetGroupVersionKind(kind)
		if err := e.Joined.List(ctx, page, client.Limit(nodesPerPage), client.Continue(next)); err != nil {
			return inUse, err
		}
		for _, node := range page.Items {
			inUse[node.Name] = node.Annotations[attestation.AnnotationCertificate]
		}
		if next = page.Continue; next == "" {
			return inUse, nil
		}
	}
}

// announce writes the announcement, if it has changed. An announcement that is too long loses its
// last renewals. Their nodes then renew late: when the API server refuses their writes.
func (e *Enforcer) announce(ctx context.Context, a attestation.Announcement) error {
	wanted, err := marshalAnnouncement(a)
	if e.announced != nil && *e.announced == wanted && e.Now().Sub(e.announcedAt).Abs() < announcementInterval {
		return err
	}
	object := &corev1.ConfigMap{}
	key := client.ObjectKey{Namespace: attestation.AnnouncementNamespace, Name: attestation.AnnouncementName}
	if readErr := e.Joined.Get(ctx, key, object); apierrors.IsNotFound(readErr) {
		return errMissing
	} else if readErr != nil {
		return readErr
	}
	if object.Data[attestation.AnnouncementKey] != wanted {
		if object.Data == nil {
			object.Data = map[string]string{}
		}
		object.Data[attestation.AnnouncementKey] = wanted
		if writeErr := e.Joined.Update(ctx, object); writeErr != nil {
			return writeErr
		}
	}
	e.announced, e.announcedAt = &wanted, e.Now()
	return err
}

// marshalAnnouncement returns the entry of the ConfigMap. If some renewals do not fit, it also
// returns an error with their number.
func marshalAnnouncement(a attestation.Announcement) (string, error) {
	all := a.Renewals
	var tooLong error
	for n := len(all); n > 0; n-- {
		a.Renewals = all[:n]
		data, err := a.Marshal()
		if err != nil {
			tooLong = err
			continue
		}
		if n < len(all) {
			err = fmt.Errorf("has no room for %d of %d renewals: revoke with --all instead", len(all)-n, len(all))
		}
		return string(data), err
	}
	return "", tooLong
}

// markRecords writes marks into records, and returns the number of records that are left for the
// next round.
func (e *Enforcer) markRecords(ctx context.Context, in input, marks map[string]mark) (left int, err error) {
	names := slices.Sorted(maps.Keys(marks))
	left = max(0, len(names)-marksPerRound)
	byName := map[string]*v1alpha1.NodeAttestation{}
	for i := range in.records {
		byName[in.records[i].Name] = &in.records[i]
	}
	work, failed := make(chan string), make(chan error, len(names))
	var working sync.WaitGroup
	for range markWorkers {
		working.Go(func() {
			for name := range work {
				if err := e.markRecord(ctx, byName[name].DeepCopy(), marks[name]); err != nil {
					failed <- fmt.Errorf("record %s: %w", name, err)
				}
			}
		})
	}
	for _, name := range names[:len(names)-left] {
		work <- name
	}
	close(work)
	working.Wait()
	close(failed)
	var all []error
	for err := range failed {
		if !apierrors.IsConflict(err) { // the next round has the newer version
			all = append(all, err)
		} else {
			left++
		}
	}
	return left, errors.Join(all...)
}

// markRecord writes a mark into one record, and reports the change.
func (e *Enforcer) markRecord(ctx context.Context, record *v1alpha1.NodeAttestation, m mark) error {
	now := e.Now()
	var applied []Application
	newly := records.MarkRevoked(record, m.revoked)
	if m.by != nil {
		record.Status.Revocation = &v1alpha1.AppliedRevocation{Name: m.by.Name, Reason: m.by.Spec.Reason, Time: metav1.NewTime(now)}
		applied = append(applied, Application{Action: Revoked, Record: record, Object: m.by.Name, Reason: m.by.Spec.Reason, Certificates: newly})
	}
	switch before := record.Status.Suspension; {
	case before == nil && m.suspension != nil:
		record.Status.Suspension = &v1alpha1.AppliedSuspension{Reason: m.suspension.Spec.Reason, Time: metav1.NewTime(now)}
		applied = append(applied, Application{Action: Suspended, Record: record, Object: m.suspension.Name, Reason: m.suspension.Spec.Reason, Certificates: newly})
	case before != nil && m.suspension == nil:
		record.Status.Suspension = nil
		applied = append(applied, Application{Action: Resumed, Record: record, Reason: before.Reason})
	}
	if err := e.Records.Write(ctx, record, now); err != nil {
		return err
	}
	for _, a := range applied {
		e.Applied(ctx, a)
	}
	return nil
}

// writeStatuses writes the progress of the revocations into their statuses.
func (e *Enforcer) writeStatuses(ctx context.Context, revocations []v1alpha1.NodeRevocation, statuses map[string]revocationStatus) error {
	var failed []error
	for i := range revocations {
		status, known := statuses[revocations[i].Name]
		if !known {
			continue
		}
		object := revocations[i].DeepCopy()
		object.Status.Nodes, object.Status.Renewed, object.Status.Revoked, object.Status.Waiting = status.nodes, status.renewed, status.revoked, status.waiting
		meta.SetStatusCondition(&object.Status.Conditions, completeCondition(object, status, e.Now()))
		if equality.Semantic.DeepEqual(object.Status, revocations[i].Status) {
			continue
		}
		if err := e.Objects.Status().Update(ctx, object); client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) {
			failed = append(failed, fmt.Errorf("revocation %s: %w", object.Name, err))
		}
	}
	return errors.Join(failed...)
}

func completeCondition(object *v1alpha1.NodeRevocation, status revocationStatus, now time.Time) metav1.Condition {
	c := metav1.Condition{
		Type: v1alpha1.ConditionComplete, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonInProgress, ObservedGeneration: object.Generation,
		LastTransitionTime: metav1.NewTime(now), Message: "nodes have no newer certificate, or still use the old one",
	}
	if status.complete {
		c.Status, c.Reason, c.Message = metav1.ConditionTrue, v1alpha1.ReasonComplete, "each node has a newer certificate, and the old ones are revoked or have ended"
	}
	return c
}
