// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
)

// Record is what is remembered of a machine: which evidence and which node name it is bound to, and what was issued. It alone ties a node
// to a machine.
type Record struct {
	// Cluster is Policy.Cluster.
	Cluster string
	Machine MachineRef
	// Provider, EK and AK are as in Evidence. Under the insecure provider there is no EK.
	Provider, EK, AK string
	// EKSource is the source that named EK when it was last attested. It is empty if none did, and
	// in records of older releases.
	EKSource EKSource
	// EKReplacedBy are the keys that the controller accepted in the place of EK, which its source
	// named (Rules.ContradictsEK). EK is refused until a source names it again. Nil: nothing was
	// accepted.
	EKReplacedBy []string
	// ProviderID is the machine's, NodeName the node's.
	ProviderID, NodeName string
	// Boot is the last one shown, nil if there was none.
	Boot *Boot
	// HelloUID and ProofUID are the UIDs of the requests that the record was last written for, and ProofSHA256 is the SHA-256 of the
	// proof's spec.request in lower-case hexadecimal digits. Only that proof may be signed.
	HelloUID, ProofUID, ProofSHA256 string
	// Open says that this proof is there, and neither issued nor refused yet.
	Open bool
	// Orphaned says that the machine, an object, is gone, and the record about to go after it. Nothing is decided by such a record, and nothing
	// that it speaks of is anybody's yet.
	Orphaned bool
	// FormerEKs are those that EK has replaced.
	FormerEKs []string
	// FirstProofUID is the ProofUID that the record was made with.
	FirstProofUID string
	// Certificates are those that were issued and have not ended.
	Certificates []Certificate
}

// Certificate is one that was issued.
type Certificate struct {
	// SHA256 is that of its DER, in lower-case hexadecimal digits.
	SHA256 string
	// ProofUID is the UID of the request that it was issued for.
	ProofUID string
	NotAfter time.Time
}

// names reports whether the record was last written for this request.
func (r *Record) names(request *certificatesv1.CertificateSigningRequest) bool {
	return r.ProofUID != "" && r.ProofUID == string(request.UID) && r.ProofSHA256 == digest(request.Spec.Request)
}

// begins reports whether the record was made for this request, and nothing came of it yet: the rules of a first request hold until it is
// signed.
func (r *Record) begins(request *certificatesv1.CertificateSigningRequest) bool {
	return r.names(request) && r.FirstProofUID == r.ProofUID && len(r.Certificates) == 0
}

// repeats reports whether the record was made for this request, whatever was issued for it: one that could not be published is issued again.
func (r *Record) repeats(request *certificatesv1.CertificateSigningRequest) bool {
	return r.names(request) && r.FirstProofUID == r.ProofUID &&
		!slices.ContainsFunc(r.Certificates, func(c Certificate) bool { return c.ProofUID != r.ProofUID })
}

// AwaitsCertificate reports whether what was issued for the proof that the record names is not noted yet.
func (r *Record) AwaitsCertificate() bool {
	return r.ProofUID != "" && !slices.ContainsFunc(r.Certificates, func(c Certificate) bool { return c.ProofUID == r.ProofUID })
}

// issued reports whether a certificate is one that was issued to the machine and has not ended.
func (r *Record) issued(fingerprint string) bool {
	return slices.ContainsFunc(r.Certificates, func(c Certificate) bool { return c.SHA256 == fingerprint })
}

