// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The kinds below revoke certificates and suspend machines. Kubernetes has no revocation, so
// admission policies of the controller refuse the writes of revoked certificates.
//
// Operators create and delete NodeRevocations and NodeSuspensions. RBAC grants each kind
// separately. Only the controller writes RevocationSlices. It keeps a fingerprint there until ten
// minutes after the certificate ends, even if the record of the machine is deleted.

// RevocationMode says when certificates are revoked.
type RevocationMode string

// The modes of a NodeRevocation.
const (
	// RevokeImmediately revokes at once. A node is NotReady until it has read the announcement and
	// renewed.
	RevokeImmediately RevocationMode = "Immediately"
	// RevokeAfterRenewal announces the revocation, so that the nodes renew first.
	RevokeAfterRenewal RevocationMode = "AfterRenewal"
)

// NodeRevocation revokes certificates that were requested by nodes before a point in time. The
// machines stay trusted: they get new certificates by their evidence.
//
// Deleting the object keeps further certificates from being revoked. It does not undo revocations.
//
// +kubebuilder:object:root=true
// +kubebuilder:storageversion
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=nrev,categories=cluster-api
// +kubebuilder:metadata:labels={"attestation.cluster.x-k8s.io/cluster-api=management","clusterctl.cluster.x-k8s.io="}
// +kubebuilder:printcolumn:name=Mode,type=string,JSONPath=`.spec.mode`
// +kubebuilder:printcolumn:name=Nodes,type=integer,JSONPath=`.status.nodes`
// +kubebuilder:printcolumn:name=Renewed,type=integer,JSONPath=`.status.renewed`
// +kubebuilder:printcolumn:name=Revoked,type=integer,JSONPath=`.status.revoked`
// +kubebuilder:printcolumn:name=Complete,type=string,JSONPath=`.status.conditions[?(@.type=="Complete")].status`
// +kubebuilder:printcolumn:name=Age,type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name=Reason,type=string,priority=1,JSONPath=`.spec.reason`
type NodeRevocation struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   NodeRevocationSpec   `json:"spec"`
	Status NodeRevocationStatus `json:"status,omitzero"`
}

// NodeRevocationSpec says which certificates are revoked, and when. It is immutable.
//
// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="a revocation is not changed; create another one"
// +kubebuilder:validation:XValidation:rule="has(self.nodes) != (has(self.all) && self.all)",message="set exactly one of nodes and all"
type NodeRevocationSpec struct {
	// Cluster is the cluster's UID, as in the records of its machines.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[A-Za-z0-9]([-A-Za-z0-9._/]*[A-Za-z0-9])?$`
	Cluster string `json:"cluster"`
	// Nodes are the names of the nodes whose certificates are revoked.
	//
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=1000
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=253
	// +kubebuilder:validation:items:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`
	// +listType=set
	Nodes []string `json:"nodes,omitempty"`
	// All revokes the certificates of all nodes of the cluster.
	All bool `json:"all,omitempty"`
	// IssuedBefore selects the certificates that were requested before this time, by the clock of
	// the API server that stored the request, and those whose time of request is not known. It
	// selects no request that was created after this object. Default: all requests that existed
	// when the controller first saw this object, whatever the clocks say.
	//
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=64
	IssuedBefore *metav1.Time `json:"issuedBefore,omitempty"`
	// Mode is Immediately or AfterRenewal.
	//
	// +kubebuilder:validation:Enum=Immediately;AfterRenewal
	Mode RevocationMode `json:"mode"`
	// SpreadSeconds is the time over which the nodes renew, in mode AfterRenewal. Each node picks a
	// moment in it by its name. Default: 600.
	//
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=604800
	SpreadSeconds *int32 `json:"spreadSeconds,omitempty"`
	// LimitSeconds is the time from the creation of this object until the certificates of nodes
	// that have not renewed are revoked, in mode AfterRenewal. Default: 7200.
	//
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=2592000
	LimitSeconds *int32 `json:"limitSeconds,omitempty"`
	// Reason is the operator's reason, for the record, Events and the decision log. Nodes cannot
	// read it.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	// +kubebuilder:validation:Pattern=`^[^\x00-\x1f\x7f]+$`
	Reason string `json:"reason"`
}

