// SPDX-License-Identifier: Apache-2.0

package nodeaccess

import (
	"strings"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
)

// Refusal is why the API server refused a request with 403.
type Refusal int

const (
	// MissingRight says that the credential lacks a right. Only then is the remedy to grant one.
	MissingRight Refusal = iota
	// Suspended says that an operator suspended the machine.
	Suspended
	// Revoked says that an operator revoked the certificate, or that no record names it and the
	// cluster requires that. The node has to attest for a new one.
	Revoked
	// ByAdmission says that another admission policy or a webhook refuses the request.
	ByAdmission
)

// ClassifyRefusal tells refusals apart by the API server's message.
func ClassifyRefusal(message string) Refusal {
	switch {
	case strings.Contains(message, attestation.MessageSuspended):
		return Suspended
	case strings.Contains(message, attestation.MessageRevoked), strings.Contains(message, attestation.MessageUnrecorded):
		return Revoked
	case strings.Contains(message, "denied request: "), strings.Contains(message, "denied the request"): // a policy, a webhook
		return ByAdmission
	}
	return MissingRight
}

// Remedy says what to do.
func (r Refusal) Remedy() string {
	switch r {
	case Suspended:
		return "ask the operator why the machine is suspended; after kubectl attest resume, the plugin requests a certificate again"
	case Revoked:
		return "check that signerName is one that node-attestation-controller signs for: a revoked certificate may only request from those"
	case ByAdmission:
		return "ask the operator of the cluster: an admission policy refuses it, and the message names the policy"
	default:
		return "bind the credential's group to the ClusterRole node-attestation-requester, or to system:node-bootstrapper"
	}
}
