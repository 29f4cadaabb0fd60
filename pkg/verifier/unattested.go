// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"bytes"
	"encoding/pem"
	"slices"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
)

// isUnattestedRenewal reports whether a request is from an unattested node of the policy, for
// Kubernetes' own signer, and without our evidence.
func (r *Rules) isUnattestedRenewal(spec certificatesv1.CertificateSigningRequestSpec) bool {
	name, node := strings.CutPrefix(spec.Username, userNode)
	return node && spec.SignerName == certificatesv1.KubeAPIServerClientKubeletSignerName && slices.Contains(r.policy.UnattestedNodes, name) &&
		!bytes.Contains(spec.Request, []byte("-----BEGIN "+attestation.BlockProvider))
}

// IsUnattestedNode reports whether the policy lists the node of that name as unattested.
func (r *Rules) IsUnattestedNode(node string) bool {
	return r != nil && slices.Contains(r.policy.UnattestedNodes, node)
}

// judgeUnattested judges the renewal of a kubelet without the plugin. It applies S3 to S6 and I2.
// The node may only request its own name, and no provider ID.
func (e *evaluation) judgeUnattested() {
	spec := e.in.Request.Spec
	der, ok := e.soleBlock()
	if !ok {
		return
	}
	e.requested = judgePKCS10(&e.denied, der)
	if e.requested.providerID != "" {
		e.deny(ReasonForbiddenExtension, "extensions: a node that is not attested has no provider ID to show")
	}
	judgeUsages(&e.denied, spec.Usages, e.requested.key, certificatesv1.UsageClientAuth)
	e.judgeRequester()
	for _, r := range e.in.Records {
		if e.requested.nodeName != "" && r.NodeName == e.requested.nodeName {
			e.deny(ReasonIdentityBound, "record: the node is attested, and renews with evidence")
			break
		}
	}
	e.judgeSuspension()
}

// soleBlock applies S2 to a request without evidence: exactly one PEM block, in its only encoding.
func (e *evaluation) soleBlock() (der []byte, ok bool) {
	request := e.in.Request.Spec.Request
	block, _ := pem.Decode(request)
	if len(request) > attestation.MaxRequestSize || block == nil || block.Type != attestation.BlockRequest || len(block.Headers) > 0 ||
		!bytes.Equal(pem.EncodeToMemory(block), request) {
		e.deny(ReasonMalformedRequest, "it is not one PEM block")
		return nil, false
	}
	return block.Bytes, true
}
