// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"cmp"
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
func (r *Rules) ParseClaim(object *certificatesv1.CertificateSigningRequest) (Claim, bool) {
	k, ours := r.kindOf(object)
	if !ours {
		return Claim{}, false
	}
	q, _ := r.parseRequest(object, k)
	return Claim{q.content.Provider, k.hello, k.serving, k.rehearsal, q.cert.nodeName, q.cert.providerID}, true
}

// Matches reports whether the rules decide on a request. It is cheaper than ParseClaim.
func (r *Rules) Matches(object *certificatesv1.CertificateSigningRequest) bool {
	_, ours := r.kindOf(object)
	return ours
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
	if !r.Matches(in.Request) || state.Of(in.Request) != state.Approved || in.Request.CreationTimestamp.IsZero() || in.Now.Before(r.Deadline(in.Request)) {
		return Decision{Outcome: Ignore}
	}
	return Decision{Outcome: Fail, Refusals: Refusals{{Reason: ReasonSignerUnavailable, Message: "nobody issued it in time"}}}
}

// Judge decides on a request that has no condition yet. The outcome is Ignore, Wait, Deny,
// Challenge for a hello, Approve for a proof, or ApproveServing for a serving certificate. It is
// ApproveUnattested for an unattested node that the policy lists, and Rehearsed for the proof of a
// rehearsal.
func (r *Rules) Judge(in Input) Decision {
	k, ours := r.kindOf(in.Request)
	if !ours || state.Of(in.Request) != state.Pending || r.leftToOtherApprovers(in, k) {
		return Decision{Outcome: Ignore}
	}
	e := r.evaluate(in, k)
	e.findings.add(checkOtherProofs(e.request, e.subject.record))
	if d, hold := r.conclude(in, e, Deny); !hold {
		return d
	}
	switch {
	case k.unattested:
		return e.grant(ApproveUnattested, Record{})
	case k.serving:
		return e.grant(ApproveServing, Record{})
	case k.hello:
		return e.grant(Challenge, Record{})
	case k.rehearsal:
		return e.grant(Rehearsed, Record{})
	}
	return e.grant(Approve, r.nextRecord(in, e))
}

// JudgeSigning decides whether to sign an approved request: Ignore, Wait, Fail, Sign, or
// SignServing for a serving certificate under a signer of ours. It evaluates every rule again. An
// approval is valid only together with the record that was written before it. So the record in the
// Input must be read live, or be the caller's own last write.
func (r *Rules) JudgeSigning(in Input) Decision {
	k, ours := r.kindOf(in.Request)
	if !ours || !r.maySignFor(in.Request.Spec.SignerName, k) || state.Of(in.Request) != state.Approved || r.leftToOtherApprovers(in, k) {
		return Decision{Outcome: Ignore}
	}
	if k.serving {
		// The approver does not matter: the rules depend only on request, record and machine.
		e := r.evaluate(in, k)
		if d, hold := r.conclude(in, e, Fail); !hold {
			return d
		}
		return e.grant(SignServing, Record{})
	}
	var unapproved findings
	named := slices.ContainsFunc(in.Records, func(record Record) bool { return record.isFor(in.Request) })
	if k.hello || !named {
		unapproved.deny(ReasonApprovedWithoutAttestation, "approved, but not by this controller")
	}
	e := r.evaluate(in, k)
	unapproved.add(e.findings)
	e.findings = unapproved // that refusal comes before those of the rules
	if d, hold := r.conclude(in, e, Fail); !hold {
		return d
	}
	// the record that names the request must be this machine's
	record := e.subject.record
	if k.hello || record == nil || !record.isFor(in.Request) {
		e.findings.deny(ReasonApprovedWithoutAttestation, "approved, but not for this machine")
		d, _ := r.conclude(in, e, Fail)
		return d
	}
	return e.grant(Sign, *record)
}

// evaluation is the result of all rules for one request.
type evaluation struct {
	request request
	subject subject
	// recovered is the fingerprint of the requester's certificate, if the record is recreated for
	// it. The next record lists it, so that it can be revoked, and can request again.
	recovered string
	findings  findings
}

// evaluate applies the rules that a request of this kind must pass. Each rule is a function of what
// it reads, and returns its findings. A rule whose findings are not added refuses nothing.
func (r *Rules) evaluate(in Input, k kind) evaluation {
	var orphans []Record
	in.Records, orphans = withoutOrphans(in.Records)
	q, malformed := r.parseRequest(in.Request, k)
	var e evaluation
	switch {
	case k.unattested:
		e = r.evaluateUnattested(in, q)
	case k.serving:
		e = r.evaluateServing(in, q)
	default:
		e = r.evaluateAttested(in, orphans, q)
	}
	f := r.checkInput(in, k)
	f.add(malformed)
	f.add(e.findings)
	e.request, e.findings = q, f
	return e
}

