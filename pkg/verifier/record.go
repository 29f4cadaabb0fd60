// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
)

// Record is the record of a machine: its evidence, its node name and its certificates. Only a
// record ties a node name to a machine.
type Record struct {
	// Cluster is Policy.Cluster.
	Cluster string
	Machine MachineRef
	// Provider, EK, AK and Instance are as in Evidence. Under the insecure provider there is no EK.
	Provider, EK, AK string
	Instance         *attestation.Instance
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
	// ProofPending says that this proof exists, and is neither refused nor issued. It also counts
	// as pending while its certificate is published and not yet in the record.
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

// checkSuspension applies T2. byPrecedence puts its refusal first. The refusal does not quote the
// operator, since the node reads it.
func (r *Rules) checkSuspension(in Input, q request, s subject) (f findings) {
	switch {
	case in.SuspensionsUnknown && !q.kind.unattested: // an unattested node has no key to suspend
		f.wait(ReasonSuspensionsUnknown, "it is not known yet which machines are suspended")
	case r.isSuspended(in, q.cert.nodeName, s):
		f.deny(ReasonSuspended, "machine: an operator has suspended it")
	}
	return f
}

// isSuspended reports whether an endorsement key of the request's machine is suspended.
func (r *Rules) isSuspended(in Input, name string, s subject) bool {
	suspended := func(ek string) bool { return ek != "" && in.SuspendedEKs[ek] }
	// Unverified evidence suffices here: claiming another machine's suspended key only leads to a
	// denial.
	if suspended(in.Evidence.EK) || s.record != nil && suspended(s.record.EK) {
		return true
	}
	// A TPM has a key for each template, and sources may name several of them.
	if s.machine != nil && slices.ContainsFunc(s.machine.EKs, func(n NamedEK) bool { return r.trustsSource(n) && suspended(n.EK) }) {
		return true
	}
	// A requester with a node's certificate is the machine in the node's record, also if its
	// evidence shows another machine.
	node := s.class == Renewal || s.class == Serving
	return node && slices.ContainsFunc(in.Records, func(record Record) bool {
		return record.NodeName != "" && record.NodeName == name && suspended(record.EK)
	})
}

// checkRecords applies T1 to every record that has this machine, this endorsement key or this node
// name.
func (r *Rules) checkRecords(in Input, q request, s subject) (f findings) {
	bound := func(what string) { f.deny(ReasonIdentityBound, "record: %s", what) }
	records, ek, name := 0, s.id.ek, q.cert.nodeName
	for i := range in.Records {
		record := &in.Records[i]
		sameMachine := s.machine != nil && record.Machine == s.machine.Ref
		sameEK := r.pinsEK(record, ek, in.Machines)
		sameName := name != "" && record.NodeName == name
		if !sameMachine && !sameEK && !sameName {
			continue
		}
		if records++; records == 2 {
			bound("more than one has this machine, endorsement key or node name")
		}
		if record.Cluster != r.policy.Cluster {
			bound("it is another cluster's")
		}
		if sameEK && s.machine != nil && !sameMachine {
			bound("the endorsement key is another machine's")
		}
		if otherEK := ek != "" && record.EK != "" && record.EK != ek; otherEK && sameMachine {
			f.add(r.checkReplacement(q, s, record))
		} else if otherEK {
			bound("the node name is bound to another endorsement key")
		}
		if name != "" && !sameName {
			bound("the node name is another one")
		}
		if sameMachine || sameEK {
			f.add(checkRecordedProviderID(q.cert.providerID, s.machine, record))
		}
		switch rank := r.rank(record.Provider); {
		case rank < 0:
			bound("its provider is not configured")
		case r.rank(q.content.Provider) > rank:
			bound("the machine is held to a stronger provider")
		}
		if q.kind.insecure && (!sameMachine || !record.isOnlyProof(q.object)) {
			bound("this signer is not for a machine or a node name that has one")
		}
		if sameMachine && !q.kind.hello && !q.needsHello && record.ProofSHA256 == digest(q.object.Spec.Request) && !record.isFor(q.object) {
			bound("the same evidence was in another request") // a hello is new for each proof
		}
		if sameEK && s.id.accepted {
			f.add(r.checkBoot(in.Evidence, record))
		}
	}
	return f
}

// checkReplacement applies T1 to a key that differs from the one in the machine's record. The key
// passes only if a source that may replace the record's key now names this one, and the controller
// has accepted that.
func (r *Rules) checkReplacement(q request, s subject, record *Record) (f findings) {
	recorded := record.isFor(q.object) // the request was approved when the record had its key
	switch {
	// another rule already makes the request wait
	case !recorded && (s.ekChangePending || s.machine.Disputed):
	case !recorded && r.isAcceptedReplacement(record, s.machine, s.id.ek):
		f.warn(ReasonEKReplaced, "record: the endorsement key is now %.16s..., named by the source %s, and was %.16s...",
			s.id.ek, r.sourceOf(s.machine, s.id.ek, record.EKSource), record.EK)
	case record.Instance != nil:
		f.deny(ReasonIdentityBound, "record: the machine is another instance")
	default:
		f.deny(ReasonIdentityBound, "record: the machine has another endorsement key")
	}
	return f
}

// checkRecordedProviderID applies T1 to the provider IDs of the request and of the machine.
func checkRecordedProviderID(requested string, m *Machine, record *Record) (f findings) {
	other := func(id string) bool { return record.ProviderID != "" && id != "" && id != record.ProviderID }
	if other(requested) || m != nil && other(m.ProviderID) {
		f.deny(ReasonIdentityBound, "record: the provider ID is another one")
	}
	return f
}

// checkBoot applies T1 to the TPM's counters and those in the record. The endorsement key shows
// that it is the same TPM.
func (r *Rules) checkBoot(evidence Evidence, record *Record) (f findings) {
	if evidence.Boot != nil && record.Boot != nil && evidence.Boot.Before(*record.Boot) {
		f.fail(r.policy.BootCounters, ReasonBootCountersWentBack, "record: the TPM's boot counters or clock went back")
	}
	if evidence.AK != "" && record.AK != "" && evidence.AK != record.AK {
		f.warn(ReasonAKChanged, "record: the TPM has another attestation key")
	}
	return f
}

// checkOrphans waits until the records of deleted machines are deleted, too (T1). Their hardware or
// their node name may be used by the next machine.
func checkOrphans(orphans []Record, name string, s subject) (f findings) {
	for _, r := range orphans {
		if s.id.ek != "" && r.EK == s.id.ek || name != "" && r.NodeName == name || s.machine != nil && r.Machine.Name == s.machine.Ref.Name {
			f.wait(ReasonIdentityBound, "record: that of a machine that is gone is still there")
		}
	}
	return f
}

// nextRecord returns the new record of the machine, to be written before this proof is approved.
func (r *Rules) nextRecord(in Input, e evaluation) Record {
	q, machine, record := e.request, e.subject.machine, e.subject.record
	var former Record
	if record != nil {
		former = *record
	}
	next := Record{
		Cluster: r.policy.Cluster, Machine: machine.Ref,
		Provider: q.content.Provider, EK: e.subject.id.ek, AK: in.Evidence.AK, Instance: in.Evidence.Instance,
		ProviderID: machine.ProviderID, NodeName: q.cert.nodeName,
		EKSource: r.sourceOf(machine, e.subject.id.ek, former.EKSource),
		ProofUID: string(in.Request.UID), ProofSHA256: digest(in.Request.Spec.Request), FirstProofUID: string(in.Request.UID),
	}
	if in.Hello != nil {
		next.HelloUID = string(in.Hello.UID)
	}
	if in.Evidence.Boot != nil {
		boot := *in.Evidence.Boot
		next.Boot = &boot
	}
	if record != nil {
		next.FirstProofUID = former.FirstProofUID
		next.Certificates = slices.DeleteFunc(slices.Clone(former.Certificates), func(c Certificate) bool {
			return !c.NotAfter.IsZero() && c.NotAfter.Before(in.Now)
		})
		if next.ProviderID == "" {
			next.ProviderID = former.ProviderID
		}
		if next.Boot == nil && next.EK == former.EK {
			next.Boot = former.Boot
		}
		if next.EK == "" {
			next.EK, next.AK, next.Instance = former.EK, former.AK, former.Instance
		}
		if next.EK == former.EK && next.EKSource == "" {
			next.EKSource = former.EKSource
		}
	}
	if e.recovered != "" {
		next.Certificates = append(next.Certificates, Certificate{SHA256: e.recovered, NotAfter: in.Now.Add(recoveredLifetime), Recovered: true})
	}
	return next
}
