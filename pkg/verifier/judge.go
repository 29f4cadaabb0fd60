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

// Input has all inputs of one decision. The caller collects them.
type Input struct {
	Now time.Time
	// Request is the request to decide on, as the API server stores it.
	Request *certificatesv1.CertificateSigningRequest
	// Hello is the request that the proof refers to, nil if it is not found.
	Hello    *certificatesv1.CertificateSigningRequest
	Evidence Evidence
	// Records are records of the cluster. Each record with the request's node name or the
	// evidence's endorsement key, and each record of one of Machines, must be here.
	Records []Record
	// Machines are the machines of the cluster, each once, or at least those of
	// MachineIndex.Relevant.
	Machines []Machine
	// Token is the bootstrap token that the request was filed with.
	Token Token
	// Node says whether a Node of the claimed name exists.
	Node Presence
	// SuspendedEKs are the endorsement keys of the machines that an operator has suspended, in the
	// form of Evidence.EK. Nobody may change the map. SuspensionsUnknown says that the keys could
	// not be read.
	SuspendedEKs       map[string]bool
	SuspensionsUnknown bool
	// SignerUnavailable says that no CA is available for the certificates that this controller
	// signs. These are client certificates, and serving certificates of signers for which
	// SignsServing is true.
	SignerUnavailable bool
}

// Claim has the unverified claims of a request. The caller collects Input by them.
type Claim struct {
	Provider string
	// Hello says that the request is filed as a hello. Serving says that it is for a serving
	// certificate. Rehearsal says that it ends in a verdict, and never in a certificate.
	Hello, Serving, Rehearsal bool
	// NodeName and ProviderID are "" if the request has none, or a malformed one.
	NodeName, ProviderID string
}

// ParseClaim returns the claim of a request, and reports whether the rules decide on the request.
// That depends on its signer and, if the signer is shared, on its PROVIDER block. It does not
// depend on the request's conditions.
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
	return Claim{e.content.Provider, e.hello, e.serving, e.rehearsal, e.requested.nodeName, e.requested.providerID}, true
}

// Matches reports whether the rules decide on a request. It is cheaper than ParseClaim.
func (r *Rules) Matches(request *certificatesv1.CertificateSigningRequest) bool {
	return r.newEvaluation(Input{Request: request}) != nil
}

