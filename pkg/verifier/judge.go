// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"bytes"
	"encoding/pem"
	"slices"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr/state"
)

// Input is all that one decision depends on. The caller finds it; the rules decide what of it counts.
type Input struct {
	Now time.Time
	// Request is the one to decide on, as the API server holds it.
	Request *certificatesv1.CertificateSigningRequest
	// Hello is the request that the proof refers to, nil if it is not there.
	Hello    *certificatesv1.CertificateSigningRequest
	Evidence Evidence
	// Records are those of the cluster, or at least each that has the request's node name or the evidence's endorsement key, or is of one of
	// Machines.
	Records []Record
	// Machines are those of the cluster, each once, or at least each that has such a record, for which an authority names the
	// endorsement key, that may have the node name, or that the token was made for.
	Machines []Machine
	// Token is about the bootstrap token that the request was filed with.
	Token Token
	// Node is whether a Node of the request's name exists.
	Node Presence
	// OverRate says that this requester, machine or cluster is over its rate.
	OverRate bool
	// NoSigner says that there is nobody to sign with at present, where this controller signs: client certificates, and serving certificates
	// under a signer for which SignsServing is true.
	NoSigner bool
}

// Claim is what a request says, for the caller to look up what Input needs. Nothing vouches for it.
type Claim struct {
	Provider string
	// Hello says that it is filed as one, Serving that it is for a serving certificate.
	Hello, Serving bool
	// NodeName and ProviderID are empty where the request has none that is well-formed.
	NodeName, ProviderID string
}

// Look reports whether a request is one to decide on, by its signer and, where that is shared, by its PROVIDER block, and what it claims. It
// does not matter what has been decided.
func (r *Rules) Look(request *certificatesv1.CertificateSigningRequest) (Claim, bool) {
	t := r.open(Input{Request: request})
	if t == nil {
		return Claim{}, false
	}
	switch {
	case t.unattested:
		t.judgeUnattested()
	case t.serving:
		t.judgeServing()
	default:
		t.judgeRequest()
	}
	return Claim{t.content.Provider, t.hello, t.serving, t.asks.nodeName, t.asks.providerID}, true
}

// Concerned reports whether a request is one to decide on, without reading more of it than that takes.
func (r *Rules) Concerned(request *certificatesv1.CertificateSigningRequest) bool {
	return r.open(Input{Request: request}) != nil
}

// Deadline returns when a request has waited long enough.
func (r *Rules) Deadline(request *certificatesv1.CertificateSigningRequest) time.Time {
	return request.CreationTimestamp.Add(r.policy.WaitDeadline)
}

// JudgeUnsigned decides on a request that was approved for another signer, and that a record names: Ignore until the deadline, then Fail, so that
// it is not in the way of its machine's next for ever.
func (r *Rules) JudgeUnsigned(in Input) Decision {
	t := r.open(in)
	if t == nil || state.Of(in.Request) != state.Approved || in.Request.CreationTimestamp.IsZero() || in.Now.Before(r.Deadline(in.Request)) {
		return Decision{Outcome: Ignore}
	}
	return Decision{Outcome: Fail, Refusals: Refusals{{Reason: ReasonSignerUnavailable, Message: "nobody issued it in time"}}}
}

// Judge decides on a request that nobody has decided on yet: Ignore, Wait, Deny, Challenge for a good hello, Approve for a good proof,
// ApproveServing for a serving certificate, ApproveUnattested for a node that the policy leaves alone.
func (r *Rules) Judge(in Input) Decision {
	t := r.open(in)
	if t == nil || state.Of(in.Request) != state.Pending || t.leftToOthers() {
		return Decision{Outcome: Ignore}
	}
	t.judge()
	t.judgeOthers()
	if d, hold := t.settle(Deny); !hold {
		return d
	}
	switch {
	case t.unattested:
		return t.grant(ApproveUnattested, Record{})
	case t.serving:
		return t.grant(ApproveServing, Record{})
	case t.hello:
		return t.grant(Challenge, Record{})
	}
	return t.grant(Approve, t.next())
}

