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

// Input is all that one decision depends on. The caller collects it, and the rules decide what of
// it counts.
type Input struct {
	Now time.Time
	// Request is the one to decide on, as the API server holds it.
	Request *certificatesv1.CertificateSigningRequest
	// Hello is the request that the proof refers to, nil if it is not there.
	Hello    *certificatesv1.CertificateSigningRequest
	Evidence Evidence
	// Records are those of the cluster. At least each that has the request's node name or the
	// evidence's endorsement key, or that belongs to one of Machines, must be here.
	Records []Record
	// Machines are those of the cluster, each once, or at least MachineIndex.Relevant.
	Machines []Machine
	// Token is about the bootstrap token that the request was filed with.
	Token Token
	// Node is whether a Node of the request's name exists.
	Node Presence
	// SuspendedEKs are the endorsement keys of the machines that an operator has suspended, in the
	// form of Evidence.EK. Nobody changes the map. SuspensionsUnknown says that the keys could not be
	// read.
	SuspendedEKs       map[string]bool
	SuspensionsUnknown bool
	// RateLimited says that this requester, machine or cluster is over its rate.
	RateLimited bool
	// SignerUnavailable says that there is no CA to sign with at present, where this controller
	// signs: client certificates, and serving certificates under a signer for which SignsServing is
	// true.
	SignerUnavailable bool
}

// Claim is what a request says about itself. The caller looks up what Input needs by it. Nothing
// vouches for a claim.
type Claim struct {
	Provider string
	// Hello says that the request is filed as a hello, Serving that it is for a serving
	// certificate.
	Hello, Serving bool
	// NodeName and ProviderID are empty if the request has none that is well-formed.
	NodeName, ProviderID string
}

// ParseClaim returns what a request claims, and reports whether the request is one to decide on.
// That follows from its signer and, on a shared signer, from its PROVIDER block. Conditions of the
// request do not matter.
func (r *Rules) ParseClaim(request *certificatesv1.CertificateSigningRequest) (Claim, bool) {
	e := r.newEvaluation(Input{Request: request})
	if e == nil {
		return Claim{}, false
	}
	switch {
	case e.unattested:
		e.judgeUnattested()
	case e.serving:
		e.judgeServing()
	default:
		e.judgeRequest()
	}
	return Claim{e.content.Provider, e.hello, e.serving, e.requested.nodeName, e.requested.providerID}, true
}

// Matches reports whether a request is one to decide on, and parses no more of it than that needs.
func (r *Rules) Matches(request *certificatesv1.CertificateSigningRequest) bool {
	return r.newEvaluation(Input{Request: request}) != nil
}