// evaluateAttested applies the rules for a hello, for a proof, and for a request of the insecure
// signer.
func (r *Rules) evaluateAttested(in Input, orphans []Record, q request) evaluation {
	class, f := r.checkRequester(q) // I1, I2
	if !q.readable {
		return evaluation{subject: subject{class: class}, findings: f} // there is no evidence to check
	}
	f.add(checkPair(q, in.Hello)) // S7

	id, refused := r.checkEvidence(q, in.Evidence, in.Hello) // A*, S1
	f.add(refused)
	s, refused := r.findSubject(in, q, class, id) // M1
	f.add(refused)

	f.add(r.checkSuspension(in, q, s))                // T2
	f.add(r.checkToken(q, s, in.Token))               // I3
	recovered, refused := r.checkCredential(in, q, s) // I4
	f.add(refused)
	f.add(checkMachine(in, q, s))               // M1, M2, M3
	f.add(r.checkName(in, q, s))                // M4
	f.add(checkNodeObject(in.Node, q, s.class)) // M5
	f.add(r.checkRecords(in, q, s))             // T1
	if s.id.accepted && !q.kind.hello && s.record != nil && s.record.EK == s.id.ek {
		f.add(r.warnIfNotNamed(s.record, s.machine))
	}
	f.add(checkOrphans(orphans, q.cert.nodeName, s)) // T1
	f.add(checkHelloReuse(q, in.Hello, in.Records))  // S7
	return evaluation{subject: s, recovered: recovered, findings: f}
}

// checkInput checks that the caller can decide and sign at present.
func (r *Rules) checkInput(in Input, k kind) (f findings) {
	if in.Now.IsZero() {
		f.deny(ReasonRefused, "no time was given")
	}
	if in.SignerUnavailable && (k.rehearsal || r.maySignFor(in.Request.Spec.SignerName, k)) {
		f.wait(ReasonSignerUnavailable, "there is no CA to sign with at present")
	}
	return f
}

// conclude reports whether every rule holds, and returns the decision if not. refuse is Deny or
// Fail. A contradiction takes precedence over a missing input.
func (r *Rules) conclude(in Input, e evaluation, refuse Outcome) (d Decision, hold bool) {
	k, s, cert, f := e.request.kind, e.subject, e.request.cert, e.findings
	d = Decision{Class: s.class, Warnings: f.warned}
	overdue := !in.Request.CreationTimestamp.IsZero() && !in.Now.Before(r.Deadline(in.Request))
	switch {
	case len(f.denied) > 0:
		d.Outcome, d.Refusals = refuse, byPrecedence(f.denied)
	case len(f.missing) > 0 && overdue:
		d.Outcome, d.Refusals = refuse, f.missing
	case len(f.missing) > 0:
		d.Outcome, d.Refusals = Wait, f.missing
	case s.class == 0 || cert.key == nil || cert.nodeName == "" || !k.unattested && s.machine == nil ||
		// not reached: each of these also adds a refusal
		!k.unattested && !k.serving && !s.id.accepted || k.serving && cert.addresses.count() == 0:
		d.Outcome, d.Refusals = refuse, Refusals{{Reason: ReasonRefused}}
	default:
		hold = true
	}
	return d, hold
}

// byPrecedence moves the refusal of a suspended machine before all others, so that the node learns
// this reason. It moves that of an expired challenge behind all others. For that reason the node
// may start over at once, so it must be the first reason only if nothing else failed.
func byPrecedence(refusals Refusals) Refusals {
	precedence := map[Reason]int{ReasonSuspended: -1, attestation.ReasonExpired: 1}
	return slices.SortedStableFunc(slices.Values(refusals), func(a, b Refusal) int {
		return cmp.Compare(precedence[a.Reason], precedence[b.Reason])
	})
}

// grant makes each Decision that lets a request pass. No other function does.
func (e evaluation) grant(outcome Outcome, record Record) Decision {
	cert, s := e.request.cert, e.subject
	return Decision{Outcome: outcome, Class: s.class, Warnings: e.findings.warned, Grant: &Grant{
		NodeName: cert.nodeName, PublicKey: cert.key, MaxLifetime: maxLifetime(s.machine), Addresses: cert.addresses, Record: record,
	}}
}
