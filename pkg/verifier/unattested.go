// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"bytes"
	"encoding/pem"
	"fmt"
	"slices"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
)

// isUnattestedRenewal reports whether a request is from an unattested node of the policy, for
// Kubernetes' own signer, and without our evidence.
func (r *Rules) isUnattestedRenewal(spec certificatesv1.CertificateSigningRequestSpec) bool {
	name, node := strings.CutPrefix(spec.Username, userNode)
	return node && spec.SignerName == certificatesv1.KubeAPIServerClientKubeletSignerName && r.IsUnattestedNode(name) &&
		!bytes.Contains(spec.Request, []byte("-----BEGIN "+attestation.BlockProvider))
}

// SetUnattestedNodes replaces Policy.UnattestedNodes. With an error nothing changes.
func (r *Rules) SetUnattestedNodes(names []string) error {
	for i, name := range names {
		if len(validation.IsDNS1123Subdomain(name)) > 0 || slices.Contains(names[:i], name) {
			return fmt.Errorf("unattestedNodes: %.64q is not a node's name, or is listed twice", name)
		}
	}
	r.unattested.Store(new(slices.Clone(names)))
	return nil
}

// UnattestedNodes returns the names that are in force. Nobody may change the slice.
func (r *Rules) UnattestedNodes() []string {
	if r == nil || r.unattested.Load() == nil {
		return nil
	}
	return *r.unattested.Load()
}

// IsUnattestedNode reports whether the policy lists the node of that name as unattested.
func (r *Rules) IsUnattestedNode(node string) bool {
	return slices.Contains(r.UnattestedNodes(), node)
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