// NodeRevocationStatus is the progress of a revocation.
type NodeRevocationStatus struct {
	// Conditions are Complete.
	//
	// +kubebuilder:validation:MaxItems=8
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// Number orders the revocations of a cluster. The controller sets it when it first sees this
	// object, and notes which requests exist then. It is missing if an older release has seen the
	// object first.
	//
	// +kubebuilder:validation:Minimum=0
	Number int64 `json:"number,omitempty"`
	// Nodes is the number of nodes that the revocation selects.
	//
	// +kubebuilder:validation:Minimum=0
	Nodes int32 `json:"nodes,omitempty"`
	// Renewed is the number of these nodes that have a newer certificate.
	//
	// +kubebuilder:validation:Minimum=0
	Renewed int32 `json:"renewed,omitempty"`
	// Revoked is the number of revoked certificates.
	//
	// +kubebuilder:validation:Minimum=0
	Revoked int32 `json:"revoked,omitempty"`
	// Waiting has the names of nodes without a newer certificate, at most 16.
	//
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:MaxLength=253
	// +listType=atomic
	Waiting []string `json:"waiting,omitempty"`
}

// Selects reports whether the revocation revokes this certificate of a node that it names.
// AfterRevocation shows whether the request is newer than the revocation, so clocks do not matter
// for newer requests. Clocks decide if the revocation has no number: an older release has seen it
// first, or no controller has seen it yet.
func (r *NodeRevocation) Selects(c *IssuedCertificate) bool {
	before := r.Spec.IssuedBefore
	switch {
	case r.Status.Number > 0 && c.AfterRevocation >= r.Status.Number:
		return false
	case r.Status.Number > 0 && before == nil:
		return true
	case before == nil:
		before = &r.CreationTimestamp
	}
	return c.Requested == nil || c.Requested.Before(before)
}

// NodeRevocationList is a list of revocations.
//
// +kubebuilder:object:root=true
type NodeRevocationList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []NodeRevocation `json:"items"`
}

// NodeSuspension denies all requests of a machine until the object is deleted. It names the
// machine's endorsement key. So it outlives the record, and applies to each record and each node
// name that the machine has or will have. It applies to each cluster whose records are in the same
// namespace.
//
// Its name is "ek-" and the fingerprint.
//
// +kubebuilder:object:root=true
// +kubebuilder:storageversion
// +kubebuilder:resource:shortName=nsus,categories=cluster-api
// +kubebuilder:metadata:labels={"attestation.cluster.x-k8s.io/cluster-api=management","clusterctl.cluster.x-k8s.io=","clusterctl.cluster.x-k8s.io/move="}
// +kubebuilder:validation:XValidation:rule="self.metadata.name == 'ek-' + self.spec.ek",message="the name is ek- and the fingerprint in spec.ek"
// +kubebuilder:printcolumn:name=Node,type=string,JSONPath=`.spec.nodeName`
// +kubebuilder:printcolumn:name=Reason,type=string,JSONPath=`.spec.reason`
// +kubebuilder:printcolumn:name=Age,type=date,JSONPath=`.metadata.creationTimestamp`
type NodeSuspension struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec NodeSuspensionSpec `json:"spec"`
}

// NodeSuspensionSpec says which machine is suspended. It is immutable.
//
// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="a suspension is not changed; resume, then suspend again"
type NodeSuspensionSpec struct {
	// EK is the fingerprint of the machine's endorsement key: the SHA-256 of its
	// SubjectPublicKeyInfo, in hex.
	//
	// +kubebuilder:validation:MinLength=64
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{64}$`
	EK string `json:"ek"`
	// NodeName is the node name of the machine when it was suspended. With the optional policy
	// node-attestation-suspended-tokens, tokens of pods on it are refused.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`
	NodeName string `json:"nodeName,omitempty"`
	// Reason is the operator's reason, for the record, Events and the decision log. Nodes cannot
	// read it.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	// +kubebuilder:validation:Pattern=`^[^\x00-\x1f\x7f]+$`
	Reason string `json:"reason"`
}

// NodeSuspensionList is a list of suspensions.
//
// +kubebuilder:object:root=true
type NodeSuspensionList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []NodeSuspension `json:"items"`
}

