// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// State sums up an Overview.
type State string

// The states, from the best to the worst. Their names do not change.
const (
	// StateOK: the certificate can be used, and no new one is wanted.
	StateOK State = "ok"
	// StateDue: the certificate can be used. A new one is wanted, and nothing has failed yet.
	StateDue State = "due"
	// StateFailing: the certificate can be used, but the attempts to replace it fail, the API
	// server rejects it, or the configuration is wrong.
	StateFailing State = "failing"
	// StateExpired: the certificate has expired.
	StateExpired State = "expired"
	// StateNone: there is no usable certificate, for another cause.
	StateNone State = "none"
	// StateUnknown: the certificate directory cannot be read or trusted.
	StateUnknown State = "unknown"
)

// Overview is what the files of this node say about its certificate. It holds no secret. Its JSON
// names do not change. Times are UTC in RFC 3339, in whole seconds, by this machine's clock. Fields
// that end in Seconds are whole seconds. Messages and hints are for people.
type Overview struct {
	// State sums it up. Message says why in one sentence, and Hint what can be done.
	State   State  `json:"state"`
	Message string `json:"message"`
	Hint    string `json:"hint,omitempty"`
	// Time is when the files were read.
	Time time.Time `json:"time"`
	// NodeName is the node that a certificate is wanted for, empty if it is not known.
	NodeName string `json:"nodeName,omitempty"`
	// Provider and SignerName are the settings, empty if they are wrong.
	Provider   string `json:"provider,omitempty"`
	SignerName string `json:"signerName,omitempty"`
	// ExecFlags are the flags from the kubelet's kubeconfig. They are nil if its exec user is not
	// this program, or if the command line has --config.
	ExecFlags *ExecFlags `json:"execFlags,omitempty"`
	// Problem says what else is wrong: with the settings, the clock, the pending file or the
	// host's name.
	Problem string `json:"problem,omitempty"`
	// Certificate is the one on disk, usable or not. It is nil if there is none that can be
	// read.
	Certificate *CertificateOverview `json:"certificate,omitempty"`
	// Announcement is what the checks for announced renewals have found. It is nil if the checks are
	// switched off, or no certificate is served.
	Announcement *AnnouncementOverview `json:"announcement,omitempty"`
	// EK is the endorsement key as far as files name it, nil for a provider without one.
	EK *EKOverview `json:"ek,omitempty"`
	// Worker is the process that requests certificates.
	Worker WorkerOverview `json:"worker"`
	// LastRun is how the last worker ended, nil if none has.
	LastRun *LastRunOverview `json:"lastRun,omitempty"`
	// Failures counts the workers in a row that failed for causes of one kind.
	Failures int `json:"failures"`
	// NextAttempt is the end of the back-off, absent if there is none.
	NextAttempt time.Time `json:"nextAttempt,omitzero"`
	// Pending is the request under way, nil if there is none that can be read.
	Pending *PendingOverview `json:"pending,omitempty"`
	// Credential is the one that the next request would be filed with.
	Credential CredentialOverview `json:"credential"`

	failure *Failure
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
	// Server is the API server that it came from, empty if the file does not say.
	Server    string    `json:"server,omitempty"`
	NotBefore time.Time `json:"notBefore"`
	NotAfter  time.Time `json:"notAfter"`
	// RemainingSeconds is the time to NotAfter, negative after it.
	RemainingSeconds int64 `json:"remainingSeconds"`
	// RenewAt is when it is due for its age. It is absent if the provider does not renew.
	RenewAt time.Time `json:"renewAt,omitzero"`
	// Due says why a new certificate is wanted now although this one is used. It is empty if
	// none is.
	Due string `json:"due,omitempty"`
	// Unusable says why it is not used. It is empty if it is.
	Unusable string `json:"unusable,omitempty"`
	// Rejected is set if the API server answered it with 401.
	Rejected bool `json:"rejected"`
}

// AnnouncementOverview describes the checks for announced renewals.
type AnnouncementOverview struct {
	// Checked is when the last check began, absent before the first. Answered is when one was last
	// answered. Problem says why the last check was not.
	Checked  time.Time `json:"checked,omitzero"`
	Answered time.Time `json:"answered,omitzero"`
	Problem  string    `json:"problem,omitempty"`
	// NextCheck is when the next one is due, absent if that is now.
	NextCheck time.Time `json:"nextCheck,omitzero"`
	// Exists is set if the cluster announces renewals.
	Exists bool `json:"exists"`
	// Renewal is the name of the one that selects the certificate, and DueAt is when this node renews
	// by it. Both are absent if none does.
	Renewal string    `json:"renewal,omitempty"`
	DueAt   time.Time `json:"dueAt,omitzero"`
	// Reported is set if the Node names the certificate in its annotation. ReportProblem says why
	// that failed.
	Reported      bool   `json:"reported"`
	ReportProblem string `json:"reportProblem,omitempty"`
}

// EKOverview is the TPM's endorsement key, as a file names it. The TPM is not asked.
type EKOverview struct {
	// Template is the name of its template: that of the pending hello, or else the one that
	// the provider remembers since the last certificate. It is empty before both.
	Template string `json:"template,omitempty"`
	// Fingerprint is the SHA-256 of its SubjectPublicKeyInfo in lower-case hex. It is known
	// only while a hello is pending.
	Fingerprint string `json:"fingerprint,omitempty"`
}

// WorkerOverview describes the worker that was started last in this boot.
type WorkerOverview struct {
	// Running is set if it runs now. PID and AgeSeconds are its own then.
	Running    bool  `json:"running"`
	PID        int   `json:"pid,omitempty"`
	AgeSeconds int64 `json:"ageSeconds,omitempty"`
	// Died is set if it ended without a result.
	Died bool `json:"died"`
}

// LastRunOverview is how the last worker ended.
type LastRunOverview struct {
	Started  time.Time `json:"started"`
	Finished time.Time `json:"finished"`
	// Reason is the name of its failure (docs/exit-codes.md), empty if it succeeded.
	Reason  string `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
	Hint    string `json:"hint,omitempty"`
	// Request is the name of the last CertificateSigningRequest that it worked on.
	Request string `json:"request,omitempty"`
	// Phases are its steps in order, with how many milliseconds each took.
	Phases []cache.Phase `json:"phases,omitempty"`
}

// PendingOverview describes the request under way.
type PendingOverview struct {
	// Name is the CertificateSigningRequest's, SignerName its spec.signerName.
	Name       string `json:"name"`
	SignerName string `json:"signerName"`
	// NodeName is the node that it is for, Server the API server that it is filed with.
	NodeName string `json:"nodeName"`
	Server   string `json:"server"`
	// Created is when its name was chosen, AgeSeconds the time since.
	Created    time.Time `json:"created"`
	AgeSeconds int64     `json:"ageSeconds"`
	// WaitsFor is "filing", "challenge" or "certificate".
	WaitsFor string `json:"waitsFor"`
	// Reason and Cure are what the controller has written into the request about that, as the last
	// worker saw it. They are empty if it has written nothing.
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
	// Description names it, and Why says why it is this one.
	Description string `json:"description,omitempty"`
	Why         string `json:"why,omitempty"`
	// Server is the API server that it would be sent to. Source is the file or the environment
	// variable that names the server.
	Server string `json:"server,omitempty"`
	Source string `json:"source,omitempty"`
	// Problem says why there is none, and Hint what can be done.
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
