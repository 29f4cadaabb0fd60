// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"bytes"
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

// evaluateUnattested applies the rules for the renewal of a kubelet without the plugin: S2 to S6,
// I2 and T2. The node may only request its own name.
func (r *Rules) evaluateUnattested(in Input, q request) evaluation {
	if !q.readable {
		return evaluation{}
	}
	class, f := r.checkRequester(q)
	s := subject{class: class}
	if name := q.cert.nodeName; name != "" && slices.ContainsFunc(in.Records, func(r Record) bool { return r.NodeName == name }) {
		f.deny(ReasonIdentityBound, "record: the node is attested, and renews with evidence")
	}
	f.add(r.checkSuspension(in, q, s))
	return evaluation{subject: s, findings: f}
}