// AttestingSigners returns the signers whose requests have evidence, and the signer of hellos. It
// leaves out those of rehearsals, which lead to no certificate.
func (r *Rules) AttestingSigners() (names []string) {
	for name := range r.signers {
		if name != InsecureSignerName && !attestation.IsRehearsalSigner(name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// SignersFor returns the signers of certificates that accept the evidence of a provider.
func (r *Rules) SignersFor(provider string) (names []string) {
	for _, name := range r.AttestingSigners() {
		if !attestation.IsHelloSigner(name) && r.signers[name].accepts(provider) {
			names = append(names, name)
		}
	}
	return names
}

// Deadline returns the time at which a request that still waits is denied.
func (r *Rules) Deadline(request *certificatesv1.CertificateSigningRequest) time.Time {
	return request.CreationTimestamp.Add(r.policy.WaitDeadline)
}

// JudgeUnsigned decides on a request that was approved for another signer, and for which a record
// was written: Ignore until the deadline, then Fail. Without Fail, the machine's next request would
// wait for ever.
func (r *Rules) JudgeUnsigned(in Input) Decision {
	e := r.newEvaluation(in)
	if e == nil || state.Of(in.Request) != state.Approved || in.Request.CreationTimestamp.IsZero() || in.Now.Before(r.Deadline(in.Request)) {
		return Decision{Outcome: Ignore}
	}
	return Decision{Outcome: Fail, Refusals: Refusals{{Reason: ReasonSignerUnavailable, Message: "nobody issued it in time"}}}
}

// Judge decides on a request that has no condition yet. The outcome is Ignore, Wait, Deny,
// Challenge for a hello, Approve for a proof, or ApproveServing for a serving certificate. It is
// ApproveUnattested for an unattested node that the policy lists, and Rehearsed for the proof of a
// rehearsal.
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
	case e.rehearsal:
		return e.grant(Rehearsed, Record{})
	}
	return e.grant(Approve, e.nextRecord())
}

// JudgeSigning decides whether to sign an approved request: Ignore, Wait, Fail, Sign, or
// SignServing for a serving certificate under a signer of ours. It judges every rule again. An
// approval is valid only together with the record that was written before it. So the record in the
// Input must be read live, or be the caller's own last write.
func (r *Rules) JudgeSigning(in Input) Decision {
	e := r.newEvaluation(in)
	if e == nil || !e.signedHere() || state.Of(in.Request) != state.Approved || e.leftToOtherApprovers() {
		return Decision{Outcome: Ignore}
	}
	if e.serving {
		// The approver does not matter: the rules depend only on request, record and machine.
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
	// the record that names the request must be this machine's
	if e.hello || e.record == nil || !e.record.isFor(in.Request) {
		e.deny(ReasonApprovedWithoutAttestation, "approved, but not for this machine")
		d, _ := e.conclude(Fail)
		return d
	}
	return e.grant(Sign, *e.record)
}

// evaluation is the state of one decision. The result of a rule is zero before the rule was judged,
// and if it failed.
type evaluation struct {
	rules *Rules
	in    Input
	// hello, insecure and serving say which kind of signer the request is for. unattested says that
	// the policy lists the node as unattested. rehearsal says that nothing may be issued.
	hello, insecure, serving, unattested, rehearsal bool
	// orphans are the records of machines that no longer exist. They were removed from in.Records.
	orphans []Record
	// content is the parsed spec.request. requested has the content of its PKCS#10 request.
	content   attestation.Request
	requested requestedCertificate
	// providerMatches says that the signer accepts the provider of the evidence.
	providerMatches bool
	class           Class
	// ek is the endorsement key. A proof proves it, a hello only claims it. evidenceAccepted says
	// that the provider's verifier accepted the evidence.
	ek               string
	evidenceAccepted bool
	machine          *Machine
	// claimedTwice says that the evidence belongs to more than one machine. If a record has the
	// key, machine is the record's machine nevertheless.
	claimedTwice bool
	// trustedOnFirstUse says that machine was selected on first use. It is valid only if nothing is
	// refused.
	trustedOnFirstUse bool
	// tokenJudged says that I3 was applied.
	tokenJudged bool
	record      *Record
	// recovered is the fingerprint of the requester's certificate, if the record is recreated for
	// it. The next record lists it, so that it can be revoked, and can request again.
	recovered string
	// ekChangePending says that ek will replace the key in record once the controller accepts that.
	ekChangePending bool
	// addresses are the requested addresses of a serving certificate.
	addresses   Addresses
	maxLifetime time.Duration

	// denied has contradictions. missing has reasons to wait until the deadline. warned has failed
	// rules for which the policy only warns.
	denied, missing, warned Refusals
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

// fail adds a failed rule as a refusal or a warning, by mode.
func (e *evaluation) fail(mode Mode, reason Reason, format string, arguments ...any) {
	switch mode {
	case Off:
	case Warn:
		e.warn(reason, format, arguments...)
	default:
		e.deny(reason, format, arguments...)
	}
}

// newEvaluation returns nil if the request is not ours: it is for another signer, or for a shared
// signer without our evidence. This is decided before any validation.
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
		hello:     attestation.IsHelloSigner(signer.Name),
		insecure:  signer.Name == InsecureSignerName,
		rehearsal: attestation.IsRehearsalSigner(signer.Name),
	}
}

// signedHere reports whether a request is for a signer that this controller may sign for.
func (e *evaluation) signedHere() bool {
	return !e.unattested && !e.rehearsal && (!e.serving || e.rules.SignsServing(e.in.Request.Spec.SignerName))
}

// withoutOrphans splits the records into those of machines that exist, and orphans.
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

// judge applies the rules. Their order decides which reason a denial shows first. The exceptions
// are judgeSuspension and expiredLast.
func (e *evaluation) judge() {
	if e.in.Now.IsZero() {
		e.deny(ReasonRefused, "no time was given")
	}
	if e.in.SignerUnavailable && (e.signedHere() || e.rehearsal) {
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
		return // there is no evidence to judge
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

// conclude reports whether every rule holds, and returns the decision if not. refuse is Deny or
// Fail. A contradiction takes precedence over a missing input.
func (e *evaluation) conclude(refuse Outcome) (d Decision, hold bool) {
	d = Decision{Class: e.class, Warnings: e.warned}
	overdue := !e.in.Request.CreationTimestamp.IsZero() && !e.in.Now.Before(e.rules.Deadline(e.in.Request))
	switch {
	case len(e.denied) > 0:
		d.Outcome, d.Refusals = refuse, expiredLast(e.denied)
	case len(e.missing) > 0 && overdue:
		d.Outcome, d.Refusals = refuse, e.missing
	case len(e.missing) > 0:
		d.Outcome, d.Refusals = Wait, e.missing
	case e.class == 0 || e.requested.key == nil || e.requested.nodeName == "" || !e.unattested && e.machine == nil ||
		// not reached: each of these also adds a refusal
		!e.unattested && !e.serving && !e.evidenceAccepted || e.serving && e.addresses.count() == 0:
		d.Outcome, d.Refusals = refuse, Refusals{{Reason: ReasonRefused}}
	default:
		hold = true
	}
	return d, hold
}

// expiredLast moves the refusal of an expired challenge behind all others. For that reason the node
// may start over at once, so it must be the first reason only if nothing else failed.
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

// grant makes each Decision that lets a request pass. No other function does.
func (e *evaluation) grant(outcome Outcome, record Record) Decision {
	return Decision{Outcome: outcome, Class: e.class, Warnings: e.warned, Grant: &Grant{
		NodeName: e.requested.nodeName, PublicKey: e.requested.key, MaxLifetime: e.maxLifetime, Addresses: e.addresses, Record: record,
	}}
}
