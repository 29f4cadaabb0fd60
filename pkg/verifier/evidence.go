// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"bytes"
	"errors"
	"slices"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr/state"
)

// Evidence is the result of the provider's verifier for the request and its hello. The zero value
// proves nothing.
type Evidence struct {
	// Provider is the provider that verified the evidence.
	Provider string
	// EK is the fingerprint of the endorsement key, or of the instance (attestation.Instance). A
	// proof proves it, a hello only claims it. Machines and records have it in the same form.
	EK string
	// Machine is the machine's MachineRef.Name, if the evidence itself names the machine, as a
	// cloud's signed identity does. The record then pins EK, too, if there is one.
	Machine string
	// Instance is the platform's name of the machine. It is nil if the provider has none. The rules
	// read EK in its place.
	Instance *attestation.Instance
	// AK is the Name of the attestation key, in hex, for the record.
	AK string
	// SignerName is set for a hello: the signer to which the node says it will send the proof.
	SignerName string
	// Boot has the TPM's counters in a proof. It is nil if the provider has none.
	Boot *Boot
	// PCRBank and PCRs are the PCRs that a proof proves, in the order of their indexes. They are
	// empty if the provider has none. No rule reads them.
	PCRBank string
	PCRs    []attestation.PCR
	// EventLogPCRs are the PCRs whose values the firmware's event log led to. It is nil if the
	// policy asks for no log.
	EventLogPCRs []int
	// Warnings has the provider's checks that failed and do not refuse the request.
	Warnings Refusals
	// Err is a Refusals if the evidence is refused. Any other error means that the evidence could
	// not be verified now.
	Err error
	// EKUntrusted says that Err is only due to EK, which no authority names yet. An authority may
	// still name it.
	EKUntrusted bool
}

// Boot has the counters of TPMS_CLOCK_INFO in a quote (TPM 2.0 Part 2). Restoring a snapshot of a
// virtual TPM, or TPM2_Clear, sets them back.
type Boot struct {
	// Resets counts TPM Resets. Restarts counts TPM Restarts and Resumes since the last reset.
	Resets, Restarts uint32
	// Clock is in milliseconds.
	Clock uint64
	// Safe is false after an unorderly shutdown, until Clock is ahead of all values that the TPM
	// reported before.
	Safe bool
}

// Before reports whether b was taken before other by the same TPM. If other was seen first, the TPM
// was set back. An unorderly shutdown sets the clock back only together with a reset.
func (b Boot) Before(other Boot) bool {
	switch {
	case b.Resets != other.Resets:
		return b.Resets < other.Resets
	case b.Restarts != other.Restarts:
		return b.Restarts < other.Restarts
	}
	return b.Clock < other.Clock
}

// identity is the part of the evidence that selects a machine.
type identity struct {
	// ek is the endorsement key. A proof proves it, a hello only claims it. It is also set if no
	// source names it yet. So a request that contradicts a record is denied at once.
	ek string
	// machine is the machine that the evidence names. It is valid only if accepted.
	machine string
	// accepted says that the provider's verifier accepted the evidence.
	accepted bool
}

// checkEvidence applies A*, the result of the provider's verifier. hello is nil if it is not found.
func (r *Rules) checkEvidence(q request, evidence Evidence, hello *certificatesv1.CertificateSigningRequest) (id identity, f findings) {
	id.machine = evidence.Machine
	var refusals Refusals
	refused := errors.As(evidence.Err, &refusals)
	switch {
	case q.needsHello && hello == nil && (!refused || evidence.EKUntrusted):
		// checkPair waits for the hello. Without it, only faults of the proof itself are refused.
	case evidence.EKUntrusted:
		id.ek = evidence.EK
		f.wait(ReasonMachineNotFound, "nothing vouches for the endorsement key yet: %v", evidence.Err)
	case refused && len(refusals) == 0:
		f.deny(ReasonRefused, "the evidence is refused")
	case refused:
		f.denied = append(f.denied, refusals...)
	case evidence.Err != nil:
		f.wait(ReasonAttestationUnavailable, "the evidence could not be judged yet")
	case q.kind.insecure:
		id.accepted = true // this provider has no evidence
	case evidence.EK == "" && evidence.Machine == "":
		f.deny(ReasonRefused, "the evidence shows nothing")
	case evidence.Provider != q.content.Provider:
		f.deny(ReasonProviderMismatch, "the evidence was judged as another provider's")
	default:
		id.ek, id.accepted = evidence.EK, true
		f.warned = append(f.warned, evidence.Warnings...)
		f.add(r.checkTargetSigner(q, evidence.SignerName))
	}
	return id, f
}

