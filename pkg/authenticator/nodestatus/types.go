// SPDX-License-Identifier: Apache-2.0

package nodestatus

import (
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// State sums up an Overview.
type State string

// The states, from the best to the worst. The names are stable.
const (
	// StateOK: the certificate can be used, and no new one is due.
	StateOK State = "ok"
	// StateDue: the certificate can be used. A new one is due, and no attempt has failed yet.
	StateDue State = "due"
	// StateFailing: the certificate can be used, but the attempts to replace it fail, the API
	// server rejects it, or the configuration is wrong.
	StateFailing State = "failing"
	// StateExpired: the certificate has expired.
	StateExpired State = "expired"
	// StateNone: there is no usable certificate, for another reason.
	StateNone State = "none"
	// StateUnknown: the certificate directory cannot be read or trusted.
	StateUnknown State = "unknown"
)

// Overview describes the node's certificate, from the files of this node. It has no secret. Its
// JSON names are stable. Times are UTC in RFC 3339, in whole seconds, by this machine's clock.
// Fields that end in Seconds are whole seconds. Messages and hints are for people.
type Overview struct {
	// State is the summary. Message explains it in one sentence, and Hint says what to do.
	State   State  `json:"state"`
	Message string `json:"message"`
	Hint    string `json:"hint,omitempty"`
	// Time is the time when the files were read.
	Time time.Time `json:"time"`
	// NodeName is the node that needs a certificate, "" if it is not known.
	NodeName string `json:"nodeName,omitempty"`
	// Provider and SignerName are the settings, "" if they are invalid.
	Provider   string `json:"provider,omitempty"`
	SignerName string `json:"signerName,omitempty"`
	// ProviderChosen says why the program chose Provider. It is empty if the operator named the
	// provider, or nothing was chosen yet.
	ProviderChosen string `json:"providerChosen,omitempty"`
	// ExecFlags are the flags from the kubelet's kubeconfig. They are nil if its exec user is not
	// this program, or if the command line has --config.
	ExecFlags *ExecFlags `json:"execFlags,omitempty"`
	// Problem is another problem: with the settings, the clock, the pending file or the host's
	// name.
	Problem string `json:"problem,omitempty"`
	// Certificate is the certificate on disk, usable or not. It is nil if none can be read.
	Certificate *CertificateOverview `json:"certificate,omitempty"`
	// Announcement is the result of the checks for announced renewals. It is nil if the checks are
	// switched off, or no certificate is served.
	Announcement *AnnouncementOverview `json:"announcement,omitempty"`
	// EK is the endorsement key in the node's files. It is nil if the provider has none.
	EK *EKOverview `json:"ek,omitempty"`
	// Worker is the process that requests certificates.
	Worker WorkerOverview `json:"worker"`
	// LastRun is the result of the last worker, nil if none has ended.
	LastRun *LastRunOverview `json:"lastRun,omitempty"`
	// Failures counts the last workers in a row that failed for the same kind of reason.
	Failures int `json:"failures"`
	// NextAttempt is the end of the back-off, absent if there is none.
	NextAttempt time.Time `json:"nextAttempt,omitzero"`
	// Pending is the pending request, nil if none can be read.
	Pending *PendingOverview `json:"pending,omitempty"`
	// Credential is the credential for the next request.
	Credential CredentialOverview `json:"credential"`

	failure *reason.Failure
}

// CertificateOverview describes the certificate on disk.
type CertificateOverview struct {
	// File holds the certificate and its key.
	File string `json:"file"`
	// Subject and Issuer are distinguished names (RFC 2253). Serial is hexadecimal.
	Subject string `json:"subject"`
	Serial  string `json:"serial"`
	Issuer  string `json:"issuer"`
	// Fingerprint is the SHA-256 of the certificate in lower-case hex, as in a user's
	// credential-id.
	Fingerprint string `json:"fingerprint"`
	// Server is the API server that it came from, "" if the file does not name it.
	Server    string    `json:"server,omitempty"`
	NotBefore time.Time `json:"notBefore"`
	NotAfter  time.Time `json:"notAfter"`
	// RemainingSeconds is the time to NotAfter, negative after it.
	RemainingSeconds int64 `json:"remainingSeconds"`
	// RenewAt is the time when it is due by its age. It is absent if the provider does not renew.
	RenewAt time.Time `json:"renewAt,omitzero"`
	// Due says why a new certificate is due now. It is empty if none is.
	Due string `json:"due,omitempty"`
	// Unusable says why it cannot be used. It is empty if it can.
	Unusable string `json:"unusable,omitempty"`
	// Rejected says that the API server answered it with 401.
	Rejected bool `json:"rejected"`
}

// AnnouncementOverview describes the checks for announced renewals.
type AnnouncementOverview struct {
	// Checked is the begin of the last check, absent before the first. Answered is the time of the
	// last successful check. Problem says why the last check failed.
	Checked  time.Time `json:"checked,omitzero"`
	Answered time.Time `json:"answered,omitzero"`
	Problem  string    `json:"problem,omitempty"`
	// NextCheck is the time when the next check is due, absent if that is now.
	NextCheck time.Time `json:"nextCheck,omitzero"`
	// Exists says that the cluster announces renewals.
	Exists bool `json:"exists"`
	// Renewal is the name of the announced renewal that selects the certificate. DueAt is the time
	// of this node's renewal. Both are absent if none selects it.
	Renewal string    `json:"renewal,omitempty"`
	DueAt   time.Time `json:"dueAt,omitzero"`
	// Reported says that the Node names the certificate in its annotation. ReportProblem says why
	// writing that failed.
	Reported      bool   `json:"reported"`
	ReportProblem string `json:"reportProblem,omitempty"`
}

// EKOverview is the TPM's endorsement key, from the node's files. The TPM is not used.
type EKOverview struct {
	// Template is the name of its template: that of the pending hello, or else the one that the
	// provider remembers from the last certificate. It is empty if there is neither.
	Template string `json:"template,omitempty"`
	// Fingerprint is the SHA-256 of its SubjectPublicKeyInfo in lower-case hex. It is known
	// only while a hello is pending.
	Fingerprint string `json:"fingerprint,omitempty"`
}

// WorkerOverview describes the worker that was last started since boot.
type WorkerOverview struct {
	// Running says that it runs now. Then PID and AgeSeconds are set.
	Running    bool  `json:"running"`
	PID        int   `json:"pid,omitempty"`
	AgeSeconds int64 `json:"ageSeconds,omitempty"`
	// Died says that it ended without a result.
	Died bool `json:"died"`
}

// LastRunOverview is the result of the last worker.
type LastRunOverview struct {
	Started  time.Time `json:"started"`
	Finished time.Time `json:"finished"`
	// Reason is the name of its failure (docs/node.md), empty if it succeeded.
	Reason  string `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
	Hint    string `json:"hint,omitempty"`
	// Request is the name of the last CertificateSigningRequest that it worked on.
	Request string `json:"request,omitempty"`
	// Phases are its steps in order, each with its duration in milliseconds.
	Phases []cache.Phase `json:"phases,omitempty"`
}

// PendingOverview describes the pending request.
type PendingOverview struct {
	// Name is the name of the CertificateSigningRequest. SignerName is its spec.signerName.
	Name       string `json:"name"`
	SignerName string `json:"signerName"`
	// NodeName is the node that it is for. Server is the API server that it is filed with.
	NodeName string `json:"nodeName"`
	Server   string `json:"server"`
	// Created is the time when its name was chosen. AgeSeconds is the time since then.
	Created    time.Time `json:"created"`
	AgeSeconds int64     `json:"ageSeconds"`
	// WaitsFor is "filing", "challenge" or "certificate".
	WaitsFor string `json:"waitsFor"`
	// Reason and Cure are the controller's annotation about the wait, as the last worker read it.
	// They are empty if there is no annotation.
	Reason string `json:"reason,omitempty"`
	Cure   string `json:"cure,omitempty"`
}

// What a pending request waits for.
const (
	waitsForFiling      = "filing"
	waitsForChallenge   = "challenge"
	waitsForCertificate = "certificate"
)

// CredentialOverview describes the credential of the next request.
type CredentialOverview struct {
	// Kind is "node" or "bootstrap". It is empty if there is no usable credential.
	Kind string `json:"kind,omitempty"`
	// Description names the credential. Why says why this one is used.
	Description string `json:"description,omitempty"`
	Why         string `json:"why,omitempty"`
	// Server is the API server for the next request. Source is the file or the environment variable
	// that names the server.
	Server string `json:"server,omitempty"`
	Source string `json:"source,omitempty"`
	// Problem says why there is no credential, and Hint what to do.
	Problem string `json:"problem,omitempty"`
	Hint    string `json:"hint,omitempty"`
}

// Failure returns nil for StateOK, else a *Failure whose exit code stands for the state.
func (o *Overview) Failure() error {
	if o.failure == nil {
		return nil
	}
	return o.failure
}

// Node is a node whose files are described.
type Node struct {
	*nodestate.Node
	// Provider is nil if the settings are invalid. SignerName is the signer to request from.
	Provider   provider.Provider
	SignerName string
	// Auto is set if the operator left the choice of the provider to the program.
	Auto bool
}

// inSeconds returns a time in the format of an Overview.
func inSeconds(t time.Time) time.Time { return t.UTC().Truncate(time.Second) }
