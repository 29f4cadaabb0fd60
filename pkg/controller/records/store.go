// SPDX-License-Identifier: Apache-2.0

// Package records keeps the record of each attested machine in a NodeAttestation object. A record
// is the lock between requests of one machine: it names the one request that may be signed. Each
// write has the version that was read, so of two concurrent writes one gets a conflict.
package records

import (
	"context"
	"fmt"
	"maps"
	"time"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// SourceInventory is the source of machines in records without an owner.
const SourceInventory = "inventory"

// Owned is for machines that are objects and own their records: the garbage collector deletes a
// record after its machine. A record belongs to the machine with the record's machine name and its
// owner's UID. So it stays right if somebody moves the objects to another API server and sets the
// new owners. A record without an owner belongs to no machine.
type Owned struct {
	// Source names the source of machines in records.
	Source string
	// Cluster is verifier.Policy.Cluster. Records of other clusters in the same namespace are not
	// read.
	Cluster string
	// Labels are the labels of records, in place of v1alpha1.LabelCluster. Optional.
	Labels map[string]string
	// Owner returns a reference to the machine's object.
	Owner func(verifier.MachineRef) (metav1.OwnerReference, error)
}

// Store has the records of one cluster.
type Store struct {
	api       client.WithWatch
	namespace string
	owned     *Owned
	// informer caches the records. It is nil until Watch is called. Until then, records are read
	// live.
	informer *informer
}

// NewStore returns the Store of the records in a namespace. owned is nil if machines are not
// objects.
func NewStore(api client.WithWatch, namespace string, owned *Owned) *Store {
	return &Store{api: api, namespace: namespace, owned: owned}
}

// Watch returns a source that fills the cache of records as long as a controller runs.
func (s *Store) Watch(log logr.Logger) (source.Source, error) {
	informer, err := newInformer(s, log)
	if err != nil {
		return nil, err
	}
	s.informer = informer
	return informer.source(), nil
}

// InSync reports whether the cache was filled and its watch is live. The cache may still be some
// milliseconds stale, or up to maxEventGap if the watch hangs.
func (s *Store) InSync() bool { return s.informer.inSync() }

// KeepsUp reports whether the cache is in sync, and showed our own writes of the last missedPause
// in time.
func (s *Store) KeepsUp() bool { return s.informer.keepsUp() }

// Find reads records live by a field. The field is one of the field selectors in v1alpha1.
func (s *Store) Find(ctx context.Context, field, value string) ([]v1alpha1.NodeAttestation, error) {
	return s.list(ctx, client.MatchingFields{field: value})
}

// FindCached is Find from the cache. The caller must not change the records.
func (s *Store) FindCached(field, value string) ([]v1alpha1.NodeAttestation, error) {
	return s.informer.find(field, value)
}

// HasAK reports whether a cached record has this AK. It makes no API call.
func (s *Store) HasAK(name string) bool {
	if name == "" || s.informer == nil {
		return false
	}
	found, err := s.informer.GetIndexer().IndexKeys(indexAK, name)
	return err == nil && len(found) > 0
}

// All returns the records of this cluster, from the cache if it is in sync, else live. The caller
// must not change them.
func (s *Store) All(ctx context.Context) ([]v1alpha1.NodeAttestation, error) {
	if s.InSync() {
		return s.informer.all(), nil
	}
	return s.list(ctx, nil)
}

func (s *Store) list(ctx context.Context, fields client.MatchingFields) ([]v1alpha1.NodeAttestation, error) {
	list := &v1alpha1.NodeAttestationList{}
	if err := s.api.List(ctx, list, s.scope(fields)...); err != nil {
		return nil, fmt.Errorf("records: %w", err)
	}
	return list.Items, nil
}

// scope returns the options that select the records of this cluster with these values of fields.
func (s *Store) scope(fields client.MatchingFields) []client.ListOption {
	selected := client.MatchingFields{}
	if s.owned != nil {
		selected[v1alpha1.FieldCluster] = s.owned.Cluster
	}
	maps.Copy(selected, fields)
	options := []client.ListOption{client.InNamespace(s.namespace)}
	if len(selected) > 0 {
		options = append(options, selected)
	}
	return options
}

// Record converts a record for the rules.
func (s *Store) Record(object *v1alpha1.NodeAttestation) verifier.Record {
	record := recordOf(object)
	if s.owned != nil {
		record.Machine.UID = ownerOf(object)
	}
	return record
}

// ownerOf returns the UID of the only owner. If there is not exactly one, it returns a text that is
// no UID.
func ownerOf(object *v1alpha1.NodeAttestation) string {
	if len(object.OwnerReferences) != 1 {
		return "without an owner"
	}
	return string(object.OwnerReferences[0].UID)
}

// New returns a new object for a machine's record.
func (s *Store) New(record verifier.Record) (*v1alpha1.NodeAttestation, error) {
	object := &v1alpha1.NodeAttestation{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: nameOf(record)}}
	object.Spec.Machine = v1alpha1.MachineReference{Source: SourceInventory, Name: record.Machine.Name, UID: types.UID(record.Machine.UID)}
	if s.owned == nil {
		return object, nil
	}
	owner, err := s.owned.Owner(record.Machine)
	if err != nil {
		return nil, fmt.Errorf("owner of the record: %w", err)
	}
	if string(owner.UID) != record.Machine.UID {
		return nil, fmt.Errorf("owner of the record: machine %s was replaced meanwhile", record.Machine.Name)
	}
	object.Spec.Machine = v1alpha1.MachineReference{Source: s.owned.Source, Name: record.Machine.Name}
	object.OwnerReferences = []metav1.OwnerReference{owner}
	return object, nil
}

// Write creates a record, or updates it under the version that was read. It derives labels,
// conditions and expiry from the rest of the record. The object gets the new version.
func (s *Store) Write(ctx context.Context, object *v1alpha1.NodeAttestation, now time.Time) error {
	s.label(object)
	setConditions(object, now)
	if object.ResourceVersion == "" {
		return s.api.Create(ctx, object)
	}
	return s.api.Update(ctx, object)
}

// label sets the labels of a record. An operator may change them, and no decision reads them.
func (s *Store) label(object *v1alpha1.NodeAttestation) {
	labels := map[string]string{v1alpha1.LabelCluster: clusterLabel(object.Spec.Cluster)}
	if s.owned != nil {
		labels = s.owned.Labels
	}
	if object.Labels == nil {
		object.Labels = map[string]string{}
	}
	maps.Copy(object.Labels, labels)
}

// FindRivals returns the records with the node name or the EK of a record that we have just
// written. They are at least as new as that write. The cache is used once it shows the write, since
// it then shows all earlier writes, too.
func (s *Store) FindRivals(ctx context.Context, written *v1alpha1.NodeAttestation) (rivals []v1alpha1.NodeAttestation, err error) {
	find := func(field, value string) ([]v1alpha1.NodeAttestation, error) { return s.Find(ctx, field, value) }
	if s.KeepsUp() && s.informer.awaits(ctx, written) {
		find = s.FindCached
	}
	for _, field := range []string{v1alpha1.FieldNodeName, v1alpha1.FieldEK} {
		value := valueOf[field](written)
		if value == "" {
			continue
		}
		items, err := find(field, value)
		if err != nil {
			return nil, err
		}
		rivals = append(rivals, items...)
	}
	return rivals, nil
}
