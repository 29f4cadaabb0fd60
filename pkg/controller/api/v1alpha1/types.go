// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// The markers below are the schema: `make generate` writes packaging/kubernetes/crd.yaml from them.
//
// There is no subresource "status". The record is the exactly-once lock: spec and status are
// written in one update under the resourceVersion.
//
// A decision finds records by these fields in the informer's cache. If the cache may be outdated,
// it selects them by field from the API server.
//
// The column Expires is a string, since the API server prints a date in the future as <invalid>.

// NodeAttestation is the controller's record of one machine: its hardware, its node and its
// certificates. Only the controller writes it. It alone ties a node to a machine: a Node and a
// Machine's nodeRef do not, since a node can write them.
//
// To reset a machine, an administrator deletes the object.
//
// +kubebuilder:object:root=true
// +kubebuilder:storageversion
// +kubebuilder:resource:shortName=natt,categories=cluster-api
// +kubebuilder:metadata:labels={"attestation.cluster.x-k8s.io/cluster-api=management","clusterctl.cluster.x-k8s.io="}
// +kubebuilder:selectablefield:JSONPath=`.spec.cluster`
// +kubebuilder:selectablefield:JSONPath=`.spec.nodeName`
// +kubebuilder:selectablefield:JSONPath=`.spec.machine.name`
// +kubebuilder:selectablefield:JSONPath=`.spec.ek.fingerprint`
// +kubebuilder:selectablefield:JSONPath=`.status.request.uid`
// +kubebuilder:printcolumn:name=Node,type=string,JSONPath=`.spec.nodeName`
// +kubebuilder:printcolumn:name=Machine,type=string,JSONPath=`.spec.machine.name`
// +kubebuilder:printcolumn:name=Cluster,type=string,JSONPath=`.spec.cluster`
// +kubebuilder:printcolumn:name=Provider,type=string,JSONPath=`.spec.provider`
// +kubebuilder:printcolumn:name=Expires,type=string,JSONPath=`.status.expires`
// +kubebuilder:printcolumn:name=Age,type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name=EK,type=string,priority=1,JSONPath=`.spec.ek.fingerprint`
// +kubebuilder:printcolumn:name="Last Attested",type=date,priority=1,JSONPath=`.status.lastAttested`
type NodeAttestation struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   NodeAttestationSpec   `json:"spec"`
	Status NodeAttestationStatus `json:"status,omitzero"`
}

// NodeAttestationSpec has the identity of the machine since its first attestation.
//
// cluster, machine and nodeName are immutable, for the controller too. Together they say that this
// machine of this cluster is this node. A mistake of the controller, or a stolen right to write
// records, must not make one machine's history vouch for another node. The other fields can change.
type NodeAttestationSpec struct {
	// Cluster is the cluster's UID, from the controller's configuration or the Cluster object, and
	// never from the cluster's own API. Immutable.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[A-Za-z0-9]([-A-Za-z0-9._/]*[A-Za-z0-9])?$`
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="a record never moves to another cluster"
	Cluster string `json:"cluster"`
	// Machine is the machine that the EK belongs to. Immutable.
	//
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="a record never goes over to another machine"
	Machine MachineReference `json:"machine"`
	// Provider is the provider that attested the machine, such as tpm. A weaker provider cannot
	// replace it later.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Provider string `json:"provider"`
	// ProviderID is the Node's spec.providerID, which agreed with the machine's. It is empty if
	// there is none.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	// +kubebuilder:validation:Pattern=`^[^\s\x00-\x1f\x7f]+$`
	ProviderID string `json:"providerID,omitempty"`
	// NodeName is the one node name that the machine may have. Immutable.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="a machine has one node name for life; deleting the record is the reset"
	NodeName string `json:"nodeName"`
	// EK is the endorsement key or the instance that the machine is pinned to, by its fingerprint.
	// It is missing if the provider has neither.
	EK *EndorsementKey `json:"ek,omitempty"`
	// Instance is the cloud's instance whose fingerprint EK has. It is missing if the provider is
	// not a cloud's.
	Instance *Instance `json:"instance,omitempty"`
	// AKName is the TPM name of the attestation key, in hex, with its hash algorithm (SHA-256 or
	// SHA-384) in front.
	//
	// +kubebuilder:validation:MinLength=68
	// +kubebuilder:validation:MaxLength=100
	// +kubebuilder:validation:Pattern=`^(000b[0-9a-f]{64}|000c[0-9a-f]{96})$`
	AKName string `json:"akName,omitempty"`
}

// Instance names an instance of a cloud.
type Instance struct {
	// Platform is ec2, gce or azure.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Platform string `json:"platform"`
	// ID is the one that the platform never gives to another instance.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=128
	// +kubebuilder:validation:Pattern=`^[-a-z0-9]+$`
	ID string `json:"id"`
	// Account is the account, project or subscription. It is empty if the evidence does not name
	// it.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=128
	// +kubebuilder:validation:Pattern=`^[-a-z0-9.:]+$`
	Account string `json:"account,omitempty"`
}

