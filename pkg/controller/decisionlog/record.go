// SPDX-License-Identifier: Apache-2.0

// Package decisionlog writes a decision record for each final decision on a
// CertificateSigningRequest. Kubernetes deletes requests after an hour. The decision record proves
// later which evidence admitted a node. The log also has a Revocation for each machine that an
// operator revoked, suspended or resumed.
//
// A Log passes decision records to a sink: a file. It never delays a decision: decision records
// that the sink cannot accept are dropped and counted. The record of a node, the NodeAttestation,
// is in package records.
//
// docs/decision-record.schema.json and docs/revocation-record.schema.json are their JSON Schemas,
// made from the comments in record.go and revocation.go.
package decisionlog

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	kjson "sigs.k8s.io/json"
)

// The kind of a Record. A field may be added to a version. A field that changes its meaning makes
// another version.
const (
	APIVersion = "decision.attestation.cluster.x-k8s.io/v1alpha1"
	Kind       = "Decision"
)

// Outcome is what a request came to.
type Outcome string

// The outcomes.
const (
	// Issued: the certificate is published.
	Issued Outcome = "Issued"
	// Approved: the request is approved, and another signer issues.
	Approved Outcome = "Approved"
	// Denied: the request is denied.
	Denied Outcome = "Denied"
	// Failed: somebody else approved the request, and it must not be signed.
	Failed Outcome = "Failed"
)

// Digest is a SHA-256, as 64 hexadecimal digits in lower case.
type Digest string

// DigestOf returns the digest of data.
func DigestOf(data []byte) Digest {
	sum := sha256.Sum256(data)
	return Digest(hex.EncodeToString(sum[:]))
}

// Record is the decision record of one final decision: one line of JSON.
type Record struct {
	// APIVersion is decision.attestation.cluster.x-k8s.io/v1alpha1.
	APIVersion string `json:"apiVersion"`
	// Kind is Decision.
	Kind string `json:"kind"`
	// ID is the request's UID, a slash and the outcome. Two lines with the same ID are about the
	// same decision.
	ID string `json:"id"`
	// Time is when the decision was made, by the controller's clock.
	Time Time `json:"time"`
	// Audit says that the controller only audits: it would have decided so, and wrote nothing.
	Audit bool `json:"audit,omitempty"`
	// Recovered says that this line was made after the decision, from the NodeAttestation: another
	// signer issued, or the controller ended between publishing and recording.
	Recovered bool `json:"recovered,omitempty"`
	// Outcome is the decision on the request.
	Outcome Outcome `json:"outcome"`
	// Reason is the reason of the request's condition (docs/reasons.md).
	Reason string `json:"reason"`
	// Message is the message of the condition, if the request is denied or failed.
	Message string `json:"message,omitempty"`
	// Class is the kind of request: first, again, renewal, serving or unknown.
	Class string `json:"class,omitempty"`
	// Controller is the process that decided.
	Controller Controller `json:"controller,omitzero"`
	// Cluster is the cluster that the node joins.
	Cluster Cluster `json:"cluster"`
	// Request is the CertificateSigningRequest that was decided on.
	Request Request `json:"request"`
	// Requester is the user that the API server authenticated.
	Requester Requester `json:"requester"`
	// Hello is the CertificateSigningRequest that a proof refers to.
	Hello *Request `json:"hello,omitempty"`
	// Node is the node that the request is for. With Denied and Failed it is only claimed.
	Node *Node `json:"node,omitempty"`
	// Machine is the machine that the evidence belongs to. With Denied and Failed it is only
	// claimed.
	Machine *Machine `json:"machine,omitempty"`
	// Evidence is what the machine's provider found.
	Evidence *Evidence `json:"evidence,omitempty"`
	// Certificate is the certificate that was issued.
	Certificate *Certificate `json:"certificate,omitempty"`
	// Refusals are all rules that failed.
	Refusals []Finding `json:"refusals,omitempty"`
	// Warnings are failed rules that do not refuse the request, because the policy only warns.
	Warnings []Finding `json:"warnings,omitempty"`
	// Unrecorded is how many denials of this requester have no record, since they were too many.
	// They were made between this record and the requester's last one.
	Unrecorded int `json:"unrecorded,omitempty"`
	// Archive has the requests whole, if decisionLog.archive is set.
	Archive *Archive `json:"archive,omitempty"`
}

// Controller is a controller process.
type Controller struct {
	// Version is the program's version.
	Version string `json:"version,omitempty"`
	// Commit is the commit that the program was built from.
	Commit string `json:"commit,omitempty"`
	// Identity is --leader-identity, or the host's name.
	Identity string `json:"identity,omitempty"`
}

// Cluster is a cluster that nodes join.
type Cluster struct {
	// UID is clusterUID of the configuration, or the Cluster's UID.
	UID string `json:"uid"`
	// Name is the Cluster's namespace and name, with Cluster API.
	Name string `json:"name,omitempty"`
}

// Request is a CertificateSigningRequest.
type Request struct {
	// Name is the object's name.
	Name string `json:"name"`
	// UID is the object's UID.
	UID string `json:"uid"`
	// SignerName is spec.signerName.
	SignerName string `json:"signerName"`
	// Created is when the API server stored the object.
	Created Time `json:"created,omitzero"`
	// SHA256 is the digest of the bytes of spec.request. It is missing if the controller did not
	// read the object whole.
	SHA256 Digest `json:"sha256,omitempty"`
}

