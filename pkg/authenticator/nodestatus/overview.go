// SPDX-License-Identifier: Apache-2.0

// Package nodestatus describes a node's certificate for people and scripts, from the node's files:
// the command status. types.go has the Overview, overview.go reads the files, and judge.go sums
// them up.
package nodestatus

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
func (n Node) Overview() *Overview {
	now := n.Now()
	o := &Overview{Time: inSeconds(now)}
	if n.Invalid == nil { // otherwise these may be defaults instead of the file's settings
		o.Provider, o.SignerName = n.Provider.Name(), n.SignerName
	}
	// Read the worker before the state file: then the result of an ended worker is in the state
	// file.
	worker := n.Dir().Worker()
	o.Worker.Running = worker.Alive()
	status := n.Load()
	state := status.State
	o.NodeName = status.NodeName
	if choice := state.Choice; n.Auto && choice != nil && choice.Provider == o.Provider {
		o.ProviderChosen = choice.Why
	}
	o.describeCertificate(n, status, now)
	o.describeAnnouncement(n, status)
	o.describeWorker(n, worker, status)
	pending, err := n.Dir().Pending()
	if err == nil && pending != nil {
		o.describePending(pending, state, now)
	}
	o.describeEK(n, pending, state)
	o.describeCredential(n, status)
	switch {
	case n.Invalid != nil:
		o.Problem = n.Invalid.Error()
	case status.Remark != nil:
		o.Problem = status.Remark.Error()
	case cache.MustBeSetAside(err):
		o.Problem = err.Error()
	case cache.MustBeSetAside(status.StateErr):
		o.Problem = status.StateErr.Error()
	case status.NameErr != nil:
		o.Problem = status.NameErr.Error()
	}
	o.judge(n, status, now)
	return o
}

func (o *Overview) describeCertificate(n Node, status nodestate.Status, now time.Time) {
	held := status.Held
	if held == nil {
		return
	}
	c := &CertificateOverview{
		File: n.Dir().File(cache.CurrentFile), Subject: held.Leaf.Subject.String(), Serial: held.Leaf.SerialNumber.Text(16),
		Issuer: held.Leaf.Issuer.String(), Fingerprint: held.Fingerprint(),
		NotBefore: inSeconds(held.Leaf.NotBefore), NotAfter: inSeconds(held.Leaf.NotAfter),
		RemainingSeconds: int64(held.Leaf.NotAfter.Sub(now) / time.Second),
		Due:              status.Due, Rejected: status.Rejected,
	}
	if held.Origin != nil {
		c.Server = held.Origin.Server
	}
	if n.Access.Renews {
		c.RenewAt = inSeconds(nodestate.RenewAt(held.Leaf))
	}
	if status.Problem != nil {
		c.Unusable = status.Problem.Error()
	}
	o.Certificate = c
}

func (o *Overview) describeAnnouncement(n Node, status nodestate.Status) {
	if !n.Checks() || status.Pair == nil {
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
	if next := status.NextCheck(); next.After(n.Now()) {
		c.NextCheck = inSeconds(next)
	}
	if renewal := status.AnnouncedRenewal(); renewal != nil {
		c.Renewal, c.DueAt = renewal.Name, inSeconds(renewal.DueAt)
	}
	o.Announcement = c
}

func (o *Overview) describeWorker(n Node, worker process.ID, status nodestate.Status) {
	state := status.State
	if o.Worker.Running {
		o.Worker.PID, o.Worker.AgeSeconds = worker.PID, int64(worker.Age()/time.Second)
	}
	// A worker may be killed after it has installed its certificate: that is no failure.
	o.Worker.Died = !o.Worker.Running && nodestate.LeftNoResult(worker, state) &&
		n.Dir().Stamp(cache.CurrentFile).Modified().Before(time.Now().Add(-worker.Age()))
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

func (o *Overview) describeEK(n Node, pending *cache.Pending, state *cache.State) {
	namer, ok := n.Provider.(provider.EKNamer)
	if !ok {
		return
	}
	o.EK = &EKOverview{Template: namer.EKTemplate(state.Remembered[n.Provider.Name()])}
	inspector, ok := n.Provider.(provider.Inspector)
	if !ok || pending == nil || pending.Provider != n.Provider.Name() || !pending.Requests[0].Hello {
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

func (o *Overview) describeCredential(n Node, status nodestate.Status) {
	if n.Invalid != nil || status.Permanent {
		o.Credential.Problem = "no request is filed until this is solved: " + cmp.Or(n.Invalid, status.Problem).Error()
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
		o.Credential.Kind, o.Credential.Why = "node", "the certificate can be used, and provider "+n.Provider.Name()+" renews"
	}
}
