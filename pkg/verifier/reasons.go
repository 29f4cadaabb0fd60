// SPDX-License-Identifier: Apache-2.0

package verifier

import "github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"

// The reasons of the rules in this package. Reasons explains each. A provider's verifier has
// reasons of its own, which begin with Attestation.
const (
	ReasonMalformedRequest   Reason = "MalformedRequest"
	ReasonProviderMismatch   Reason = "ProviderMismatch"
	ReasonUnsupportedKey     Reason = "UnsupportedKey"
	ReasonSubjectMismatch    Reason = "SubjectMismatch"
	ReasonForbiddenExtension Reason = "ForbiddenExtension"
	ReasonUsageMismatch      Reason = "UsageMismatch"
	ReasonProofMismatch      Reason = "ProofMismatch"
	ReasonHelloNotFound      Reason = "HelloNotFound"
	ReasonHelloExpired       Reason = "AttestationHelloExpired"

	ReasonRequesterNotAllowed Reason = attestation.ReasonRequesterNotAllowed
	ReasonTokenNotForMachine  Reason = "TokenNotForMachine"
	ReasonUnknownCredential   Reason = attestation.ReasonUnknownCredential

	ReasonAttestationUnavailable Reason = "AttestationUnavailable"

	ReasonMachineNotFound       Reason = "MachineNotFound"
	ReasonAmbiguousMachine      Reason = "AmbiguousMachine"
	ReasonProviderIDMismatch    Reason = "ProviderIDMismatch"
	ReasonMachineNotReady       Reason = "MachineNotReady"
	ReasonMachineDeleting       Reason = "MachineDeleting"
	ReasonNodeNameUnknown       Reason = "NodeNameUnknown"
	ReasonNodeNameMismatch      Reason = "NodeNameMismatch"
	ReasonAmbiguousName         Reason = "AmbiguousName"
	ReasonNodeAlreadyRegistered Reason = attestation.ReasonNodeRegistered
	ReasonTrustExpired          Reason = "TrustExpired"

	ReasonCertificateRevoked   Reason = "CertificateRevoked"
	ReasonSuspended            Reason = attestation.ReasonSuspended
	ReasonSuspensionsUnknown   Reason = "SuspensionsUnknown"
	ReasonIdentityBound        Reason = "IdentityBound"
	ReasonBootCountersWentBack Reason = "BootCountersWentBack"
	ReasonAKChanged            Reason = "AKChanged"
	ReasonEKNotNamed           Reason = "EKNotNamed"
	ReasonEKReplaced           Reason = "EKReplaced"
	ReasonEKChangePending      Reason = "EKChangePending"
	ReasonRecordRecovered      Reason = "RecordRecovered"
	ReasonRateLimited          Reason = "RateLimited"
	ReasonRequestPending       Reason = "RequestPending"
	ReasonSignerUnavailable    Reason = "SignerUnavailable"

	ReasonAddressForbidden Reason = "AddressForbidden"
	ReasonAddressMismatch  Reason = "AddressMismatch"
	ReasonAddressUnknown   Reason = "AddressUnknown"

	ReasonApprovedWithoutAttestation Reason = "ApprovedWithoutAttestation"
)

