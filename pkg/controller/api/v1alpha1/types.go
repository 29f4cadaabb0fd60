// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// NodeAttestation is the controller's memory of one machine: which hardware it is, which node, and what was issued to it. Only the
// controller writes it, and it alone ties a node to a machine: a Node and a Machine's nodeRef can be written by a node.
//
// Spec and status are written together, in one update under the resourceVersion: status is no subresource. Deleting the object
// is the administrator's reset.
type NodeAttestation struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   NodeAttestationSpec   `json:"spec"`
	Status NodeAttestationStatus `json:"status,omitzero"`
}

// NodeAttestationSpec is what is known of the machine since its first attestation.
//
// Cluster, Machine and NodeName cannot be changed, not by the controller either (CEL rules in the CRD). Together they are the sentence "this
// machine of this cluster is this node": a mistake of the controller, or a stolen right to write records, must not make one
// machine's history vouch for another node. The rest may be corrected, such as an EK whose template got another name.
type NodeAttestationSpec struct {
	// Cluster is the cluster's UID, from the controller's configuration or the Cluster object, never from the cluster's own API.
	// Immutable.
	Cluster string `json:"cluster"`
	// Machine is the machine that the EK belongs to. Immutable.
	Machine MachineReference `json:"machine"`
	// Provider is the provider that attested the machine, such as tpm; a weaker one is no substitute later.
	Provider string `json:"provider"`
	// ProviderID is the Node's spec.providerID, which agreed with the machine's; empty where there is none.
	ProviderID string `json:"providerID,omitempty"`
	// NodeName is the one node name that the machine may have. Immutable.
	NodeName string `json:"nodeName"`
	// EK is the endorsement key that the machine is pinned to; nil with a provider that knows none.
	EK *EndorsementKey `json:"ek,omitempty"`
	// AKName is the TPM name of the attestation key, in hex.
	AKName string `json:"akName,omitempty"`
}

// MachineReference names a machine.
type MachineReference struct {
	// Source is the source of machines that knows it, such as inventory.
	Source string `json:"source"`
	// Name is its name there.
	Name string `json:"name"`
	// UID is its UID there, where machines have one: another machine of the same name has another.
	UID types.UID `json:"uid,omitempty"`
}

// EndorsementKey is an EK.
type EndorsementKey struct {
	// Fingerprint is the SHA-256 of the SubjectPublicKeyInfo, in hex.
	Fingerprint string `json:"fingerprint"`
	// Template is the name of the template that the TPM makes it from, if that is known.
	Template string `json:"template,omitempty"`
	// Source is the source that named the EK when it was last attested, such as Inventory. It is
	// empty if none did, as in trust on first use, and in records of older releases.
	Source string `json:"source,omitempty"`
}

// NodeAttestationStatus is what changes with each attestation.
type NodeAttestationStatus struct {
	// LastAttested is when evidence was last accepted.
	LastAttested *metav1.Time `json:"lastAttested,omitempty"`
	// Boot has the TPM's counters in the last quote.
	Boot *BootCounters `json:"boot,omitempty"`
	// Hello is what the last accepted proof refers to; CSR A.
	Hello *HelloReference `json:"hello,omitempty"`
	// Request is CSR B, the one request that may be approved and signed. Whoever writes it first has decided, and another has to wait
	// until it is done with.
	Request *RequestReference `json:"request,omitempty"`
	// FirstRequestUID is the UID of the request that the record was made for: the rules of a first request hold until that is signed.
	FirstRequestUID types.UID `json:"firstRequestUID,omitempty"`
	// Certificates are those that were issued to the machine and have not ended, the newest last. A renewal has to be asked for with one
	// of them.
	Certificates []IssuedCertificate `json:"certificates,omitempty"`
	// EKReplaced is set once the source in spec.ek named other EKs for the machine, and the
	// controller accepted that. The EK in spec is refused until a source names it again.
	EKReplaced *EKReplacement `json:"ekReplaced,omitempty"`
	// EKHistory has the EKs that the machine had before, the newest last; 8 at most.
	EKHistory []FormerEK `json:"ekHistory,omitempty"`
}

// EKReplacement says since when an EK is refused.
type EKReplacement struct {
	// Since is when the change was accepted.
	Since metav1.Time `json:"since"`
	// Acknowledged says that an operator acknowledged the change. One that was not counts towards
	// the limit of changes that are accepted without.
	Acknowledged bool `json:"acknowledged"`
	// EKs are the fingerprints that the source named when the change was accepted, 1 to 16. They
	// alone may take the EK's place.
	EKs []string `json:"eks"`
}

// FormerEK is an EK that another one has replaced.
type FormerEK struct {
	// Fingerprint and Source are as in EndorsementKey.
	Fingerprint string `json:"fingerprint"`
	Source      string `json:"source,omitempty"`
	// Replaced is when another EK was first attested in its place, and RequestUID the UID of the
	// request in which it was.
	Replaced   metav1.Time `json:"replaced"`
	RequestUID types.UID   `json:"requestUID"`
}

// BootCounters are those of TPMS_CLOCK_INFO. The TPM signed them; that they never go back is what makes them worth remembering.
type BootCounters struct {
	// Resets counts TPM Resets, Restarts TPM Restarts and Resumes since the last of them.
	Resets   uint32 `json:"resets"`
	Restarts uint32 `json:"restarts"`
	// Clock is in milliseconds. The API takes it up to 2^63-1: no chip gets there.
	Clock uint64 `json:"clock"`
}

// HelloReference names a CertificateSigningRequest.
type HelloReference struct {
	Name string    `json:"name"`
	UID  types.UID `json:"uid"`
}

// RequestReference names a CertificateSigningRequest and the bytes that were judged.
type RequestReference struct {
	Name string    `json:"name"`
	UID  types.UID `json:"uid"`
	// SHA256 is that of spec.request, in hex.
	SHA256 string `json:"sha256"`
}

// IssuedCertificate is a client certificate of the node.
type IssuedCertificate struct {
	// SHA256 is that of the certificate in DER, in hex: what the API server says of a requester in
	// spec.extra[authentication.kubernetes.io/credential-id] after "X509SHA256=".
	SHA256 string `json:"sha256"`
	// Serial is the serial number, in hex.
	Serial string `json:"serial,omitempty"`
	// NotAfter is when it ends.
	NotAfter metav1.Time `json:"notAfter"`
	// RequestUID is the UID of the request that it was issued for.
	RequestUID types.UID `json:"requestUID"`
	// FormerEK says that the certificate was issued to an EK that another one has replaced. It
	// vouches for no request, and only tells that the certificate was issued here.
	FormerEK bool `json:"formerEK,omitempty"`
	// Noted tells a certificate that is known to have been published from one that was about to be.
	Noted bool `json:"noted"`
}

// NodeAttestationList is a list of records.
type NodeAttestationList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []NodeAttestation `json:"items"`
}