// MachineReference names a machine.
type MachineReference struct {
	// Source is the source of machines that knows it, such as inventory.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Source string `json:"source"`
	// Name is the machine's name in that source.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[A-Za-z0-9]([-A-Za-z0-9._:/]*[A-Za-z0-9])?$`
	Name string `json:"name"`
	// UID is the machine's UID in that source, if machines have one there. Another machine of the
	// same name has another UID.
	//
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[-A-Za-z0-9]+$`
	UID types.UID `json:"uid,omitempty"`
}

// EndorsementKey is an EK.
type EndorsementKey struct {
	// Fingerprint is the SHA-256 of the SubjectPublicKeyInfo, in hex.
	//
	// +kubebuilder:validation:MinLength=64
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{64}$`
	Fingerprint string `json:"fingerprint"`
	// Template is the name of the template that the TPM makes the EK from, if it is known.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^[-a-z0-9]+$`
	Template string `json:"template,omitempty"`
	// Source is the source that named the EK when it was last attested, such as Inventory. It is
	// empty if none did, as in trust on first use, and in records of older releases.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^[A-Za-z]+$`
	Source string `json:"source,omitempty"`
}

// NodeAttestationStatus has the fields that change with each attestation.
type NodeAttestationStatus struct {
	// Conditions are Attested and CertificateIssued, and once they apply Revoked and Suspended.
	// Each write of the controller derives them from the rest of the record, and their
	// observedGeneration is the generation of that write. No condition changes when a certificate
	// expires: see expires.
	//
	// +kubebuilder:validation:MaxItems=8
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// Expires is the end of the newest certificate that was issued to the EK in spec. It is missing
	// if there is none, and in records that an older release wrote last.
	//
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=64
	Expires *metav1.Time `json:"expires,omitempty"`
	// LastAttested is the time when evidence was last accepted.
	//
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=64
	LastAttested *metav1.Time `json:"lastAttested,omitempty"`
	// Boot has the TPM's counters in the last quote.
	Boot *BootCounters `json:"boot,omitempty"`
	// Hello is the hello that the last accepted proof refers to.
	Hello *HelloReference `json:"hello,omitempty"`
	// Request is the one request that may be approved and signed. The first writer wins. Other
	// requests of the machine wait until this one is finished.
	Request *RequestReference `json:"request,omitempty"`
	// FirstRequestUID is the UID of the request that the record was created for. The rules of a
	// first request apply until that request is signed.
	//
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[-A-Za-z0-9]+$`
	FirstRequestUID types.UID `json:"firstRequestUID,omitempty"`
	// Certificates are the machine's certificates that have not expired, the newest last. A renewal
	// must be requested with one of them.
	//
	// +kubebuilder:validation:MaxItems=64
	// +listType=map
	// +listMapKey=sha256
	Certificates []IssuedCertificate `json:"certificates,omitempty"`
	// EKReplaced is set once the source in spec.ek names other EKs for the machine and the
	// controller accepted that. The EK in spec is refused until a source names it again.
	EKReplaced *EKReplacement `json:"ekReplaced,omitempty"`
	// EKHistory has the former EKs of the machine, the newest last.
	//
	// +kubebuilder:validation:MaxItems=8
	// +listType=atomic
	EKHistory []FormerEK `json:"ekHistory,omitempty"`
	// Revocation is the last revocation of certificates of this machine.
	Revocation *AppliedRevocation `json:"revocation,omitempty"`
	// Suspension says that the machine is suspended. It is missing once the machine is resumed.
	Suspension *AppliedSuspension `json:"suspension,omitempty"`
}

// AppliedRevocation is a NodeRevocation that was applied to a machine.
type AppliedRevocation struct {
	// Name is the name of the NodeRevocation.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[-a-z0-9.]+$`
	Name string `json:"name"`
	// Reason is the reason that the operator gave.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	// +kubebuilder:validation:Pattern=`^[^\x00-\x1f\x7f]+$`
	Reason string `json:"reason"`
	// Time is the time when certificates of the machine were last revoked.
	//
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=64
	Time metav1.Time `json:"time"`
}

// AppliedSuspension is a NodeSuspension that holds for a machine.
type AppliedSuspension struct {
	// Reason is the reason that the operator gave.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	// +kubebuilder:validation:Pattern=`^[^\x00-\x1f\x7f]+$`
	Reason string `json:"reason"`
	// Time is the time since when the controller denies all requests of the machine.
	//
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=64
	Time metav1.Time `json:"time"`
}

// EKReplacement says that an EK is refused, and since when.
type EKReplacement struct {
	// Since is the time when the change was accepted.
	//
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=64
	Since metav1.Time `json:"since"`
	// Acknowledged says that an operator acknowledged the change. Other changes count towards the
	// limit of changes that the controller accepts without an operator.
	Acknowledged bool `json:"acknowledged"`
	// EKs are the fingerprints that the source named when the change was accepted. Only these may
	// replace the EK.
	//
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:MinLength=64
	// +kubebuilder:validation:items:MaxLength=64
	// +kubebuilder:validation:items:Pattern=`^[0-9a-f]{64}$`
	// +listType=atomic
	EKs []string `json:"eks"`
}