// Reasons returns every reason of this package and what it means, for documentation and for
// counters that start at zero.
func Reasons() map[Reason]string {
	return map[Reason]string{
		ReasonRefused: "refused without a reason: a mistake in the program",

		ReasonMalformedRequest:   "spec.request is not exactly the three PEM blocks in their one encoding",
		ReasonProviderMismatch:   "the evidence is of another provider than the signer is for",
		ReasonUnsupportedKey:     "the certification request does not parse to its last byte, is not signed with its own key, or that is not ECDSA P-256 or P-384, or RSA of 2048 to 4096 bits with exponent 65537",
		ReasonSubjectMismatch:    "the subject is not one organization system:nodes, then one common name of system:node: and the node's name, and nothing else",
		ReasonForbiddenExtension: "there is an extension or attribute other than one well-formed provider ID, such as a subject alternative name",
		ReasonUsageMismatch:      "the usages are not exactly those of a kubelet's client certificate with a key of this kind",
		ReasonProofMismatch:      "proof and hello differ in who filed them or in what they ask for",
		ReasonHelloNotFound:      "the hello that the proof refers to is not there; waits. A proof that does not parse is denied for that instead",
		ReasonHelloExpired:       "no proof came before the hello's challenge ran out; a proof that did come and waits is not refused for it",

		ReasonRequesterNotAllowed: "the requester may not ask for this node",
		ReasonTokenNotForMachine:  "the bootstrap token was not made for this machine; waits while that is not known",
		ReasonUnknownCredential:   "the certificate that asks for its renewal is not one that was issued on evidence; waits while one is about to be noted",

		ReasonAttestationUnavailable: "the evidence could not be judged for now; waits",

		ReasonMachineNotFound:       "no machine is known that the evidence belongs to; waits",
		ReasonAmbiguousMachine:      "the evidence belongs to more than one machine, or the sources contradict each other about the machine; waits, and for a machine that attested with the key in its record it is a warning only",
		ReasonProviderIDMismatch:    "the provider ID is not the machine's",
		ReasonMachineNotReady:       "the machine is not provisioned yet, or is paused; waits",
		ReasonMachineDeleting:       "the machine is being deleted",
		ReasonNodeNameUnknown:       "nothing says yet which node name the machine has; waits",
		ReasonNodeNameMismatch:      "the node name is not that of the machine which the evidence belongs to",
		ReasonAmbiguousName:         "the node name is claimed by another machine or record, or the machine has more than one",
		ReasonNodeAlreadyRegistered: "a Node of that name exists, and no record says that it is this machine: if it is, delete the Node (kubectl delete node NAME), and the machine gets in; waits while that is not known",
		ReasonTrustExpired:          "nothing vouches for the endorsement key, and the machine is too old to be trusted on first use",

		ReasonCertificateRevoked:   "an operator has revoked the certificate: it may ask for another one with evidence, and for nothing else",
		ReasonSuspended:            "an operator has suspended the machine, by its endorsement key",
		ReasonSuspensionsUnknown:   "it is not known yet which machines are suspended; waits",
		ReasonIdentityBound:        "the record contradicts: the endorsement key, the machine or the node name is bound otherwise, or the pinned provider was a stronger one",
		ReasonBootCountersWentBack: "the TPM's boot counters or clock went back: it was cleared, or restored from a snapshot",
		ReasonAKChanged:            "the TPM has another attestation key than last time; a warning only",
		ReasonEKNotNamed:           "the record has an endorsement key that is none of those named for the machine: by a mistake there, or since another machine came first; a warning only",
		ReasonEKReplaced:           "the source that named this endorsement key for the machine names another one now",
		ReasonEKChangePending:      "the source names another endorsement key for the machine than its record has, and the controller has not accepted that yet: it takes seconds, or an operator's acknowledgement; waits, and for the key in the record it is a warning only",
		ReasonRecordRecovered:      "the machine's record was lost, or is older than the certificate that asks, and is written anew, since a source names the endorsement key; a warning only",
		ReasonRateLimited:          "too many requests; waits, and is never denied for it",

		ReasonRequestPending:    "another request of the machine has been approved, or is about to be, and has no certificate yet; waits",
		ReasonSignerUnavailable: "there is no CA that can sign at present; waits",

		ReasonAddressForbidden: "a serving certificate is asked for with a name or address that is no node's own: the API server's, the cluster's services', loopback",
		ReasonAddressMismatch:  "a serving certificate is asked for with a name or address that is not the machine's, or another's, too",
		ReasonAddressUnknown:   "nothing says yet which addresses the machine has; waits",

		ReasonApprovedWithoutAttestation: "somebody else approved the request, or the machine's record has come to name another one since",
	}
}