func digest(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// findRecord finds the machine's record, and with it whether a bootstrap identity asks for the first time or again.
func (t *trial) findRecord() {
	for i := range t.in.Records {
		r := &t.in.Records[i]
		if t.machine != nil && r.Machine == t.machine.Ref || t.machine == nil && t.ek != "" && r.EK == t.ek {
			t.record = r
		}
		if !t.shown && t.ek == "" && t.asks.nodeName != "" && r.NodeName == t.asks.nodeName {
			t.record = r // who asks is not known; that the rules of a first request failed, too, would be no news
		}
	}
	if t.class == First && t.record != nil && !t.record.begins(t.in.Request) {
		t.class = Again
	}
}

// judgeRecords applies T1 to every record that has this machine, this endorsement key or this node name.
func (t *trial) judgeRecords() {
	bound := func(what string) { t.deny(ReasonIdentityBound, "record: %s", what) }
	records := 0
	for i := range t.in.Records {
		r := &t.in.Records[i]
		machine := t.machine != nil && r.Machine == t.machine.Ref
		ek := t.hasKey(r)
		name := t.asks.nodeName != "" && r.NodeName == t.asks.nodeName
		if !machine && !ek && !name {
			continue
		}
		if records++; records == 2 {
			bound("more than one has this machine, endorsement key or node name")
		}
		if r.Cluster != t.rules.policy.Cluster {
			bound("it is another cluster's")
		}
		if ek && t.machine != nil && !machine {
			bound("the endorsement key is another machine's")
		}
		if t.ek != "" && r.EK != "" && r.EK != t.ek && machine {
			t.judgeReplacement(r)
		}
		if t.ek != "" && r.EK != "" && r.EK != t.ek && !machine {
			bound("the node name is bound to another endorsement key")
		}
		if t.asks.nodeName != "" && !name {
			bound("the node name is another one")
		}
		if machine || ek {
			t.judgeProviderID(r)
		}
		if rank := t.rules.rank(r.Provider); rank < 0 || t.rules.rank(t.content.Provider) > rank {
			bound("the machine is held to a stronger provider")
		}
		if t.insecure && (!machine || !r.repeats(t.in.Request)) {
			bound("this signer is not for a machine or a node name that has one")
		}
		if ek && t.shown {
			t.judgeBoot(r)
		}
	}
}

// judgeReplacement judges another key than the one in the machine's record. It passes only where
// the source that vouched for the record's key names this one now, and the controller has accepted
// that.
func (t *trial) judgeReplacement(r *Record) {
	recorded := r.names(t.in.Request) // it was approved with the key in the record
	switch {
	case !recorded && t.pendingEK: // it waits for that
	case !recorded && t.mayReplace(r, t.machine):
		t.warn(ReasonEKReplaced, "record: the endorsement key is now %.16s..., named by the source %s, and was %.16s...",
			t.ek, t.rules.sourceOf(t.machine, t.ek, r.EKSource), r.EK)
	default:
		t.deny(ReasonIdentityBound, "record: the machine has another endorsement key")
	}
}

func (t *trial) judgeProviderID(r *Record) {
	other := func(id string) bool { return r.ProviderID != "" && id != "" && id != r.ProviderID }
	if other(t.asks.providerID) || t.machine != nil && other(t.machine.ProviderID) {
		t.deny(ReasonIdentityBound, "record: the provider ID is another one")
	}
}

// judgeBoot compares what the TPM said now with what it said last. It is one and the same: the endorsement key says so.
func (t *trial) judgeBoot(r *Record) {
	e := t.in.Evidence
	if e.Boot != nil && r.Boot != nil && e.Boot.Before(*r.Boot) {
		t.fail(t.rules.policy.BootCounters, ReasonBootCountersWentBack, "record: the TPM's boot counters or clock went back")
	}
	if e.AK != "" && r.AK != "" && e.AK != r.AK {
		t.warn(ReasonAKChanged, "record: the TPM has another attestation key")
	}
}

// judgeOrphans waits for the records of machines that are gone: their hardware, or their name, may serve the next.
func (t *trial) judgeOrphans() {
	for _, r := range t.orphans {
		if t.ek != "" && r.EK == t.ek || t.asks.nodeName != "" && r.NodeName == t.asks.nodeName || t.machine != nil && r.Machine.Name == t.machine.Ref.Name {
			t.wait(ReasonIdentityBound, "record: that of a machine that is gone is still there")
		}
	}
}

// next returns the machine's record as it is to be once this proof is approved.
func (t *trial) next() Record {
	next := Record{
		Cluster: t.rules.policy.Cluster, Machine: t.machine.Ref,
		Provider: t.content.Provider, EK: t.ek, AK: t.in.Evidence.AK,
		ProviderID: t.machine.ProviderID, NodeName: t.asks.nodeName,
		EKSource: t.rules.sourceOf(t.machine, t.ek, t.recordedSource()),
		ProofUID: string(t.in.Request.UID), ProofSHA256: digest(t.in.Request.Spec.Request), FirstProofUID: string(t.in.Request.UID),
	}
	if t.in.Hello != nil {
		next.HelloUID = string(t.in.Hello.UID)
	}
	if t.in.Evidence.Boot != nil {
		boot := *t.in.Evidence.Boot
		next.Boot = &boot
	}
	if t.record != nil {
		next.FirstProofUID = t.record.FirstProofUID
		next.Certificates = slices.DeleteFunc(slices.Clone(t.record.Certificates), func(c Certificate) bool {
			return !c.NotAfter.IsZero() && c.NotAfter.Before(t.in.Now)
		})
		if next.ProviderID == "" {
			next.ProviderID = t.record.ProviderID
		}
		if next.Boot == nil && next.EK == t.record.EK {
			next.Boot = t.record.Boot
		}
		if next.EK == "" {
			next.EK, next.AK = t.record.EK, t.record.AK
		}
		if next.EK == t.record.EK && next.EKSource == "" {
			next.EKSource = t.record.EKSource
		}
	}
	return next
}

// recordedSource returns the source in the machine's record.
func (t *trial) recordedSource() EKSource {
	if t.record == nil {
		return ""
	}
	return t.record.EKSource
}
