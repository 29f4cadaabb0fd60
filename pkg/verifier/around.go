// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"slices"

	certificatesv1 "k8s.io/api/certificates/v1"
)

// Unattested reports whether the policy leaves the node of that name alone.
func (r *Rules) Unattested(node string) bool {
	return r != nil && slices.Contains(r.policy.UnattestedNodes, node)
}

// Serves reports whether a request is for a serving certificate, under a signer of the policy. No record names those.
func (r *Rules) Serves(request *certificatesv1.CertificateSigningRequest) bool {
	return r != nil && r.serves(request.Spec)
}