// JudgeSigning decides, of a request that has been approved, whether to sign it: Ignore, Wait, Fail, Sign, and SignServing for a serving
// certificate under a signer of ours. Every rule is judged again, and the records must be those of now: an approval
// counts only together with the record that was written before it.
func (r *Rules) JudgeSigning(in Input) Decision {
	t := r.open(in)
	if t == nil || !t.signedHere() || state.Of(in.Request) != state.Approved || t.leftToOthers() {
		return Decision{Outcome: Ignore}
	}
	if t.serving {
		// Whoever approved it: what the rules go by is in the request, the record and the machine, and an approval adds nothing to that.
		t.judge()
		if d, hold := t.settle(Fail); !hold {
			return d
		}
		return t.grant(SignServing, Record{})
	}
	named := slices.ContainsFunc(in.Records, func(record Record) bool { return record.names(in.Request) })
	if t.hello || !named {
		t.deny(ReasonApprovedWithoutAttestation, "approved, but not by this controller")
	}
	t.judge()
	if d, hold := t.settle(Fail); !hold {
		return d
	}
	if t.hello || t.record == nil || !t.record.names(in.Request) { // the one that names it is this machine's
		t.deny(ReasonApprovedWithoutAttestation, "approved, but not for this machine")
		d, _ := t.settle(Fail)
		return d
	}
	return t.grant(Sign, *t.record)
}

// trial is one decision in the making. What a rule finds is zero until then, and where the rule failed.
type trial struct {
	rules *Rules
	in    Input
	// hello and insecure say which signer is asked, serving that it is one for serving certificates, and unattested that the node is left alone.
	hello, insecure, serving, unattested bool
	// orphans are records that in.Records no longer has.
	orphans []Record
	// content is what spec.request holds, and asks what the certification request in it asks for.
	content attestation.Request
	asks    certification
	// matches says that the evidence in content is of a provider that the signer is for.
	matches bool
	class   Class
	// ek is the endorsement key shown or claimed; shown says that the provider's verifier accepts the evidence.
	ek      string
	shown   bool
	machine *Machine
	// proposed says that machine is trusted on first use, if nothing is refused.
	proposed bool
	// tokenJudged says that I3 was applied.
	tokenJudged bool
	record      *Record
	// pendingEK says that ek is to replace the key in record, and waits for that.
	pendingEK bool
	// addresses are what a serving certificate is asked for with.
	addresses   Addresses
	maxLifetime time.Duration

	// denied contradicts, missing is waited for until the deadline, limited for ever, and warned does not count.
	denied, missing, limited, warned Refusals
}

func (t *trial) deny(reason Reason, format string, arguments ...any) {
	t.denied.Add(reason, format, arguments...)
}

func (t *trial) wait(reason Reason, format string, arguments ...any) {
	t.missing.Add(reason, format, arguments...)
}

func (t *trial) warn(reason Reason, format string, arguments ...any) {
	t.warned.Add(reason, format, arguments...)
}

// fail notes that a rule failed which counts as much as mode says.
func (t *trial) fail(mode Mode, reason Reason, format string, arguments ...any) {
	switch mode {
	case Off:
	case Warn:
		t.warn(reason, format, arguments...)
	default:
		t.deny(reason, format, arguments...)
	}
}

// open returns a trial, nil if the request is not ours: another's signer, or, under a signer that is shared, another's evidence or none. This
// comes before anything is validated.
func (r *Rules) open(in Input) *trial {
	if r == nil || in.Request == nil {
		return nil
	}
	var orphans []Record
	in.Records, orphans = withoutOrphans(in.Records)
	if r.leavesAlone(in.Request.Spec) {
		return &trial{rules: r, in: in, unattested: true}
	}
	if r.serves(in.Request.Spec) {
		return &trial{rules: r, in: in, serving: true}
	}
	signer, ours := r.signers[in.Request.Spec.SignerName]
	if !ours || signer.Shared && !claims(in.Request.Spec.Request, signer) {
		return nil
	}
	return &trial{
		rules: r, in: in, orphans: orphans,
		hello:    signer.Name == attestation.HelloSignerName,
		insecure: signer.Name == InsecureSignerName,
	}
}

// signedHere reports whether a request is for a signer that this controller may sign for.
func (t *trial) signedHere() bool {
	return !t.unattested && (!t.serving || t.rules.SignsServing(t.in.Request.Spec.SignerName))
}

// withoutOrphans returns the records that count, and those of machines that are gone.
func withoutOrphans(records []Record) (counting, orphans []Record) {
	if !slices.ContainsFunc(records, func(r Record) bool { return r.Orphaned }) {
		return records, nil
	}
	for _, r := range records {
		if r.Orphaned {
			orphans = append(orphans, r)
		} else {
			counting = append(counting, r)
		}
	}
	return counting, orphans
}

// takes reports whether the signer is for this provider.
func (s Signer) takes(provider string) bool { return slices.Contains(s.Providers, provider) }

