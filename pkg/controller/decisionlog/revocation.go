// SPDX-License-Identifier: Apache-2.0

package decisionlog

// KindRevocation is the kind of a Revocation. It is in the same version as a Record.
const KindRevocation = "Revocation"

// Action is an operator's action on a machine.
type Action string

// The actions.
const (
	// Revoked: API servers refuse writes with certificates of the machine. The machine may
	// attest to get another certificate.
	Revoked Action = "Revoked"
	// Suspended: the machine gets no certificate, and API servers refuse its writes.
	Suspended Action = "Suspended"
	// Resumed: the machine may attest again.
	Resumed Action = "Resumed"
)

// Revocation is an operator's action on one machine that has a NodeAttestation: one line of JSON
// among the decisions.
type Revocation struct {
	// APIVersion is decision.attestation.cluster.x-k8s.io/v1alpha1.
	APIVersion string `json:"apiVersion"`
	// Kind is Revocation.
	Kind string `json:"kind"`
	// ID is the UID of the NodeAttestation, the version in which it says so, and the action, with
	// slashes between them. Two lines with the same ID are about the same action.
	ID string `json:"id"`
	// Time is when the controller wrote the action into the NodeAttestation, by the controller's
	// clock.
	Time Time `json:"time"`
	// Action is what was done.
	Action Action `json:"action"`
	// Reason is the operator's reason. With Resumed, it is the reason of the suspension.
	Reason string `json:"reason,omitempty"`
	// Object is the name of the NodeRevocation or NodeSuspension. It is missing with Resumed: the
	// object is deleted.
	Object string `json:"object,omitempty"`
	// Controller is the process that did it.
	Controller Controller `json:"controller,omitzero"`
	// Cluster is the cluster of the node.
	Cluster Cluster `json:"cluster"`
	// Node is the node in the NodeAttestation.
	Node Node `json:"node"`
	// Machine is the machine in the NodeAttestation.
	Machine Machine `json:"machine"`
	// EK is the fingerprint of the machine's endorsement key, as in inventories.
	EK string `json:"ek,omitempty"`
	// Certificates are the certificates that API servers refuse since this action, and not before.
	Certificates []RevokedCertificate `json:"certificates,omitempty"`
}

// RevokedCertificate is a certificate that is refused in use.
type RevokedCertificate struct {
	// SHA256 is the digest of the certificate in DER.
	SHA256 Digest `json:"sha256"`
	// Serial is the serial number, in hex.
	Serial string `json:"serial,omitempty"`
	// NotAfter is the end of its validity.
	NotAfter Time `json:"notAfter"`
}

// ParseRevocation decodes one revocation as strictly as Parse does a decision record.
func ParseRevocation(line []byte) (*Revocation, error) {
	revocation := &Revocation{}
	if err := decode(line, revocation); err != nil {
		return nil, err
	}
	if err := checkKind(revocation.APIVersion, revocation.Kind, KindRevocation); err != nil {
		return nil, err
	}
	return revocation, nil
}
