// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"errors"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
)

// Evidence is the result of the provider's verifier for the request and its hello. The zero value
// proves nothing.
type Evidence struct {
	// Provider is the provider that verified the evidence.
	Provider string
	// EK is the fingerprint of the endorsement key, or another identifier of machines that the
	// provider defines. A proof proves it, a hello only claims it. Machines and records have it in
	// the same form.
	EK string
	// Machine is the machine's MachineRef.Name, if the evidence itself names the machine, as a
	// cloud's signed identity does. There is no EK then.
	Machine string
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
	// not be judged now.
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

// judgeEvidence applies A*, the result of the provider's verifier. It also uses an EK that no
// source names yet. So a request that contradicts a record is denied at once.
func (e *evaluation) judgeEvidence() {
	evidence := e.in.Evidence
	var refusals Refusals
	refused := errors.As(evidence.Err, &refusals)
	switch {
	case e.lacksHello() && (!refused || evidence.EKUntrusted):
		// judgePair waits for the hello. Without it, only faults of the proof itself are refused.
	case evidence.EKUntrusted:
		e.ek = evidence.EK
		e.wait(ReasonMachineNotFound, "nothing vouches for the endorsement key yet: %v", evidence.Err)
	case refused && len(refusals) == 0:
		e.deny(ReasonRefused, "the evidence is refused")
	case refused:
		e.denied = append(e.denied, refusals...)
	case evidence.Err != nil:
		e.wait(ReasonAttestationUnavailable, "the evidence could not be judged yet")
	case e.insecure:
		e.evidenceAccepted = true // this provider has no evidence
	case (evidence.EK == "") == (evidence.Machine == ""):
		e.deny(ReasonRefused, "the evidence shows nothing, or two things")
	case evidence.Provider != e.content.Provider:
		e.deny(ReasonProviderMismatch, "the evidence was judged as another provider's")
	default:
		e.ek, e.evidenceAccepted = evidence.EK, true
		e.warned = append(e.warned, evidence.Warnings...)
		e.judgeTargetSigner()
	}
}

// judgeTargetSigner applies S1 to the signer that a hello is going to ask.
func (e *evaluation) judgeTargetSigner() {
	if !e.hello {
		return
	}
	target, ours := e.rules.signers[e.in.Evidence.SignerName]
	if !ours || attestation.IsHelloSigner(target.Name) || attestation.IsRehearsalSigner(target.Name) != e.rehearsal || !target.accepts(e.content.Provider) {
		e.deny(ReasonProviderMismatch, "hello: means to ask a signer that is not for this provider")
	}
}
