// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
)

// Record is the record of a machine: its evidence, its node name and its certificates. Only a
// record ties a node name to a machine.
type Record struct {
	// Cluster is Policy.Cluster.
	Cluster string
	Machine MachineRef
	// Provider, EK and AK are as in Evidence. Under the insecure provider there is no EK.
	Provider, EK, AK string
	// EKSource is the source that named EK when it was last attested. It is "" if none did, and in
	// records of older releases.
	EKSource EKSource
	// EKReplacedBy are the keys that the controller accepted in place of EK, since a source named
	// them (Rules.ContradictedBy). EK is refused until a source names it again. It is nil if no
	// change was accepted.
	EKReplacedBy []string
	// ProviderID is the machine's provider ID. NodeName is its node name.
	ProviderID, NodeName string
	// Boot has the last attested counters, nil if there were none.
	Boot *Boot
	// HelloUID and ProofUID are the UIDs of the requests that the record was last written for.
	// ProofSHA256 is the SHA-256 of the proof's spec.request, in lower-case hex. Only that proof
	// may be signed.
	HelloUID, ProofUID, ProofSHA256 string
	// ProofPending says that this proof exists, and has neither a certificate nor a refusal yet.
	ProofPending bool
	// Orphaned says that the machine's object no longer exists, and the record will be deleted,
	// too. No decision uses such a record. Until it is deleted, nobody can get its endorsement key
	// and node name.
	Orphaned bool
	// FormerEKs are the keys that EK has replaced.
	FormerEKs []string
	// FirstProofUID is the ProofUID that the record was created with.
	FirstProofUID string
	// Certificates are the machine's certificates that have not expired.
	Certificates []Certificate
}

// Certificate is a certificate that was issued.
type Certificate struct {
	// SHA256 is the SHA-256 of its DER, in lower-case hex.
	SHA256 string
	// ProofUID is the UID of the request that it was issued for.
	ProofUID string
	NotAfter time.Time
	// Revoked says that the certificate is revoked. It may still be used to request a new one.
	Revoked bool
	// Recovered says that the machine requested with this certificate when its record was
	// recreated. The API server names only the fingerprint, so NotAfter is the latest time at which
	// the certificate may end.
	Recovered bool
}

// recoveredLifetime bounds the lifetime of a recovered certificate. It is the default lifetime of
// kube-controller-manager's certificates, and longer than that of any signer of ours.
const recoveredLifetime = 8760 * time.Hour

// isFor reports whether the record was last written for this request.
func (r *Record) isFor(request *certificatesv1.CertificateSigningRequest) bool {
	return r.ProofUID != "" && r.ProofUID == string(request.UID) && r.ProofSHA256 == digest(request.Spec.Request)
}

// isFirstProof reports whether the record was created for this request and has no certificate yet.
// The rules of a first request apply until the request is signed.
func (r *Record) isFirstProof(request *certificatesv1.CertificateSigningRequest) bool {
	return r.isFor(request) && r.FirstProofUID == r.ProofUID && len(r.Certificates) == 0
}

// isOnlyProof reports whether the record was created for this request, and all its certificates
// were issued for this request. There may be several, since a certificate that could not be
// published is issued again.
func (r *Record) isOnlyProof(request *certificatesv1.CertificateSigningRequest) bool {
	return r.isFor(request) && r.FirstProofUID == r.ProofUID &&
		!slices.ContainsFunc(r.Certificates, func(c Certificate) bool { return c.ProofUID != r.ProofUID })
}

// AwaitsCertificate reports whether the certificate for the proof that the record was written for
// is not in the record yet.
func (r *Record) AwaitsCertificate() bool {
	return r.ProofUID != "" && !slices.ContainsFunc(r.Certificates, func(c Certificate) bool { return c.ProofUID == r.ProofUID })
}

// lists reports whether a certificate is in the record.
func (r *Record) lists(fingerprint string) bool {
	return slices.ContainsFunc(r.Certificates, func(c Certificate) bool { return c.SHA256 == fingerprint })
}

// revoked reports whether a certificate of the machine was revoked.
func (r *Record) revoked(fingerprint string) bool {
	return slices.ContainsFunc(r.Certificates, func(c Certificate) bool { return c.SHA256 == fingerprint && c.Revoked })
}

