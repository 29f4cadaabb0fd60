// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"maps"

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

// records are where the records of one cluster are.
type records struct {
	api       client.WithWatch
	namespace string
	owned     *Owned
	// told are the records as a watch tells of them. It is nil where everything is read from the API server.
	told *toldRecords
}

// with reads the records that have a value in a field.
func (s *records) with(ctx context.Context, field, value string) ([]v1alpha1.NodeAttestation, error) {
	list := &v1alpha1.NodeAttestationList{}
	if err := s.api.List(ctx, list, s.scope(client.MatchingFields{field: value})...); err != nil {
		return nil, fmt.Errorf("records: %w", err)
	}
	return list.Items, nil
}

// all returns the records of this cluster, by the watch where there is one. The caller changes
// none.
func (s *records) all(ctx context.Context) ([]v1alpha1.NodeAttestation, error) {
	if s.told.hears() {
		return recordsOf(s.told.informer.GetStore().List(), nil)
	}
	list := &v1alpha1.NodeAttestationList{}
	if err := s.api.List(ctx, list, s.scope(nil)...); err != nil {
		return nil, fmt.Errorf("records: %w", err)
	}
	return list.Items, nil
}

// scope selects those of this cluster's records that have values in fields.
func (s *records) scope(fields client.MatchingFields) []client.ListOption {
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
		return written(s.api.Create(ctx, object))
	}
	return written(s.api.Update(ctx, object))
}

// like returns the records that have the node name or the EK of one that was written, as they were then or later.
func (s *records) like(ctx context.Context, written *v1alpha1.NodeAttestation) (all []v1alpha1.NodeAttestation, err error) {
	find := func(field, value string) ([]v1alpha1.NodeAttestation, error) { return s.with(ctx, field, value) }
	if s.told.inTime() && s.told.tells(ctx, written) {
		find = s.told.with
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
		all = append(all, items...)
	}
	return all, nil
}
