// SPDX-License-Identifier: Apache-2.0

// Package v1alpha1 is the API group attestation.cluster.x-k8s.io: the records of attested machines.
// `make generate` makes the deep copies and packaging/kubernetes/crd.yaml from its types.
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

// Resource is what records are called in the API's paths.
var Resource = GroupVersion.WithResource("nodeattestations")

// The fields that records can be selected by, in field selectors (the CRD's selectableFields).
const (
	FieldCluster    = "spec.cluster"
	FieldNodeName   = "spec.nodeName"
	FieldMachine    = "spec.machine.name"
	FieldEK         = "spec.ek.fingerprint"
	FieldRequestUID = "status.request.uid"
)

// AddToScheme makes the types known to a scheme.
func AddToScheme(scheme *runtime.Scheme) error {
	scheme.AddKnownTypes(GroupVersion, &NodeAttestation{}, &NodeAttestationList{})
	metav1.AddToGroupVersion(scheme, GroupVersion)
	return nil
}
