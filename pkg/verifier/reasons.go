// SPDX-License-Identifier: Apache-2.0

package verifier

import "github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"

// The reasons of the rules in this package. Reasons explains each. A provider's verifier has
// further reasons, which begin with Attestation.
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

// Reasons returns every reason of this package with its meaning, for documentation and for counters
// that start at zero.
func Reasons() map[Reason]string {
	return map[Reason]string{ //nolint:gosec // G101: meanings of reasons, and no secrets
		ReasonRefused: "refused without a reason: a mistake in the program",

		ReasonMalformedRequest:   "spec.request is not exactly the three PEM blocks in canonical encoding",
		ReasonProviderMismatch:   "the evidence has another provider than the signer",
		ReasonUnsupportedKey:     "the certification request does not parse, has bytes after it, is not signed with its own key, or has another key than ECDSA P-256 or P-384, or RSA of 2048 to 4096 bits with exponent 65537",
		ReasonSubjectMismatch:    "the subject is not one organization system:nodes, then one common name of system:node: and the node's name, and nothing else",
		ReasonForbiddenExtension: "the request has another extension or attribute than one valid provider ID, such as a subject alternative name",
		ReasonUsageMismatch:      "the usages are not exactly those of a kubelet's client certificate with a key of this kind",
		ReasonProofMismatch:      "proof and hello differ in requester or contents",
		ReasonHelloNotFound:      "the proof's hello does not exist; waits until the proof's challenge could no longer be answered, and is then denied as expired. An unparsable proof is denied for that instead",
		ReasonHelloExpired:       "no proof arrived before the hello's challenge expired; a proof that arrived in time is not refused for it",

		ReasonRequesterNotAllowed: "the requester may not request this node name",
		ReasonTokenNotForMachine:  "the bootstrap token does not belong to this machine; waits while that is unknown",
		ReasonUnknownCredential:   "the requester's certificate is not in the machine's record; waits while the record is about to get it",

		ReasonAttestationUnavailable: "the evidence cannot be verified now; waits",

		ReasonMachineNotFound:       "no known machine has this evidence; waits",
		ReasonAmbiguousMachine:      "the evidence belongs to more than one machine, or sources contradict each other about the machine; waits. Only a warning for a machine that attested with the key in its record",
		ReasonProviderIDMismatch:    "the provider ID is not the machine's",
		ReasonMachineNotReady:       "the machine is not provisioned yet, or is paused; waits",
		ReasonMachineDeleting:       "the machine is being deleted",
		ReasonNodeNameUnknown:       "no source has the machine's node name yet; waits",
		ReasonNodeNameMismatch:      "the machine with this evidence has another node name",
		ReasonAmbiguousName:         "another machine or record claims the node name, or the machine has several",
		ReasonNodeAlreadyRegistered: "a Node of that name exists, and no record binds it to this machine; waits while that is unknown",
		ReasonTrustExpired:          "nothing vouches for the endorsement key, and the machine is too old to be trusted on first use",

		ReasonCertificateRevoked:   "an operator has revoked the certificate, or strict mode finds no record of it: it may only request another one, with evidence",
		ReasonSuspended:            "an operator has suspended the machine, by its endorsement key",
		ReasonSuspensionsUnknown:   "the controller cannot read yet which machines are suspended; waits",
		ReasonIdentityBound:        "the record contradicts: it binds another endorsement key, machine or node name, or a stronger provider",
		ReasonBootCountersWentBack: "the TPM's boot counters or clock went back: the TPM was cleared, or restored from a snapshot",
		ReasonAKChanged:            "the TPM has another attestation key than last time; only a warning",
		ReasonEKNotNamed:           "the record has another endorsement key than a source names that may not replace it: by a mistake, or because another machine came first; only a warning",
		ReasonEKReplaced:           "the source of this endorsement key, or after trust on first use another source, now names another one for the machine",
		ReasonEKChangePending:      "the source names another endorsement key than the record, and the change is not accepted yet: that takes seconds, or needs an operator; waits. Only a warning for the key in the record",
		ReasonRecordRecovered:      "the machine's record was lost, or is older than the requester's certificate. The controller recreates it, because a source names the endorsement key; only a warning",
		ReasonRateLimited:          "too many requests; waits, and is never denied for it",

		ReasonRequestPending:    "another request of the machine is approved, or about to be approved, and has no certificate yet; waits",
		ReasonSignerUnavailable: "no CA can sign now; waits",

		ReasonAddressForbidden: "the requested serving certificate has a reserved name or address: the API server's, a service's, or loopback",
		ReasonAddressMismatch:  "the requested serving certificate has a name or address that is not the machine's, or also another machine's",
		ReasonAddressUnknown:   "no source has the machine's addresses yet; waits",

		ReasonApprovedWithoutAttestation: "somebody else approved the request, or the machine's record names another request since",
	}
}

