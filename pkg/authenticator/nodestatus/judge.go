// SPDX-License-Identifier: Apache-2.0

package nodestatus

import (
	"errors"
	"fmt"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// judge derives the state from the other fields.
func (o *Overview) judge(n Node, status nodestate.Status, now time.Time) {
	attempt, hint, failed := o.attempt()
	if status.Permanent {
		failure := reason.AsFailure(status.Problem)
		o.set(StateUnknown, failure.Reason, failure.Error(), failure.Hint)
		return
	}
	if status.Pair == nil {
		if n.Invalid != nil {
			attempt, hint = n.Invalid.Error(), reason.AsFailure(n.Invalid).Hint
		}
		state, why := StateNone, reason.NoCertificate
		var unusable *cache.UnusableError
		if errors.As(status.Problem, &unusable) && unusable.Clock {
			state, why = StateExpired, reason.CertificateExpired
		}
		o.set(state, why, fmt.Sprintf("%v; %s", status.Problem, attempt), hint)
		return
	}
	until := inSeconds(status.Pair.Leaf.NotAfter).Format(time.RFC3339)
	served := fmt.Sprintf("the certificate is served, to %s at most, but ", until)
	if n.Invalid != nil {
		o.set(StateFailing, reason.RenewalFailing, served+"the configuration is wrong: "+n.Invalid.Error(), reason.AsFailure(n.Invalid).Hint)
		return
	}
	if status.Due == "" {
		o.State, o.Message = StateOK, "valid to "+until+", due at "+o.Certificate.RenewAt.Format(time.RFC3339)
		if o.Certificate.RenewAt.IsZero() {
			o.Message = fmt.Sprintf("valid to %s; provider %s does not renew", until, o.Provider)
		}
		if renewal := status.AnnouncedRenewal(); renewal != nil && renewal.DueAt.Before(o.Certificate.RenewAt) {
			o.Message = fmt.Sprintf("valid to %s, due at %s by the announced renewal %q", until, inSeconds(renewal.DueAt).Format(time.RFC3339), renewal.Name)
		}
		return
	}
	if failed || status.Rejected {
		o.set(StateFailing, reason.RenewalFailing, served+status.Due+"; "+attempt, hint)
		return
	}
	if late := o.overdue(status, now); late != "" {
		o.set(StateFailing, reason.RenewalFailing, served+late+"; "+attempt, hint)
		return
	}
	o.set(StateDue, reason.CertificateDue, fmt.Sprintf("valid to %s, but a new one is wanted: %s; %s", until, status.Due, attempt), hint)
}

// set sets a state other than StateOK.
func (o *Overview) set(state State, why reason.Reason, message, hint string) {
	o.State, o.Message, o.Hint = state, text.Line(message, reason.MaxMessage), hint
	// the Overview has the message and the hint
	o.failure = why.Failure("", fmt.Errorf("the node's certificate: %s", state))
}

// attempt describes the attempt to get a new certificate, and reports whether it has failed.
func (o *Overview) attempt() (message, hint string, failed bool) {
	const next = "the kubelet's next call starts a worker"
	last := o.LastRun
	waits, cure := "", ""
	if o.Pending != nil {
		waits = fmt.Sprintf("CertificateSigningRequest %s waits for %s", o.Pending.Name, o.Pending.describeWait())
		cure = "see: kubectl describe csr " + o.Pending.Name
		if o.Pending.Reason != "" {
			waits, cure = waits+": "+o.Pending.Reason, o.Pending.Cure
		}
	}
	switch {
	case o.Worker.Died:
		return "the last worker died without a result", "see the worker's log in the certificate directory", true
	case last != nil && last.Reason != "" && reason.Reason(last.Reason) != reason.WaitingForSigner:
		message = fmt.Sprintf("%s, %d in a row: %s", last.Reason, o.Failures, last.Message)
		return message, last.Hint, true
	case last != nil && last.Reason == "" && last.Message != "": // issued again and again
		return last.Message, last.Hint, true
	case waits != "":
		return waits, cure, false
	case o.Worker.Running:
		return "a worker runs", "", false
	}
	if o.Credential.Problem != "" {
		return "no request can be filed: " + o.Credential.Problem, o.Credential.Hint, false
	}
	return "no worker runs: " + next, "check that the kubelet runs, and that its kubeconfig names this program: see doctor", false
}

// describeWait returns what a pending request waits for.
func (p *PendingOverview) describeWait() string {
	switch p.WaitsFor {
	case waitsForFiling:
		return "being filed with " + p.Server
	case waitsForChallenge:
		return "its challenge"
	}
	return "its certificate from signer " + p.SignerName
}

// overdue returns what takes too long, "" if nothing does.
func (o *Overview) overdue(status nodestate.Status, now time.Time) string {
	if o.Pending != nil && o.Pending.AgeSeconds >= int64(nodestate.PendingFails/time.Second) {
		return fmt.Sprintf("a request has been pending since %s", o.Pending.Created.Format(time.RFC3339))
	}
	if renewAt := nodestate.RenewAt(status.Pair.Leaf); !o.Certificate.RenewAt.IsZero() && nodestate.RenewalFails(renewAt, now) {
		return "its renewal has been due since " + inSeconds(renewAt).Format(time.RFC3339)
	}
	if renewal := status.AnnouncedRenewal(); renewal != nil && nodestate.RenewalFails(renewal.DueAt, now) {
		return fmt.Sprintf("the announced renewal %q has been due since %s", renewal.Name, inSeconds(renewal.DueAt).Format(time.RFC3339))
	}
	return ""
}