// claims reports whether a request has a PROVIDER block with a provider of the signer, be it malformed otherwise.
func claims(request []byte, signer Signer) bool {
	begin := []byte("-----BEGIN " + attestation.BlockProvider + "-----")
	for {
		i := bytes.Index(request, begin)
		if i < 0 {
			return false
		}
		request = request[i:]
		end := bytes.Index(request[len(begin):], []byte("-----BEGIN "))
		block := request
		if end >= 0 {
			block = request[:len(begin)+end]
		}
		if p, _ := pem.Decode(block); p != nil && signer.takes(string(bytes.TrimSpace(p.Bytes))) {
			return true
		}
		request = request[len(begin):]
	}
}

// judge applies every rule, in the order of the reasons.
func (t *trial) judge() {
	if t.in.Now.IsZero() {
		t.deny(ReasonRefused, "no time was given")
	}
	if t.in.OverRate {
		t.limited.Add(ReasonRateLimited, "too many requests")
	}
	if t.in.NoSigner && t.signedHere() {
		t.wait(ReasonSignerUnavailable, "there is no CA to sign with at present")
	}
	if t.unattested {
		t.judgeUnattested()
		return
	}
	if t.serving {
		t.judgeServing()
		return
	}
	t.judgeRequest()
	t.judgeRequester()
	if !t.matches {
		return // there is no evidence to go by
	}
	t.judgePair()
	t.judgeEvidence()
	t.selectMachine()
	t.findRecord()
	t.judgeToken()
	t.judgeCredential()
	t.judgeMachine()
	t.judgeName()
	t.judgeNodeObject()
	t.judgeRecords()
	if t.shown && !t.hello && t.record != nil && t.record.EK == t.ek {
		t.judgeNamed(t.record)
	}
	t.judgeOrphans()
	t.judgeSpent()
}

// judgeRequest applies S1 to S6.
func (t *trial) judgeRequest() {
	spec := t.in.Request.Spec
	content, err := attestation.Parse(spec.Request)
	if err != nil {
		t.deny(ReasonMalformedRequest, "%v", err)
		return
	}
	t.content, t.matches = content, t.rules.signers[spec.SignerName].takes(content.Provider)
	if !t.matches {
		t.deny(ReasonProviderMismatch, "the signer is not for the provider %.64q", content.Provider)
	}
	t.asks = judgeCertification(&t.denied, content.PKCS10)
	judgeUsages(&t.denied, spec.Usages, t.asks.key, certificatesv1.UsageClientAuth)
}

// settle returns whether every rule holds, and else what follows: refuse is Deny or Fail. What contradicts beats what is missing.
func (t *trial) settle(refuse Outcome) (d Decision, hold bool) {
	d = Decision{Class: t.class, Warnings: t.warned}
	overdue := !t.in.Request.CreationTimestamp.IsZero() && !t.in.Now.Before(t.rules.Deadline(t.in.Request))
	switch {
	case len(t.denied) > 0:
		d.Outcome, d.Refusals = refuse, expiredLast(t.denied)
	case len(t.missing) > 0 && overdue:
		d.Outcome, d.Refusals = refuse, t.missing
	case len(t.missing) > 0 || len(t.limited) > 0:
		d.Outcome, d.Refusals = Wait, slices.Concat(t.missing, t.limited)
	case t.class == 0 || t.asks.key == nil || t.asks.nodeName == "" || !t.unattested && t.machine == nil ||
		!t.unattested && !t.serving && !t.shown || t.serving && t.addresses.count() == 0: // cannot be: each comes with a refusal
		d.Outcome, d.Refusals = refuse, Refusals{{Reason: ReasonRefused}}
	default:
		hold = true
	}
	return d, hold
}

// expiredLast moves the reason for which a node may start over at once behind all others: it is the whole's only if nothing else failed.
func expiredLast(refusals Refusals) Refusals {
	var others, expired Refusals
	for _, refusal := range refusals {
		if refusal.Reason == attestation.ReasonExpired {
			expired = append(expired, refusal)
		} else {
			others = append(others, refusal)
		}
	}
	return append(others, expired...)
}

// grant is the one place from which a request passes.
func (t *trial) grant(outcome Outcome, record Record) Decision {
	return Decision{Outcome: outcome, Class: t.class, Warnings: t.warned, Grant: &Grant{
		NodeName: t.asks.nodeName, PublicKey: t.asks.key, MaxLifetime: t.maxLifetime, Addresses: t.addresses, Record: record,
	}}
}