// FormerEK is an EK that another one has replaced.
type FormerEK struct {
	// Fingerprint is the SHA-256 of the SubjectPublicKeyInfo, in hex.
	//
	// +kubebuilder:validation:MinLength=64
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{64}$`
	Fingerprint string `json:"fingerprint"`
	// Source is the source that had named the EK.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^[A-Za-z]+$`
	Source string `json:"source,omitempty"`
	// Replaced is the time when another EK was first attested in its place.
	//
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=64
	Replaced metav1.Time `json:"replaced"`
	// RequestUID is the UID of the request in which the other EK was attested.
	//
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[-A-Za-z0-9]+$`
	RequestUID types.UID `json:"requestUID"`
}

// BootCounters are the counters in TPMS_CLOCK_INFO, which the TPM signed. They never go back,
// unless the TPM is cleared or restored from a snapshot.
type BootCounters struct {
	// Resets counts TPM Resets.
	//
	// +kubebuilder:validation:Format=int64
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=4294967295
	Resets uint32 `json:"resets"`
	// Restarts counts TPM Restarts and Resumes since the last reset.
	//
	// +kubebuilder:validation:Format=int64
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=4294967295
	Restarts uint32 `json:"restarts"`
	// Clock is the TPM's clock in milliseconds. The API accepts up to 2^63-1, which no TPM reaches.
	//
	// +kubebuilder:validation:Format=int64
	// +kubebuilder:validation:Minimum=0
	Clock uint64 `json:"clock"`
}

// HelloReference names a CertificateSigningRequest.
type HelloReference struct {
	// Name is the object's name.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[-a-z0-9.]+$`
	Name string `json:"name"`
	// UID is the object's UID.
	//
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[-A-Za-z0-9]+$`
	UID types.UID `json:"uid"`
}

// RequestReference names a CertificateSigningRequest and the bytes that were judged.
type RequestReference struct {
	// Name is the object's name.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[-a-z0-9.]+$`
	Name string `json:"name"`
	// UID is the object's UID.
	//
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[-A-Za-z0-9]+$`
	UID types.UID `json:"uid"`
	// SHA256 is the SHA-256 of spec.request, in hex.
	//
	// +kubebuilder:validation:MinLength=64
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{64}$`
	SHA256 string `json:"sha256"`
}

// IssuedCertificate is a client certificate of the node.
type IssuedCertificate struct {
	// SHA256 is the SHA-256 of the certificate in DER, in hex. The API server puts it after
	// "X509SHA256=" into spec.extra[authentication.kubernetes.io/credential-id] of requests with
	// this certificate.
	//
	// +kubebuilder:validation:MinLength=64
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{64}$`
	SHA256 string `json:"sha256"`
	// Serial is the serial number, in hex.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=40
	// +kubebuilder:validation:Pattern=`^[0-9a-f]+$`
	Serial string `json:"serial,omitempty"`
	// NotAfter is the end of the certificate. A recovered certificate may end earlier.
	//
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=64
	NotAfter metav1.Time `json:"notAfter"`
	// Requested is the time when the API server stored the request. The key is older. The field is
	// missing in records of older releases, and for a recovered certificate.
	//
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=64
	Requested *metav1.Time `json:"requested,omitempty"`
	// AfterRevocation is the number of the last NodeRevocation that the controller knew before the
	// request existed. It orders the request and the revocations without a clock. It is missing if
	// there was none, for a recovered certificate, and in records of older releases: then the
	// request counts as older than each revocation.
	//
	// +kubebuilder:validation:Minimum=0
	AfterRevocation int64 `json:"afterRevocation,omitempty"`
	// RequestUID is the UID of the request that the certificate was issued for. It is "recovered"
	// for the certificate that the node requested with when its record was recreated. The API
	// server named only the fingerprint of that certificate. So notAfter is a year later, the
	// default lifetime of kube-controller-manager's certificates.
	//
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[-A-Za-z0-9]+$`
	RequestUID types.UID `json:"requestUID"`
	// Revoked says that the certificate is in a RevocationSlice.
	Revoked bool `json:"revoked,omitempty"`
	// FormerEK says that the certificate was issued to an EK that another one has replaced. Such a
	// certificate vouches for no request.
	FormerEK bool `json:"formerEK,omitempty"`
	// Noted is always true. It does not say that the certificate was published.
	Noted bool `json:"noted"`
}

// RequestRecovered is the RequestUID of recovered certificates. A UID of the API server is longer.
const RequestRecovered types.UID = "recovered"

// Recovered reports whether the node requested with this certificate when its record was recreated.
func (c *IssuedCertificate) Recovered() bool { return c.RequestUID == RequestRecovered }

// NodeAttestationList is a list of records.
//
// +kubebuilder:object:root=true
type NodeAttestationList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []NodeAttestation `json:"items"`
}