// checkTargetSigner applies S1 to the signer that a hello is going to ask.
func (r *Rules) checkTargetSigner(q request, signer string) (f findings) {
	if !q.kind.hello {
		return f
	}
	target, ours := r.signers[signer]
	if !ours || attestation.IsHelloSigner(target.Name) || attestation.IsRehearsalSigner(target.Name) != q.kind.rehearsal || !target.accepts(q.content.Provider) {
		f.deny(ReasonProviderMismatch, "hello: means to ask a signer that is not for this provider")
	}
	return f
}

// checkPair applies S7: the challenge is valid only for the requester of the hello, and only for
// the request that the hello announced.
func checkPair(q request, found *certificatesv1.CertificateSigningRequest) (f findings) {
	if !q.needsHello {
		return f
	}
	if found == nil {
		f.wait(ReasonHelloNotFound, "the hello that the proof refers to is not there")
		return f
	}
	proof, hello := q.object.Spec, found.Spec
	differ := func(what string) { f.deny(ReasonProofMismatch, "proof and hello differ in %s", what) }
	if hello.SignerName != attestation.HelloSignerFor(proof.SignerName) {
		f.deny(ReasonProofMismatch, "what the proof refers to is not a hello, or only one of the two is a rehearsal")
	}
	if proof.Username != hello.Username {
		differ("username")
	}
	if proof.UID != hello.UID {
		differ("uid")
	}
	if !slices.Equal(slices.Sorted(slices.Values(proof.Groups)), slices.Sorted(slices.Values(hello.Groups))) {
		differ("groups")
	}
	content, err := attestation.Parse(hello.Request)
	if err != nil {
		f.deny(ReasonProofMismatch, "the hello is malformed")
	}
	if err == nil && content.Provider != q.content.Provider {
		differ("provider")
	}
	if err == nil && !bytes.Equal(content.PKCS10, q.content.PKCS10) {
		differ("the certification request")
	}
	if !slices.Equal(proof.Usages, hello.Usages) {
		differ("usages")
	}
	if a, b := proof.ExpirationSeconds, hello.ExpirationSeconds; (a == nil) != (b == nil) || a != nil && *a != *b {
		differ("expirationSeconds")
	}
	return f
}

// checkHelloReuse applies the rest of S7: only one proof may follow a hello. A second proof by the
// same machine would verify, too, and would get a second certificate for one challenge.
func checkHelloReuse(q request, hello *certificatesv1.CertificateSigningRequest, records []Record) (f findings) {
	if !q.needsHello || hello == nil {
		return f
	}
	if slices.ContainsFunc(records, func(r Record) bool { return r.HelloUID == string(hello.UID) && !r.isFor(q.object) }) {
		f.deny(ReasonProofMismatch, "another proof has followed the hello")
		return f
	}
	named := slices.ContainsFunc(records, func(r Record) bool { return r.isFor(q.object) })
	if state.Of(hello) != state.Pending && !closedByExpiry(hello) && !named {
		f.deny(ReasonProofMismatch, "the hello is closed")
	}
	return f
}

// closedByExpiry reports whether a hello was closed only because its challenge had expired. A proof
// that came in time may still wait.
func closedByExpiry(hello *certificatesv1.CertificateSigningRequest) bool {
	reached, cause := state.Explain(hello)
	alone := len(hello.Status.Conditions) == 1 && len(hello.Status.Certificate) == 0
	return reached == state.Denied && alone && cause.Reason == string(ReasonHelloExpired)
}

// checkOtherProofs makes a proof wait while another proof of its machine is pending (S7). The
// record is written for one request, and only that one is signed.
func checkOtherProofs(q request, record *Record) (f findings) {
	if !q.kind.hello && !q.kind.serving && record != nil && record.ProofPending && !record.isFor(q.object) {
		f.wait(ReasonRequestPending, "another request of this machine is being issued")
	}
	return f
}
