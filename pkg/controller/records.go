// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/lru"
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

// records are where the records of one cluster are.
type records struct {
	api       client.WithWatch
	namespace string
	owned     *Owned
	// told are the records as a watch tells of them. It is nil where everything is read from the API server.
	told *toldRecords
	// sole has, by UID, each record of which it was seen, after it was written, that no other has its node name or EK. It stays so as long as nobody
	// else writes it: who writes another looks for this one afterwards.
	sole *lru.Cache
}

func newRecords(api client.WithWatch, namespace string, owned *Owned) *records {
	return &records{api: api, namespace: namespace, owned: owned, sole: lru.New(maxLimiters)}
}

// with reads the records that have a value in a field.
func (s *records) with(ctx context.Context, field, value string) ([]v1alpha1.NodeAttestation, error) {
	list := &v1alpha1.NodeAttestationList{}
	if err := s.api.List(ctx, list, s.scope(client.MatchingFields{field: value})...); err != nil {
		return nil, fmt.Errorf("records: %w", err)
	}
	return list.Items, nil
}

// scope selects this cluster's records.
func (s *records) scope(fields client.MatchingFields) []client.ListOption {
	if s.owned != nil {
		fields[v1alpha1.FieldCluster] = s.owned.Cluster
	}
	options := []client.ListOption{client.InNamespace(s.namespace)}
	if len(fields) > 0 {
		options = append(options, fields)
	}
	return options
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
	write, sole := func() error { return s.api.Update(ctx, object) }, s.isSole(object)
	if object.ResourceVersion == "" {
		write, sole = func() error { return s.api.Create(ctx, object) }, false
	}
	if err := write(); err != nil {
		return err
	}
	s.told.wrote(object)
	if sole {
		s.noteSole(object)
	}
	return nil
}

// identity is what no two records share, in one version of a record.
type identity struct{ version, nodeName, ek string }

func identityOf(object *v1alpha1.NodeAttestation) identity {
	record := recordOf(object)
	return identity{object.ResourceVersion, record.NodeName, record.EK}
}

// isSole reports whether no other record has what this one has, or will have once it is written.
func (s *records) isSole(object *v1alpha1.NodeAttestation) bool {
	seen, known := s.sole.Get(object.UID)
	return known && seen == identityOf(object)
}

func (s *records) noteSole(object *v1alpha1.NodeAttestation) {
	s.sole.Add(object.UID, identityOf(object))
}