// Requester is the user that filed a request.
type Requester struct {
	// Username is the user's name.
	Username string `json:"username"`
	// Groups are the user's groups, the first 16.
	Groups []string `json:"groups,omitempty"`
	// CredentialID identifies the credential, as the API server reports it.
	CredentialID string `json:"credentialID,omitempty"`
}

// Equal reports whether both are the same user with the same credential.
func (r Requester) Equal(other Requester) bool {
	return r.Username == other.Username && slices.Equal(r.Groups, other.Groups) && r.CredentialID == other.CredentialID
}

// Node is a node.
type Node struct {
	// Name is the node's name.
	Name string `json:"name,omitempty"`
	// ProviderID is the node's spec.providerID.
	ProviderID string `json:"providerID,omitempty"`
}

// Machine is a machine, as its source names it.
type Machine struct {
	// Source is the source of machines: inventory, or cluster-api.
	Source string `json:"source"`
	// Name is the machine's name.
	Name string `json:"name"`
	// UID is the Machine object's UID, if machines are objects.
	UID string `json:"uid,omitempty"`
}

// Evidence is what a request shows about its machine.
type Evidence struct {
	// Provider is the provider in the request, such as tpm.
	Provider string `json:"provider"`
	// Version is the version of the document that the node sent.
	Version string `json:"version,omitempty"`
	// Proven says that the provider accepted a proof. Otherwise the keys here are only claimed.
	Proven bool `json:"proven"`
	// EK is the endorsement key.
	EK *EK `json:"ek,omitempty"`
	// AKName is the TPM name of the attestation key, in hex. It is there only if it is proven.
	AKName string `json:"akName,omitempty"`
	// PCRs are the values that the TPM quoted. They are there only if they are proven.
	PCRs *PCRs `json:"pcrs,omitempty"`
}

// EK is an endorsement key.
type EK struct {
	// Fingerprint identifies the key, as in inventories: with the provider tpm, the SHA-256 of its
	// SubjectPublicKeyInfo in hex.
	Fingerprint string `json:"fingerprint"`
	// Template is the template that the node says it made the key from.
	Template string `json:"template,omitempty"`
	// Source is the source that named the key for the machine: Inventory, Annotation or Platform.
	// It is missing if none did, as in trust on first use, and with Denied and Failed.
	Source string `json:"source,omitempty"`
}

// PCRs are values of one bank.
type PCRs struct {
	// Bank is the hash algorithm: sha256, sha384 or sha512.
	Bank string `json:"bank"`
	// Values are the values in hex, in the order of their indexes.
	Values []PCR `json:"values"`
	// EventLog has the registers whose values the firmware's event log led to. Events of other
	// registers prove nothing. It is missing if the policy asks for no log.
	EventLog []int `json:"eventLog,omitempty"`
}

// Equal reports whether both have the same values.
func (p *PCRs) Equal(other *PCRs) bool {
	if p == nil || other == nil {
		return p == other
	}
	return p.Bank == other.Bank && slices.Equal(p.Values, other.Values) && slices.Equal(p.EventLog, other.EventLog)
}

// PCR is a platform configuration register.
type PCR struct {
	// Index is the register's number.
	Index int `json:"index"`
	// Value is its digest, in hex.
	Value string `json:"value"`
}

// Certificate is a certificate that was issued.
type Certificate struct {
	// SHA256 is the digest of the certificate in DER.
	SHA256 Digest `json:"sha256"`
	// Serial is the serial number, in hex.
	Serial string `json:"serial"`
	// NotBefore is the start of its validity.
	NotBefore Time `json:"notBefore"`
	// NotAfter is the end of its validity.
	NotAfter Time `json:"notAfter"`
}

// Finding is a rule that failed.
type Finding struct {
	// Reason names the rule (docs/reasons.md).
	Reason string `json:"reason"`
	// Message says what is wrong.
	Message string `json:"message,omitempty"`
}

// Archive has requests whole: identity, age and spec, and nothing else. It has the certificate,
// too.
type Archive struct {
	// Request is the CertificateSigningRequest that was decided on.
	Request *certificatesv1.CertificateSigningRequest `json:"request"`
	// Hello is the hello that the proof refers to.
	Hello *certificatesv1.CertificateSigningRequest `json:"hello,omitempty"`
	// Certificate is the certificate that was issued, in DER and base64.
	Certificate []byte `json:"certificate,omitempty"`
}

// Time is a time in UTC with nine decimals, so that lines sort by it as text.
type Time struct{ time.Time }

const timeLayout = "2006-01-02T15:04:05.000000000Z"

// MarshalJSON returns the time as RFC 3339 has it.
func (t Time) MarshalJSON() ([]byte, error) {
	return []byte(t.UTC().Format(`"` + timeLayout + `"`)), nil
}

// IsZero reports whether there is no time. It makes omitzero work.
func (t Time) IsZero() bool { return t.Time.IsZero() }

// Parse decodes one decision record strictly: an unknown, doubled or differently-cased field is an
// error.
func Parse(line []byte) (*Record, error) {
	record := &Record{}
	if err := decode(line, record); err != nil {
		return nil, err
	}
	if err := checkKind(record.APIVersion, record.Kind, Kind); err != nil {
		return nil, err
	}
	return record, nil
}

func decode(line []byte, into any) error {
	problems, err := kjson.UnmarshalStrict(line, into)
	return errors.Join(append(problems, err)...)
}

func checkKind(version, kind, want string) error {
	if version != APIVersion || kind != want {
		return fmt.Errorf("is %.64q of %.64q, not %s of %s", kind, version, want, APIVersion)
	}
	return nil
}