// WaitingText returns the text for people on a request that waits for this reason: cause and
// remedy. It depends on the reason alone, since every node may read it. It returns "" for a reason
// for which no request waits.
func WaitingText(reason Reason) string { return waitingTexts[reason] }

// waitingTexts has each reason with which the rules may wait. A line is printable ASCII of at most
// 400 bytes.
var waitingTexts = map[Reason]string{ //nolint:gosec // G101: prose about tokens and keys
	ReasonHelloNotFound: "the hello of this request is gone: find out who deletes CertificateSigningRequests. The node files another hello by itself",

	ReasonTokenNotForMachine: "it is not known yet for which machine the bootstrap token was made: the operator compares bootstrapTokenID in the inventory with the first six characters " +
		"of the token, or waits until the Machine's bootstrap data is there",
	ReasonUnknownCredential: "the node's certificate is not in the machine's record yet: that takes some seconds. If the request keeps waiting, the operator looks at the record: kubectl get natt -A",

	ReasonAttestationUnavailable: "the controller cannot judge the evidence at present: its log has the cause, in the lines \"could not be judged\". It tries again by itself",

	ReasonMachineNotFound: "the controller knows no machine that this request belongs to: run \"kubelet-authenticator identify\" on the node, and if it is a machine of yours, " +
		"add what that prints to the controller's inventory, or with Cluster API annotate the Machine with the endorsement key. The request then continues by itself. If you added it already, the inventory may be invalid: \"kubectl attest check\" names the line",
	ReasonAmbiguousMachine: "the controller's inventory or Machines name this machine's endorsement key twice, or contradict each other: the operator runs " +
		"\"node-attestation-controller inventory check\" on the inventory, or compares the Machines' annotations. The request then continues by itself",
	ReasonMachineNotReady:       "the machine is not provisioned yet, has no provider ID, or is paused: with an inventory, add providerID to its entry; with Cluster API, see what its Machine lacks with: kubectl get machine -A",
	ReasonNodeNameUnknown:       "nothing says yet which node name the machine has: wait for the Machine's addresses, or correct clusterAPI.nodeNames in the controller's configuration",
	ReasonNodeAlreadyRegistered: "it is not known yet whether a Node of that name exists: the controller tries again by itself",

	ReasonSuspensionsUnknown: "the controller cannot read yet which machines are suspended: it tries again by itself. If the request keeps waiting, the log says which right or kind is missing",

	ReasonIdentityBound:     "the record of a removed machine is still there: the controller deletes it. If the request keeps waiting, see: kubectl get natt -A",
	ReasonEKChangePending:   "a source names another endorsement key than the machine's record: the change takes some seconds. If the request keeps waiting, the Event EKChangeHeld on the Node names the annotation that accepts it",
	ReasonRateLimited:       "there are too many requests at present: this request continues by itself when the load falls. If it keeps waiting, see in \"kubectl get csr\" who files so many",
	ReasonRequestPending:    "another request of this machine has no certificate yet: this request continues by itself after the other one. If it keeps waiting, see in \"kubectl get csr\" what the other one waits for",
	ReasonSignerUnavailable: "the controller has no CA that it can sign with at present: the controller's log and the condition NodeAttestationSourcesUsable of its namespace say why. The request continues by itself once there is one",

	ReasonAddressUnknown: "nothing says yet which addresses the machine has: add them to the inventory, or wait for the Machine's status.addresses",
}
