// SPDX-License-Identifier: Apache-2.0

// Package v1alpha1 is the API group attestation.cluster.x-k8s.io: the records of attested machines,
// and the revocation of their certificates. `make generate` makes the deep copies,
// packaging/kubernetes/crd.yaml and packaging/kubernetes-revocation/component/crd.yaml from its
// types.
//
// +kubebuilder:object:generate=true
// +groupName=attestation.cluster.x-k8s.io
package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupVersion is the group and version of these types.
var GroupVersion = schema.GroupVersion{Group: "attestation.cluster.x-k8s.io", Version: "v1alpha1"}

// Resource is the resource of records in the API's paths.
var Resource = GroupVersion.WithResource("nodeattestations")

// The fields that records can be selected by, in field selectors (the CRD's selectableFields).
const (
	FieldCluster    = "spec.cluster"
	FieldNodeName   = "spec.nodeName"
	FieldMachine    = "spec.machine.name"
	FieldEK         = "spec.ek.fingerprint"
	FieldRequestUID = "status.request.uid"
)

// LabelCluster is the label of records with their cluster's UID, if machines are not objects. A UID
// that is not a valid label value is replaced by "sha256-" and the first 32 hex digits of its
// SHA-256. With Cluster API, records have the label cluster.x-k8s.io/cluster-name instead.
const LabelCluster = "attestation.cluster.x-k8s.io/cluster"

// The types of conditions.
const (
	// ConditionAttested is True once evidence of the machine was accepted. It is False, with the
	// reason EKReplaced, once the controller has accepted that a source names other EKs.
	ConditionAttested = "Attested"
	// ConditionCertificateIssued is True if a certificate was issued to the EK in spec. It stays
	// True when that certificate ends.
	ConditionCertificateIssued = "CertificateIssued"
	// ConditionRevoked is True while the newest certificate is revoked. It is missing if no
	// certificate was ever revoked.
	ConditionRevoked = "Revoked"
	// ConditionSuspended is True while the machine is suspended. It is missing if it never was.
	ConditionSuspended = "Suspended"
	// ConditionComplete of a NodeRevocation is True once each selected certificate is revoked or
	// has expired, and each of its nodes has a newer one.
	ConditionComplete = "Complete"
)

// The reasons of conditions.
const (
	ReasonAttested   = "Attested"
	ReasonEKReplaced = "EKReplaced"
	ReasonIssued     = "Issued"
	// ReasonNotIssued says that evidence was accepted, and that no certificate was issued yet.
	ReasonNotIssued = "NotIssued"
	// ReasonRevoked and ReasonSuspended are also reasons of Events.
	ReasonRevoked   = "CertificateRevoked"
	ReasonSuspended = "MachineSuspended"
	// ReasonRenewed says that a newer certificate was issued since the revocation, ReasonResumed
	// that the suspension was lifted.
	ReasonRenewed = "Renewed"
	ReasonResumed = "MachineResumed"
	// ReasonInProgress and ReasonComplete are about a NodeRevocation.
	ReasonInProgress = "InProgress"
	ReasonComplete   = "Complete"
)

// AddToScheme makes the types known to a scheme.
func AddToScheme(scheme *runtime.Scheme) error {
	scheme.AddKnownTypes(GroupVersion,
		&NodeAttestation{}, &NodeAttestationList{},
		&NodeRevocation{}, &NodeRevocationList{}, &NodeSuspension{}, &NodeSuspensionList{}, &RevocationSlice{}, &RevocationSliceList{})
	metav1.AddToGroupVersion(scheme, GroupVersion)
	return nil
}
