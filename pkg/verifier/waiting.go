// SPDX-License-Identifier: Apache-2.0

package verifier

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
