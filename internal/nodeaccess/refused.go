// SPDX-License-Identifier: Apache-2.0

package nodeaccess

import (
	"strings"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
)

// The remedies for a request that the API server refuses with 403.
const (
	// SuspendedRemedy is for a machine that an operator suspended.
	SuspendedRemedy = "ask the operator why the machine is suspended; after kubectl attest resume, the plugin requests a certificate again"
	// RevokedRemedy is for a certificate that an operator revoked.
	RevokedRemedy = "check that signerName is one that node-attestation-controller signs for: a revoked certificate may only request from those"
	// admissionRemedy is for a request that is refused on purpose.
	admissionRemedy = "ask the operator of the cluster: an admission policy refuses it, and the message names the policy"
	// grantRemedy is for a credential that lacks a right.
	grantRemedy = "bind the credential's group to the ClusterRole node-attestation-requester, or to system:node-bootstrapper"
)

// RefusedRemedy says what to do when the API server refused a request with 403 and this message.
// Only where a right is missing is the remedy to grant it.
func RefusedRemedy(message string) string {
	switch {
	case strings.Contains(message, attestation.MessageSuspended):
		return SuspendedRemedy
	case strings.Contains(message, attestation.MessageRevoked):
		return RevokedRemedy
	case strings.Contains(message, "denied request: "), strings.Contains(message, "denied the request"): // a policy, a webhook
		return admissionRemedy
	}
	return grantRemedy
}