// AttestingSigners returns the signers whose requests come with evidence, and that of hellos.
func (r *Rules) AttestingSigners() (names []string) {
	for name := range r.signers {
		if name != InsecureSignerName {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// Deadline returns when a request has waited long enough.
func (r *Rules) Deadline(request *certificatesv1.CertificateSigningRequest) time.Time {
	return request.CreationTimestamp.Add(r.policy.WaitDeadline)
}

// JudgeUnsigned decides on a request that was approved for another signer, and for which a record
// was written: Ignore until the deadline, then Fail. Otherwise it would keep its machine's next
// request waiting for ever.
func (r *Rules) JudgeUnsigned(in Input) Decision {
	e := r.newEvaluation(in)
	if e == nil || state.Of(in.Request) != state.Approved || in.Request.CreationTimestamp.IsZero() || in.Now.Before(r.Deadline(in.Request)) {
		return Decision{Outcome: Ignore}
	}
	return Decision{Outcome: Fail, Refusals: Refusals{{Reason: ReasonSignerUnavailable, Message: "nobody issued it in time"}}}
}

// Judge decides on a request that has no condition yet: Ignore, Wait, Deny, Challenge for a good
// hello, Approve for a good proof, ApproveServing for a serving certificate, or ApproveUnattested
// for an unattested node that the policy lists.
func (r *Rules) Judge(in Input) Decision {
	e := r.newEvaluation(in)
	if e == nil || state.Of(in.Request) != state.Pending || e.leftToOtherApprovers() {
		return Decision{Outcome: Ignore}
	}
	e.judge()
	e.judgeOtherProofs()
	if d, hold := e.conclude(Deny); !hold {
		return d
	}
	switch {
	case e.unattested:
		return e.grant(ApproveUnattested, Record{})
	case e.serving:
		return e.grant(ApproveServing, Record{})
	case e.hello:
		return e.grant(Challenge, Record{})
	}
	return e.grant(Approve, e.nextRecord())
}

// JudgeSigning decides whether to sign an approved request: Ignore, Wait, Fail, Sign, or
// SignServing for a serving certificate under a signer of ours. Every rule is judged again. An
// approval counts only together with the record that was written before it. So that record must be
// live, or the caller's own last write.
func (r *Rules) JudgeSigning(in Input) Decision {
	e := r.newEvaluation(in)
	if e == nil || !e.signedHere() || state.Of(in.Request) != state.Approved || e.leftToOtherApprovers() {
		return Decision{Outcome: Ignore}
	}
	if e.serving {
		// Who approved it does not matter: the rules go by request, record and machine alone.
		e.judge()
		if d, hold := e.conclude(Fail); !hold {
			return d
		}
		return e.grant(SignServing, Record{})
	}
	named := slices.ContainsFunc(in.Records, func(record Record) bool { return record.isFor(in.Request) })
	if e.hello || !named {
		e.deny(ReasonApprovedWithoutAttestation, "approved, but not by this controller")
	}
	e.judge()
	if d, hold := e.conclude(Fail); !hold {
		return d
	}
	if e.hello || e.record == nil || !e.record.isFor(in.Request) { // the one that names it is this machine's
		e.deny(ReasonApprovedWithoutAttestation, "approved, but not for this machine")
		d, _ := e.conclude(Fail)
		return d
	}
	return e.grant(Sign, *e.record)
}

// evaluation is one decision in the making. What a rule finds is zero before the rule was judged,
// and if it failed.
type evaluation struct {
	rules *Rules
	in    Input
	// hello and insecure say which signer is asked. serving says that it is one for serving
	// certificates, and unattested that the policy lists the node as unattested.
	hello, insecure, serving, unattested bool
	// orphans are records of machines that are gone. They are not in in.Records any more.
	orphans []Record
	// content is what spec.request holds, and requested what its PKCS#10 request asks for.
	content   attestation.Request
	requested requestedCertificate
	// providerMatches says that the evidence is of a provider that the signer is for.
	providerMatches bool
	class           Class
	// ek is the endorsement key, proven by a proof and claimed by a hello. evidenceAccepted says
	// that the provider's verifier accepts the evidence.
	ek               string
	evidenceAccepted bool
	machine          *Machine
	// claimedTwice says that the evidence belongs to more than one machine. If a record has the
	// key, machine is the record's all the same.
	claimedTwice bool
	// trustedOnFirstUse says that machine was selected on first use. It counts if nothing is
	// refused.
	trustedOnFirstUse bool
	// tokenJudged says that I3 was applied.
	tokenJudged bool
	record      *Record
	// ekChangePending says that ek is to replace the key in record, once the controller accepts
	// that.
	ekChangePending bool
	// addresses are those that a serving certificate is asked for with.
	addresses   Addresses
	maxLifetime time.Duration

	// denied has what contradicts, missing what is waited for until the deadline, limited what is
	// waited for without a deadline, and warned what does not count.
	denied, missing, limited, warned Refusals
}

func (e *evaluation) deny(reason Reason, format string, arguments ...any) {
	e.denied.Add(reason, format, arguments...)
}

func (e *evaluation) wait(reason Reason, format string, arguments ...any) {
	e.missing.Add(reason, format, arguments...)
}

func (e *evaluation) warn(reason Reason, format string, arguments ...any) {
	e.warned.Add(reason, format, arguments...)
}

// fail adds a failed rule, which counts as mode says.
func (e *evaluation) fail(mode Mode, reason Reason, format string, arguments ...any) {
	switch mode {
	case Off:
	case Warn:
		e.warn(reason, format, arguments...)
	default:
		e.deny(reason, format, arguments...)
	}
}

// newEvaluation returns nil if the request is not ours: another signer, or on a shared signer no
// evidence of ours. It comes before any validation.
func (r *Rules) newEvaluation(in Input) *evaluation {
	if r == nil || in.Request == nil {
		return nil
	}
	var orphans []Record
	in.Records, orphans = withoutOrphans(in.Records)
	if r.isUnattestedRenewal(in.Request.Spec) {
		return &evaluation{rules: r, in: in, unattested: true}
	}
	if r.isForServing(in.Request.Spec) {
		return &evaluation{rules: r, in: in, serving: true}
	}
	signer, ours := r.signers[in.Request.Spec.SignerName]
	if !ours || signer.Shared && !namesProvider(in.Request.Spec.Request, signer) {
		return nil
	}
	return &evaluation{
		rules: r, in: in, orphans: orphans,
		hello:    signer.Name == attestation.HelloSignerName,
		insecure: signer.Name == InsecureSignerName,
	}
}

// signedHere reports whether a request is for a signer that this controller may sign for.
func (e *evaluation) signedHere() bool {
	return !e.unattested && (!e.serving || e.rules.SignsServing(e.in.Request.Spec.SignerName))
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

// accepts reports whether the signer is for this provider.
func (s Signer) accepts(provider string) bool { return slices.Contains(s.Providers, provider) }

// namesProvider reports whether a request has a PROVIDER block with a provider of the signer. The
// request may be malformed otherwise.
func namesProvider(request []byte, signer Signer) bool {
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
		if p, _ := pem.Decode(block); p != nil && signer.accepts(string(bytes.TrimSpace(p.Bytes))) {
			return true
		}
		request = request[len(begin):]
	}
}

// judge applies every rule, in the order of the reasons.
func (e *evaluation) judge() {
	if e.in.Now.IsZero() {
		e.deny(ReasonRefused, "no time was given")
	}
	if e.in.RateLimited {
		e.limited.Add(ReasonRateLimited, "too many requests")
	}
	if e.in.SignerUnavailable && e.signedHere() {
		e.wait(ReasonSignerUnavailable, "there is no CA to sign with at present")
	}
	if e.unattested {
		e.judgeUnattested()
		return
	}
	if e.serving {
		e.judgeServing()
		return
	}
	e.judgeRequest()
	e.judgeRequester()
	if !e.providerMatches {
		return // there is no evidence to go by
	}
	e.judgePair()
	e.judgeEvidence()
	e.selectMachine()
	e.findRecord()
	e.judgeSuspension()
	e.judgeToken()
	e.judgeCredential()
	e.judgeMachine()
	e.judgeName()
	e.judgeNodeObject()
	e.judgeRecords()
	if e.evidenceAccepted && !e.hello && e.record != nil && e.record.EK == e.ek {
		e.warnIfNotNamed(e.record)
	}
	e.judgeOrphans()
	e.judgeHelloReuse()
}

// judgeRequest applies S1 to S6.
func (e *evaluation) judgeRequest() {
	spec := e.in.Request.Spec
	content, err := attestation.Parse(spec.Request)
	if err != nil {
		e.deny(ReasonMalformedRequest, "%v", err)
		return
	}
	e.content, e.providerMatches = content, e.rules.signers[spec.SignerName].accepts(content.Provider)
	if !e.providerMatches {
		e.deny(ReasonProviderMismatch, "the signer is not for the provider %.64q", content.Provider)
	}
	e.requested = judgePKCS10(&e.denied, content.PKCS10)
	judgeUsages(&e.denied, spec.Usages, e.requested.key, certificatesv1.UsageClientAuth)
}

// conclude returns whether every rule holds, and else the decision. refuse is Deny or Fail. What
// contradicts beats what is missing.
func (e *evaluation) conclude(refuse Outcome) (d Decision, hold bool) {
	d = Decision{Class: e.class, Warnings: e.warned}
	overdue := !e.in.Request.CreationTimestamp.IsZero() && !e.in.Now.Before(e.rules.Deadline(e.in.Request))
	switch {
	case len(e.denied) > 0:
		d.Outcome, d.Refusals = refuse, expiredLast(e.denied)
	case len(e.missing) > 0 && overdue:
		d.Outcome, d.Refusals = refuse, e.missing
	case len(e.missing) > 0 || len(e.limited) > 0:
		d.Outcome, d.Refusals = Wait, slices.Concat(e.missing, e.limited)
	case e.class == 0 || e.requested.key == nil || e.requested.nodeName == "" || !e.unattested && e.machine == nil ||
		!e.unattested && !e.serving && !e.evidenceAccepted || e.serving && e.addresses.count() == 0: // cannot be: each comes with a refusal
		d.Outcome, d.Refusals = refuse, Refusals{{Reason: ReasonRefused}}
	default:
		hold = true
	}
	return d, hold
}

// expiredLast moves the refusal of an expired challenge behind all others. The node may start over
// at once for that reason, so it is the whole's only if nothing else failed.
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

// grant is the only place from which a request passes.
func (e *evaluation) grant(outcome Outcome, record Record) Decision {
	return Decision{Outcome: outcome, Class: e.class, Warnings: e.warned, Grant: &Grant{
		NodeName: e.requested.nodeName, PublicKey: e.requested.key, MaxLifetime: e.maxLifetime, Addresses: e.addresses, Record: record,
	}}
}
