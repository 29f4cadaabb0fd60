// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// SourceInventory is the source of machines in records that nothing owns.
const SourceInventory = "inventory"

// Owned says that machines are objects, which own their records: a record is gone with its machine. Which machine a record is of is
// said by its name and its owner's UID, so that it stays right where somebody moves objects to another API server and mends the owners. A record
// that has lost its owner is of no machine.
type Owned struct {
	// Source names the source of machines in records.
	Source string
	// Cluster is Policy.Cluster. Records of other clusters may be in the same namespace, and are not seen.
	Cluster string
	// Labels are those of records. Optional.
	Labels map[string]string
	// Owner returns the object that a machine is.
	Owner func(verifier.MachineRef) (metav1.OwnerReference, error)
}

// readingShare is how much longer than it took a reading of all records does, up to lookAtLeast.
const readingShare = 20

// records are where the records of one cluster are.
type records struct {
	reader    client.Reader
	writer    client.Writer
	namespace string
	owned     *Owned

	// reading is held by who reads all of them; mu guards what is known of them since at, until the reading is old.
	reading sync.Mutex
	mu      sync.Mutex
	at, old time.Time
	items   []v1alpha1.NodeAttestation
	told    []verifier.Record
}

// with reads the records that have a value in a field.
func (s *records) with(ctx context.Context, field, value string) ([]v1alpha1.NodeAttestation, error) {
	return s.list(ctx, client.MatchingFields{field: value})
}

// recent returns all records as they were a moment ago, and what the rules are told of them: many requests that wait share one reading. How long it
// does follows from how long it took, so that waiting costs a part of the time only. While one reads, the others do with the last reading. The
// caller changes neither.
func (s *records) recent(ctx context.Context, now time.Time) ([]v1alpha1.NodeAttestation, []verifier.Record, error) {
	if items, told, ok := s.last(now); ok {
		return items, told, nil
	}
	if s.reading.TryLock() {
		defer s.reading.Unlock()
	} else if items, told, any := s.last(time.Time{}); any {
		return items, told, nil
	} else {
		s.reading.Lock()
		defer s.reading.Unlock()
		if items, told, ok := s.last(now); ok {
			return items, told, nil
		}
	}
	began := time.Now()
	items, err := s.list(ctx, client.MatchingFields{})
	if err != nil {
		return nil, nil, err
	}
	told := make([]verifier.Record, len(items))
	for i := range items {
		told[i] = s.of(&items[i])
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.at, s.old = now, now.Add(min(max(lookAgain, readingShare*time.Since(began)), lookAtLeast))
	s.items, s.told = items, told
	return items, told, nil
}

// last returns the last reading if it is not old, or any if now is zero.
func (s *records) last(now time.Time) ([]v1alpha1.NodeAttestation, []verifier.Record, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ok := !s.at.IsZero() && (now.IsZero() || now.Before(s.old) && now.After(s.at.Add(-lookAgain))) // else the clock was put back
	return s.items, s.told, ok
}

func (s *records) list(ctx context.Context, fields client.MatchingFields) ([]v1alpha1.NodeAttestation, error) {
	if s.owned != nil {
		fields[v1alpha1.FieldCluster] = s.owned.Cluster
	}
	options := []client.ListOption{client.InNamespace(s.namespace)}
	if len(fields) > 0 {
		options = append(options, fields)
	}
	list := &v1alpha1.NodeAttestationList{}
	if err := s.reader.List(ctx, list, options...); err != nil {
		return nil, fmt.Errorf("records: %w", err)
	}
	return list.Items, nil
}

// of returns what the rules are told of a record.
func (s *records) of(object *v1alpha1.NodeAttestation) verifier.Record {
	record := recordOf(object)
	if s.owned != nil {
		record.Machine.UID = ownerOf(object)
	}
	return record
}

// ownerOf returns the UID of the one owner, or what is no machine's.
func ownerOf(object *v1alpha1.NodeAttestation) string {
	if len(object.OwnerReferences) != 1 {
		return "without an owner"
	}
	return string(object.OwnerReferences[0].UID)
}

// make returns a new object for a machine's record.
func (s *records) make(record verifier.Record) (*v1alpha1.NodeAttestation, error) {
	object := &v1alpha1.NodeAttestation{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: recordName(record)}}
	object.Spec.Machine = v1alpha1.MachineReference{Source: SourceInventory, Name: record.Machine.Name, UID: types.UID(record.Machine.UID)}
	if s.owned == nil {
		return object, nil
	}
	owner, err := s.owned.Owner(record.Machine)
	if err != nil {
		return nil, fmt.Errorf("owner of the record: %w", err)
	}
	if string(owner.UID) != record.Machine.UID {
		return nil, fmt.Errorf("owner of the record: machine %s is another one by now", record.Machine.Name)
	}
	object.Spec.Machine = v1alpha1.MachineReference{Source: s.owned.Source, Name: record.Machine.Name}
	object.Labels, object.OwnerReferences = s.owned.Labels, []metav1.OwnerReference{owner}
	return object, nil
}

// write creates a record, or updates the version that was read.
func (s *records) write(ctx context.Context, object *v1alpha1.NodeAttestation) error {
	if object.ResourceVersion == "" {
		return s.writer.Create(ctx, object)
	}
	return s.writer.Update(ctx, object)
}
