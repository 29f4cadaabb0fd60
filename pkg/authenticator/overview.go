// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"cmp"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// Overview reads the node's files. It takes no lock, writes nothing, and uses neither the network
// nor the provider's device.
func (a *Authenticator) Overview() *Overview {
	now := a.node.Now()
	o := &Overview{Time: inSeconds(now)}
	if a.node.Invalid == nil { // otherwise these may be defaults instead of the file's settings
		o.Provider, o.SignerName = a.provider.Name(), a.signerName
	}
	// Read the worker before the state file: then the result of an ended worker is in the state
	// file.
	worker := a.node.Dir().Worker()
	o.Worker.Running = worker.Alive()
	status := a.node.Load()
	state := status.State
	o.NodeName = status.NodeName
	o.describeCertificate(a, status, now)
	o.describeAnnouncement(a, status)
	o.describeWorker(a, worker, status)
	pending, err := a.node.Dir().Pending()
	if err == nil && pending != nil {
		o.describePending(pending, state, now)
	}
	o.describeEK(a, pending, state)
	o.describeCredential(a, status)
	switch {
	case a.node.Invalid != nil:
		o.Problem = a.node.Invalid.Error()
	case status.Remark != nil:
		o.Problem = status.Remark.Error()
	case cache.MustBeSetAside(err):
		o.Problem = err.Error()
	case cache.MustBeSetAside(status.StateErr):
		o.Problem = status.StateErr.Error()
	case status.NameErr != nil:
		o.Problem = status.NameErr.Error()
	}
	o.judge(a, status, now)
	return o
}

// inSeconds returns a time in the format of an Overview.
func inSeconds(t time.Time) time.Time { return t.UTC().Truncate(time.Second) }

func (o *Overview) describeCertificate(a *Authenticator, status nodestate.Status, now time.Time) {
	held := status.Held
	if held == nil {
		return
	}
	c := &CertificateOverview{
		File: a.node.Dir().File(cache.CurrentFile), Subject: held.Leaf.Subject.String(), Serial: held.Leaf.SerialNumber.Text(16),
		Issuer: held.Leaf.Issuer.String(), Fingerprint: held.Fingerprint(),
		NotBefore: inSeconds(held.Leaf.NotBefore), NotAfter: inSeconds(held.Leaf.NotAfter),
		RemainingSeconds: int64(held.Leaf.NotAfter.Sub(now) / time.Second),
		Due:              status.Due, Rejected: status.Rejected,
	}
	if held.Origin != nil {
		c.Server = held.Origin.Server
	}
	if a.node.Access.Renews {
		c.RenewAt = inSeconds(nodestate.RenewAt(held.Leaf))
	}
	if status.Problem != nil {
		c.Unusable = status.Problem.Error()
	}
	o.Certificate = c
}

func (o *Overview) describeAnnouncement(a *Authenticator, status nodestate.Status) {
	if !a.node.Checks() || status.Pair == nil {
		return
	}
	found := status.Announcement
	c := &AnnouncementOverview{
		Exists: found.Exists, Problem: found.Problem,
		Reported: found.Reported == status.Pair.Fingerprint(), ReportProblem: found.ReportProblem,
	}
	if !found.Checked.IsZero() {
		c.Checked = inSeconds(found.Checked)
	}
	if !found.Answered.IsZero() {
		c.Answered = inSeconds(found.Answered)
	}
	if next := status.NextCheck(); next.After(a.node.Now()) {
		c.NextCheck = inSeconds(next)
	}
	if renewal := status.AnnouncedRenewal(); renewal != nil {
		c.Renewal, c.DueAt = renewal.Name, inSeconds(renewal.DueAt)
	}
	o.Announcement = c
}

func (o *Overview) describeWorker(a *Authenticator, worker process.ID, status nodestate.Status) {
	state := status.State
	if o.Worker.Running {
		o.Worker.PID, o.Worker.AgeSeconds = worker.PID, int64(worker.Age()/time.Second)
	}
	// A worker may be killed after it has installed its certificate: that is no failure.
	o.Worker.Died = !o.Worker.Running && nodestate.LeftNoResult(worker, state) &&
		a.node.Dir().Stamp(cache.CurrentFile).Modified().Before(time.Now().Add(-worker.Age()))
	if last := state.Last; last != nil {
		o.LastRun = &LastRunOverview{
			Started: inSeconds(last.Started), Finished: inSeconds(last.Finished),
			Reason: last.Reason, Message: last.Message, Hint: last.Hint, Request: last.Request, Phases: last.Phases,
		}
	}
	o.Failures = state.Failures
	if next := status.NextAttempt(); !next.IsZero() {
		o.NextAttempt = inSeconds(next)
	}
}

func (o *Overview) describePending(pending *cache.Pending, state *cache.State, now time.Time) {
	last := pending.Last()
	o.Pending = &PendingOverview{
		Name: last.Name, SignerName: nodestate.SignerOf(pending), NodeName: pending.NodeName, Server: pending.Cluster.Server,
		Created: inSeconds(last.FiledAt), AgeSeconds: int64(max(now.Sub(last.FiledAt), 0) / time.Second), WaitsFor: waitsForCertificate,
	}
	if waiting, ok := nodestate.WaitsFor(pending, state); ok {
		o.Pending.Reason, o.Pending.Cure = waiting.Reason, waiting.Text
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

func (o *Overview) describeCredential(a *Authenticator, status nodestate.Status) {
	if a.node.Invalid != nil || status.Permanent {
		o.Credential.Problem = "no request is filed until this is solved: " + cmp.Or(a.node.Invalid, status.Problem).Error()
		return
	}
	to, why, err := status.Access()
	if err != nil {
		failure := reason.AsFailure(err)
		o.Credential = CredentialOverview{Why: why, Problem: failure.Error(), Hint: failure.Hint}
		return
	}
	o.Credential = CredentialOverview{Kind: "bootstrap", Description: to.Credential, Why: why, Server: to.Cluster.Server, Source: to.Source}
	if to.Own {
		o.Credential.Kind, o.Credential.Why = "node", "the certificate can be used, and provider "+a.provider.Name()+" renews"
	}
}