// recovered reports whether the record was recreated for a request with this certificate.
func (r *Record) recovered(fingerprint string) bool {
	return slices.ContainsFunc(r.Certificates, func(c Certificate) bool { return c.SHA256 == fingerprint && c.Recovered })
}

func digest(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// findRecord finds the machine's record. A bootstrap identity's request becomes Again if there is
// one. A record that this request created does not count until it has a certificate.
func (e *evaluation) findRecord() {
	for i := range e.in.Records {
		r := &e.in.Records[i]
		if e.machine != nil && r.Machine == e.machine.Ref || e.machine == nil && e.ek != "" && r.EK == e.ek {
			e.record = r
		}
		if !e.evidenceAccepted && e.ek == "" && e.requested.nodeName != "" && r.NodeName == e.requested.nodeName {
			// Without an EK the machine is unknown. A record with the node name makes the request
			// Again, so that the rules for first requests add no refusals.
			e.record = r
		}
	}
	if e.class == First && e.record != nil && !e.record.isFirstProof(e.in.Request) {
		e.class = Again
	}
}

// judgeSuspension applies T2. It comes before other refusals, so that the node learns this reason.
// It does not quote the operator, since the node reads the refusal.
func (e *evaluation) judgeSuspension() {
	switch {
	case e.in.SuspensionsUnknown && !e.unattested: // an unattested node has no key to suspend
		e.wait(ReasonSuspensionsUnknown, "it is not known yet which machines are suspended")
	case e.isSuspended():
		e.denied = append(Refusals{{Reason: ReasonSuspended, Message: "machine: an operator has suspended it"}}, e.denied...)
	}
}

// isSuspended reports whether an endorsement key of the request's machine is suspended.
func (e *evaluation) isSuspended() bool {
	suspended := func(ek string) bool { return ek != "" && e.in.SuspendedEKs[ek] }
	// Unverified evidence suffices here: claiming another machine's suspended key only leads to a
	// denial.
	if suspended(e.in.Evidence.EK) || e.record != nil && suspended(e.record.EK) {
		return true
	}
	// A TPM has a key for each template, and sources may name several of them.
	if e.machine != nil && slices.ContainsFunc(e.machine.EKs, func(n NamedEK) bool { return e.rules.trustsSource(n) && suspended(n.EK) }) {
		return true
	}
	// A requester with a node's certificate is the machine in the node's record, also if its
	// evidence shows another machine.
	node := e.class == Renewal || e.class == Serving
	return node && slices.ContainsFunc(e.in.Records, func(r Record) bool {
		return r.NodeName != "" && r.NodeName == e.requested.nodeName && suspended(r.EK)
	})
}

// judgeRecords applies T1 to every record that has this machine, this endorsement key or this node
// name.
func (e *evaluation) judgeRecords() {
	bound := func(what string) { e.deny(ReasonIdentityBound, "record: %s", what) }
	records := 0
	for i := range e.in.Records {
		r := &e.in.Records[i]
		machine := e.machine != nil && r.Machine == e.machine.Ref
		ek := e.pinsEK(r)
		name := e.requested.nodeName != "" && r.NodeName == e.requested.nodeName
		if !machine && !ek && !name {
			continue
		}
		if records++; records == 2 {
			bound("more than one has this machine, endorsement key or node name")
		}
		if r.Cluster != e.rules.policy.Cluster {
			bound("it is another cluster's")
		}
		if ek && e.machine != nil && !machine {
			bound("the endorsement key is another machine's")
		}
		if e.ek != "" && r.EK != "" && r.EK != e.ek && machine {
			e.judgeReplacement(r)
		}
		if e.ek != "" && r.EK != "" && r.EK != e.ek && !machine {
			bound("the node name is bound to another endorsement key")
		}
		if e.requested.nodeName != "" && !name {
			bound("the node name is another one")
		}
		if machine || ek {
			e.judgeProviderID(r)
		}
		if rank := e.rules.rank(r.Provider); rank < 0 || e.rules.rank(e.content.Provider) > rank {
			bound("the machine is held to a stronger provider")
		}
		if e.insecure && (!machine || !r.isOnlyProof(e.in.Request)) {
			bound("this signer is not for a machine or a node name that has one")
		}
		if ek && e.evidenceAccepted {
			e.judgeBoot(r)
		}
	}
}

// judgeReplacement judges a key that differs from the one in the machine's record. The key passes
// only if a source that may replace the record's key now names this one, and the controller has
// accepted that.
func (e *evaluation) judgeReplacement(r *Record) {
	recorded := r.isFor(e.in.Request) // the request was approved when the record had its key
	switch {
	// another rule already makes the request wait
	case !recorded && (e.ekChangePending || e.machine.Disputed):
	case !recorded && e.isAcceptedReplacement(r, e.machine):
		e.warn(ReasonEKReplaced, "record: the endorsement key is now %.16s..., named by the source %s, and was %.16s...",
			e.ek, e.rules.sourceOf(e.machine, e.ek, r.EKSource), r.EK)
	default:
		e.deny(ReasonIdentityBound, "record: the machine has another endorsement key")
	}
}

func (e *evaluation) judgeProviderID(r *Record) {
	other := func(id string) bool { return r.ProviderID != "" && id != "" && id != r.ProviderID }
	if other(e.requested.providerID) || e.machine != nil && other(e.machine.ProviderID) {
		e.deny(ReasonIdentityBound, "record: the provider ID is another one")
	}
}

// judgeBoot compares the TPM's counters with those in the record. The endorsement key shows that it
// is the same TPM.
func (e *evaluation) judgeBoot(r *Record) {
	evidence := e.in.Evidence
	if evidence.Boot != nil && r.Boot != nil && evidence.Boot.Before(*r.Boot) {
		e.fail(e.rules.policy.BootCounters, ReasonBootCountersWentBack, "record: the TPM's boot counters or clock went back")
	}
	if evidence.AK != "" && r.AK != "" && evidence.AK != r.AK {
		e.warn(ReasonAKChanged, "record: the TPM has another attestation key")
	}
}

// judgeOrphans waits until the records of deleted machines are deleted, too. Their hardware or
// their node name may be used by the next machine.
func (e *evaluation) judgeOrphans() {
	for _, r := range e.orphans {
		if e.ek != "" && r.EK == e.ek || e.requested.nodeName != "" && r.NodeName == e.requested.nodeName || e.machine != nil && r.Machine.Name == e.machine.Ref.Name {
			e.wait(ReasonIdentityBound, "record: that of a machine that is gone is still there")
		}
	}
}

// nextRecord returns the new record of the machine, to be written before this proof is approved.
func (e *evaluation) nextRecord() Record {
	next := Record{
		Cluster: e.rules.policy.Cluster, Machine: e.machine.Ref,
		Provider: e.content.Provider, EK: e.ek, AK: e.in.Evidence.AK,
		ProviderID: e.machine.ProviderID, NodeName: e.requested.nodeName,
		EKSource: e.rules.sourceOf(e.machine, e.ek, e.recordedSource()),
		ProofUID: string(e.in.Request.UID), ProofSHA256: digest(e.in.Request.Spec.Request), FirstProofUID: string(e.in.Request.UID),
	}
	if e.in.Hello != nil {
		next.HelloUID = string(e.in.Hello.UID)
	}
	if e.in.Evidence.Boot != nil {
		boot := *e.in.Evidence.Boot
		next.Boot = &boot
	}
	if e.record != nil {
		next.FirstProofUID = e.record.FirstProofUID
		next.Certificates = slices.DeleteFunc(slices.Clone(e.record.Certificates), func(c Certificate) bool {
			return !c.NotAfter.IsZero() && c.NotAfter.Before(e.in.Now)
		})
		if next.ProviderID == "" {
			next.ProviderID = e.record.ProviderID
		}
		if next.Boot == nil && next.EK == e.record.EK {
			next.Boot = e.record.Boot
		}
		if next.EK == "" {
			next.EK, next.AK = e.record.EK, e.record.AK
		}
		if next.EK == e.record.EK && next.EKSource == "" {
			next.EKSource = e.record.EKSource
		}
	}
	if e.recovered != "" {
		next.Certificates = append(next.Certificates, Certificate{SHA256: e.recovered, NotAfter: e.in.Now.Add(recoveredLifetime), Recovered: true})
	}
	return next
}

// recordedSource returns the source in the machine's record.
func (e *evaluation) recordedSource() EKSource {
	if e.record == nil {
		return ""
	}
	return e.record.EKSource
}
