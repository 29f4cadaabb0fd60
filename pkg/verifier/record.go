// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
)

// Record is what is remembered of a machine: its evidence, its node name, and what was issued to
// it. A record alone ties a node name to a machine.
type Record struct {
	// Cluster is Policy.Cluster.
	Cluster string
	Machine MachineRef
	// Provider, EK and AK are as in Evidence. Under the insecure provider there is no EK.
	Provider, EK, AK string
	// EKSource is the source that named EK when it was last attested. It is empty if none did, and
	// in records of older releases.
	EKSource EKSource
	// EKReplacedBy are the keys that the controller accepted in place of EK, since EK's source
	// named them (Rules.ContradictsEK). EK is refused until a source names it again. Nil: nothing
	// was accepted.
	EKReplacedBy []string
	// ProviderID is the machine's, NodeName the node's.
	ProviderID, NodeName string
	// Boot is the last one seen, nil if there was none.
	Boot *Boot
	// HelloUID and ProofUID are the UIDs of the requests that the record was last written for.
	// ProofSHA256 is the SHA-256 of the proof's spec.request, in lower-case hex. Only that proof
	// may be signed.
	HelloUID, ProofUID, ProofSHA256 string
	// ProofPending says that this proof exists, and is neither issued nor refused yet.
	ProofPending bool
	// Orphaned says that the machine's object is gone, and the record will be deleted, too. Such a
	// record decides nothing. Until it is deleted, its endorsement key and node name are free for
	// nobody.
	Orphaned bool
	// FormerEKs are those that EK has replaced.
	FormerEKs []string
	// FirstProofUID is the ProofUID that the record was made with.
	FirstProofUID string
	// Certificates are those that were issued and have not ended.
	Certificates []Certificate
}

// Certificate is a certificate that was issued.
type Certificate struct {
	// SHA256 is that of its DER, in lower-case hexadecimal digits.
	SHA256 string
	// ProofUID is the UID of the request that it was issued for.
	ProofUID string
	NotAfter time.Time
	// Revoked says that it is refused in use. It may still ask for a new certificate.
	Revoked bool
}

// isFor reports whether the record was last written for this request.
func (r *Record) isFor(request *certificatesv1.CertificateSigningRequest) bool {
	return r.ProofUID != "" && r.ProofUID == string(request.UID) && r.ProofSHA256 == digest(request.Spec.Request)
}

// isFirstProof reports whether the record was made for this request, and nothing was issued for it
// yet. The rules of a first request hold until the request is signed.
func (r *Record) isFirstProof(request *certificatesv1.CertificateSigningRequest) bool {
	return r.isFor(request) && r.FirstProofUID == r.ProofUID && len(r.Certificates) == 0
}

// isOnlyProof reports whether the record was made for this request, and every certificate in it was
// issued for this request. A certificate that could not be published is issued again.
func (r *Record) isOnlyProof(request *certificatesv1.CertificateSigningRequest) bool {
	return r.isFor(request) && r.FirstProofUID == r.ProofUID &&
		!slices.ContainsFunc(r.Certificates, func(c Certificate) bool { return c.ProofUID != r.ProofUID })
}

// AwaitsCertificate reports whether the certificate for the proof that the record was written for
// is not in the record yet.
func (r *Record) AwaitsCertificate() bool {
	return r.ProofUID != "" && !slices.ContainsFunc(r.Certificates, func(c Certificate) bool { return c.ProofUID == r.ProofUID })
}

// issued reports whether a certificate was issued to the machine and has not ended.
func (r *Record) issued(fingerprint string) bool {
	return slices.ContainsFunc(r.Certificates, func(c Certificate) bool { return c.SHA256 == fingerprint })
}

// revoked reports whether a certificate of the machine was revoked.
func (r *Record) revoked(fingerprint string) bool {
	return slices.ContainsFunc(r.Certificates, func(c Certificate) bool { return c.SHA256 == fingerprint && c.Revoked })
}

func digest(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// findRecord finds the machine's record. So it is known whether a bootstrap identity asks for the
// first time or again.
func (e *evaluation) findRecord() {
	for i := range e.in.Records {
		r := &e.in.Records[i]
		if e.machine != nil && r.Machine == e.machine.Ref || e.machine == nil && e.ek != "" && r.EK == e.ek {
			e.record = r
		}
		if !e.evidenceAccepted && e.ek == "" && e.requested.nodeName != "" && r.NodeName == e.requested.nodeName {
			e.record = r // who asks is not known; that the rules of a first request failed, too, would be no news
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
	case e.in.SuspensionsUnknown && !e.unattested: // a node without a record has no key to suspend
		e.wait(ReasonSuspensionsUnknown, "it is not known yet which machines are suspended")
	case e.isSuspended():
		e.denied = append(Refusals{{Reason: ReasonSuspended, Message: "machine: an operator has suspended it"}}, e.denied...)
	}
}

// isSuspended reports whether an endorsement key of the request's machine is suspended.
func (e *evaluation) isSuspended() bool {
	suspended := func(ek string) bool { return ek != "" && e.in.SuspendedEKs[ek] }
	// A key counts before its evidence was verified: whoever claims another machine's key gains
	// nothing by it.
	if suspended(e.in.Evidence.EK) || e.record != nil && suspended(e.record.EK) {
		return true
	}
	// A TPM has a key for each template, and sources may name several of them.
	if e.machine != nil && slices.ContainsFunc(e.machine.EKs, func(n NamedEK) bool { return e.rules.trustsSource(n) && suspended(n.EK) }) {
		return true
	}
	// Who asks with a node's certificate is the machine in the node's record, whatever its evidence.
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

// judgeReplacement judges another key than the one in the machine's record. It passes only if the
// source that vouched for the record's key now names this one, and the controller has accepted
// that.
func (e *evaluation) judgeReplacement(r *Record) {
	recorded := r.isFor(e.in.Request) // it was approved with the key in the record
	switch {
	case !recorded && (e.ekChangePending || e.machine.Disputed): // it waits for that
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

// judgeOrphans waits until the records of machines that are gone are deleted. Their hardware, or
// their node name, may serve the next machine.
func (e *evaluation) judgeOrphans() {
	for _, r := range e.orphans {
		if e.ek != "" && r.EK == e.ek || e.requested.nodeName != "" && r.NodeName == e.requested.nodeName || e.machine != nil && r.Machine.Name == e.machine.Ref.Name {
			e.wait(ReasonIdentityBound, "record: that of a machine that is gone is still there")
		}
	}
}

// nextRecord returns the machine's record as it will be once this proof is approved.
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
	return next
}

// recordedSource returns the source in the machine's record.
func (e *evaluation) recordedSource() EKSource {
	if e.record == nil {
		return ""
	}
	return e.record.EKSource
}