// RevocationSlice has up to 1,000 revoked certificates of a cluster that have not expired. One
// admission policy refuses the writes of their nodes, except with the slice's current certificates.
// Only the controller writes it.
//
// +kubebuilder:object:root=true
// +kubebuilder:storageversion
// +kubebuilder:resource:shortName=rvs,categories=cluster-api
// +kubebuilder:metadata:labels={"attestation.cluster.x-k8s.io/cluster-api=management","clusterctl.cluster.x-k8s.io=","clusterctl.cluster.x-k8s.io/move="}
// +kubebuilder:selectablefield:JSONPath=`.spec.cluster`
// +kubebuilder:printcolumn:name=Cluster,type=string,JSONPath=`.spec.cluster`
// +kubebuilder:printcolumn:name=Number,type=integer,JSONPath=`.spec.number`
// +kubebuilder:printcolumn:name=Age,type=date,JSONPath=`.metadata.creationTimestamp`
type RevocationSlice struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec RevocationSliceSpec `json:"spec"`
}

// RevocationSliceSpec is the content of a slice.
type RevocationSliceSpec struct {
	// Cluster is the cluster's UID, as in the records of its machines. Immutable.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="a slice never moves to another cluster"
	Cluster string `json:"cluster"`
	// Number is the number of the slice, from 1. The policy of that number enforces it. A slice
	// with a number greater than the number of policies has no policy. It keeps further
	// certificates of nodes in other slices, and of nodes for which these have no room. Immutable.
	//
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="a slice keeps its number"
	Number int32 `json:"number"`
	// Certificates are the revoked certificates.
	//
	// +kubebuilder:validation:MaxItems=1000
	// +listType=atomic
	Certificates []RevokedCertificate `json:"certificates,omitempty"`
	// Current are certificates of the same nodes that are not revoked. The policy refuses all
	// others of these nodes: a revoked certificate can be encoded in another way, and then has
	// another fingerprint.
	//
	// +kubebuilder:validation:MaxItems=4000
	// +listType=atomic
	Current []CurrentCertificate `json:"current,omitempty"`
}

// CurrentCertificate is a certificate that is not revoked, of a node with a revoked one. It stays
// in the slice if the node's record is deleted.
type CurrentCertificate struct {
	// SHA256 is the SHA-256 of the certificate in DER, in hex.
	//
	// +kubebuilder:validation:MinLength=64
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{64}$`
	SHA256 string `json:"sha256"`
	// NotAfter is the end of the certificate.
	//
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=64
	NotAfter metav1.Time `json:"notAfter"`
	// NodeName is the node that the certificate is for.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[-a-z0-9.]+$`
	NodeName string `json:"nodeName"`
	// Requested is the time when the API server stored the request. It is missing if the record did
	// not have it.
	//
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=64
	Requested *metav1.Time `json:"requested,omitempty"`
	// AfterRevocation is that of the certificate in the record.
	//
	// +kubebuilder:validation:Minimum=0
	AfterRevocation int64 `json:"afterRevocation,omitempty"`
	// EK is the fingerprint of the endorsement key that the certificate was issued to. It is empty
	// if the key is not known.
	//
	// +kubebuilder:validation:MaxLength=64
	EK string `json:"ek,omitempty"`
}

// RevokedCertificate is a revoked certificate.
type RevokedCertificate struct {
	// SHA256 is the SHA-256 of the certificate in DER, in hex.
	//
	// +kubebuilder:validation:MinLength=64
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{64}$`
	SHA256 string `json:"sha256"`
	// NotAfter is the end of the certificate. The controller removes it from the slice after that.
	//
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=64
	NotAfter metav1.Time `json:"notAfter"`
	// NodeName is the node that the certificate is for.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[-a-z0-9.]+$`
	NodeName string `json:"nodeName"`
	// EK is the fingerprint of the endorsement key that the certificate was issued to. It is empty
	// if the key is not known.
	//
	// +kubebuilder:validation:MaxLength=64
	EK string `json:"ek,omitempty"`
	// Revocation is the name of the NodeRevocation that revoked the certificate. It is empty if a
	// suspension did, or if the slice was rebuilt from records.
	//
	// +kubebuilder:validation:MaxLength=253
	Revocation string `json:"revocation,omitempty"`
	// Suspended says that the certificate may not be used to request a new one.
	Suspended bool `json:"suspended,omitempty"`
	// NodeSuspended says that no certificate of the node may be used to request a new one, except
	// the current ones. It is false if another machine has the node's name now.
	NodeSuspended bool `json:"nodeSuspended,omitempty"`
}

// RevocationSliceList is a list of RevocationSlices.
//
// +kubebuilder:object:root=true
type RevocationSliceList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []RevocationSlice `json:"items"`
}
