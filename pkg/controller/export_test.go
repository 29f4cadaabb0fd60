// SPDX-License-Identifier: Apache-2.0

package controller

import (
	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// ParseClaim is summarize for tests with the real provider, which imports this package. Of a proof
// it returns the name of the hello in place of the EK.
func ParseClaim(rules *verifier.Rules, providers map[string]Provider, object *certificatesv1.CertificateSigningRequest, origin string) fairqueue.Claim {
	found := summarize(rules, providers, object, origin)
	return fairqueue.Claim{AK: found.AK, EK: found.EK + found.Hello, Node: found.Node, Proof: found.Hello != ""}
}
