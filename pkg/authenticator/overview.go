// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
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

const (
	// overdueRenewal is how late a renewal may be before it counts as failing.
	overdueRenewal = 15 * time.Minute
	// overduePending is how old a pending request may be before it counts as failing. By
	// default, our controller denies after this time what it cannot decide.
	overduePending = 20 * time.Minute
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

// Overview reads the node's files. It takes no lock, writes nothing, and asks neither the network
// nor the provider's device.
func (a *Authenticator) Overview() *Overview {
	now := a.now()
	o := &Overview{Time: inSeconds(now)}
	if a.invalid == nil { // else they may be defaults in place of what the file says
		o.Provider, o.SignerName = a.provider.Name(), a.signerName
	}
	// The worker is read before the state file: if it has ended by now, its result is there.
	worker := a.dir.Worker()
	o.Worker.Running = worker.Alive()
	status := a.loadStatus()
	state, stateErr := a.dir.State()
	if stateErr != nil {
		state = &cache.State{}
	}
	o.NodeName = status.nodeName
	o.describeCertificate(a, status, now)
	o.describeWorker(worker, state, now)
	// A worker may be killed after it has installed its certificate.
	o.Worker.Died = o.Worker.Died && a.dir.Stamp(cache.CurrentFile).Modified().Before(time.Now().Add(-worker.Age()))
	pending, err := a.dir.Pending()
	if err == nil && pending != nil {
		o.describePending(pending, now)
	}
	o.describeEK(a, pending, state)
	o.describeCredential(a, status)
	switch {
	case a.invalid != nil:
		o.Problem = a.invalid.Error()
	case status.remark != nil:
		o.Problem = status.remark.Error()
	case cache.IsUnusable(err):
		o.Problem = err.Error()
	case cache.IsUnusable(stateErr):
		o.Problem = stateErr.Error()
	case status.nameErr != nil:
		o.Problem = status.nameErr.Error()
	}
	o.judge(a, status, now)
	return o
}

// inSeconds returns a time as an Overview shows it.
func inSeconds(t time.Time) time.Time { return t.UTC().Truncate(time.Second) }

func (o *Overview) describeCertificate(a *Authenticator, status certificateStatus, now time.Time) {
	held := status.held
	if held == nil {
		return
	}
	c := &CertificateOverview{
		File: a.dir.File(cache.CurrentFile), Subject: held.Leaf.Subject.String(), Serial: held.Leaf.SerialNumber.Text(16),
		Issuer: held.Leaf.Issuer.String(), Fingerprint: held.Fingerprint(),
		NotBefore: inSeconds(held.Leaf.NotBefore), NotAfter: inSeconds(held.Leaf.NotAfter),
		RemainingSeconds: int64(held.Leaf.NotAfter.Sub(now) / time.Second),
		Due:              status.due, Rejected: status.rejected,
	}
	if held.Origin != nil {
		c.Server = held.Origin.Server
	}
	if a.renews() {
		c.RenewAt = inSeconds(RenewAt(held.Leaf))
	}
	if status.problem != nil {
		c.Unusable = status.problem.Error()
	}
	o.Certificate = c
}

func (o *Overview) describeWorker(worker process.ID, state *cache.State, now time.Time) {
	if o.Worker.Running {
		o.Worker.PID, o.Worker.AgeSeconds = worker.PID, int64(worker.Age()/time.Second)
	}
	last := state.Last
	o.Worker.Died = !o.Worker.Running && worker.PID != 0 && (last == nil || last.Worker != worker)
	if last != nil {
		o.LastRun = &LastRunOverview{
			Started: inSeconds(last.Started), Finished: inSeconds(last.Finished),
			Reason: last.Reason, Message: last.Message, Hint: last.Hint, Request: last.Request, Phases: last.Phases,
		}
	}
	o.Failures = state.Failures
	if tooEarly(state, now) > 0 {
		o.NextAttempt = inSeconds(state.NextAttempt)
	}
}

func (o *Overview) describePending(pending *cache.Pending, now time.Time) {
	last := pending.Last()
	o.Pending = &PendingOverview{
		Name: last.Name, SignerName: signerOf(pending), NodeName: pending.NodeName, Server: pending.Cluster.Server,
		Created: inSeconds(last.Filed), AgeSeconds: int64(max(now.Sub(last.Filed), 0) / time.Second), WaitsFor: waitsForCertificate,
	}
	switch {
	case last.UID == "":
		o.Pending.WaitsFor = waitsForFiling
	case last.Hello:
		o.Pending.WaitsFor = waitsForChallenge
	}
}

func (o *Overview) describeEK(a *Authenticator, pending *cache.Pending, state *cache.State) {
	namer, ok := a.provider.(provider.EKNamer)
	if !ok {
		return
	}
	o.EK = &EKOverview{Template: namer.EKTemplate(state.Remembered[a.provider.Name()])}
	inspector, ok := a.provider.(provider.Inspector)
	if !ok || pending == nil || pending.Provider != a.provider.Name() || !pending.Requests[0].Hello {
		return
	}
	content, err := attestation.Parse(pending.Requests[0].Request)
	if err != nil {
		return
	}
	for _, fact := range inspector.Explain(content.Data) {
		switch fact.Name {
		case provider.FactEKTemplate:
			o.EK.Template = fact.Value
		case provider.FactEKFingerprint:
			o.EK.Fingerprint = fact.Value
		}
	}
}

func (o *Overview) describeCredential(a *Authenticator, status certificateStatus) {
	if a.invalid != nil || status.permanent {
		o.Credential.Problem = "no request is filed before that is solved: " + cmp.Or(a.invalid, status.problem).Error()
		return
	}
	to, why, err := a.access(status)
	if err != nil {
		failure := AsFailure(err)
		o.Credential = CredentialOverview{Why: why, Problem: failure.Error(), Hint: failure.Hint}
		return
	}
	o.Credential = CredentialOverview{Kind: "bootstrap", Description: to.Credential, Why: why, Server: to.Cluster.Server, Source: to.Source}
	if to.Own {
		o.Credential.Kind, o.Credential.Why = "node", "the certificate can be used, and provider "+a.provider.Name()+" renews"
	}
}

// judge sets the state from what the other fields say.
func (o *Overview) judge(a *Authenticator, status certificateStatus, now time.Time) {
	set := func(state State, reason Reason, message, hint string) {
		o.State, o.Message, o.Hint = state, text.Line(message, maxMessage), hint
		o.failure = &Failure{reason, "", fmt.Errorf("the node's certificate: %s", state)} // the Overview has the rest
	}
	attempt, hint, failed := o.attempt()
	if status.permanent {
		failure := AsFailure(status.problem)
		set(StateUnknown, failure.Reason, failure.Error(), failure.Hint)
		return
	}
	if status.pair == nil {
		if a.invalid != nil {
			attempt, hint = a.invalid.Error(), AsFailure(a.invalid).Hint
		}
		state, reason := StateNone, NoCertificate
		var unusable *cache.UnusableError
		if errors.As(status.problem, &unusable) && unusable.Clock {
			state, reason = StateExpired, CertificateExpired
		}
		set(state, reason, fmt.Sprintf("%v; %s", status.problem, attempt), hint)
		return
	}
	until := inSeconds(status.pair.Leaf.NotAfter).Format(time.RFC3339)
	failing := func(why, hint string) {
		set(StateFailing, RenewalFailing, fmt.Sprintf("the certificate is served, to %s at most, but %s", until, why), hint)
	}
	switch late := o.overdue(status, now); {
	case a.invalid != nil:
		failing("the configuration is wrong: "+a.invalid.Error(), AsFailure(a.invalid).Hint)
	case status.due == "":
		o.State, o.Message = StateOK, "valid to "+until
		if o.Certificate.RenewAt.IsZero() {
			o.Message += fmt.Sprintf("; provider %s does not renew", o.Provider)
		} else {
			o.Message += ", due at " + o.Certificate.RenewAt.Format(time.RFC3339)
		}
	case failed || status.rejected:
		failing(status.due+"; "+attempt, hint)
	case late != "":
		failing(late+"; "+attempt, hint)
	default:
		set(StateDue, CertificateDue, fmt.Sprintf("valid to %s, but a new one is wanted: %s; %s", until, status.due, attempt), hint)
	}
}

// attempt says how the request of a new certificate goes, and whether it has failed.
func (o *Overview) attempt() (message, hint string, failed bool) {
	const next = "the kubelet's next call starts a worker"
	last := o.LastRun
	waits := ""
	if o.Pending != nil {
		waits = fmt.Sprintf("CertificateSigningRequest %s waits for %s", o.Pending.Name, o.Pending.describeWait())
	}
	switch {
	case o.Worker.Died:
		return "the last worker died without a result", "see the worker's log in the certificate directory", true
	case last != nil && last.Reason != "" && Reason(last.Reason) != WaitingForSigner:
		message = fmt.Sprintf("%s, %d in a row: %s", last.Reason, o.Failures, last.Message)
		return message, last.Hint, true
	case last != nil && last.Reason == "" && last.Message != "": // issued again and again
		return last.Message, last.Hint, true
	case waits != "":
		return waits, "see: kubectl describe csr " + o.Pending.Name, false
	case o.Worker.Running:
		return "a worker runs", "", false
	}
	if o.Credential.Problem != "" {
		return "no request can be filed: " + o.Credential.Problem, o.Credential.Hint, false
	}
	return "no worker runs: " + next, "check that the kubelet runs, and that its kubeconfig names this program: see doctor", false
}

// describeWait says what a pending request waits for.
func (p *PendingOverview) describeWait() string {
	switch p.WaitsFor {
	case waitsForFiling:
		return "being filed with " + p.Server
	case waitsForChallenge:
		return "its challenge"
	}
	return "its certificate from signer " + p.SignerName
}

// overdue says what takes too long, empty if nothing does.
func (o *Overview) overdue(status certificateStatus, now time.Time) string {
	if o.Pending != nil && o.Pending.AgeSeconds >= int64(overduePending/time.Second) {
		return fmt.Sprintf("a request is pending since %s", o.Pending.Created.Format(time.RFC3339))
	}
	if renewAt := RenewAt(status.pair.Leaf); !o.Certificate.RenewAt.IsZero() && now.After(renewAt.Add(overdueRenewal)) {
		return "its renewal has been due since " + inSeconds(renewAt).Format(time.RFC3339)
	}
	return ""
}
