// SPDX-License-Identifier: Apache-2.0

package nodeaccess

import (
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
)

// The hint for a suspended or revoked machine does not advise to grant rights.
func TestRefusedRemedy(t *testing.T) {
	const policy = "certificatesigningrequests.certificates.k8s.io \"x\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'p' denied request: "
	for message, want := range map[string]string{
		policy + attestation.MessageSuspended + ": stolen": "kubectl attest resume",
		policy + attestation.MessageRevoked:                "signerName",
		policy + attestation.MessageUnrecorded:             "signerName",
		policy + "not on a Tuesday":                        "admission policy",
		`admission webhook "w" denied the request: no`:     "admission policy",
		`certificatesigningrequests.certificates.k8s.io is forbidden: User "system:bootstrap:abcdef" cannot create resource "certificatesigningrequests"`: "node-attestation-requester",
	} {
		got := ClassifyRefusal(message).Remedy()
		if !strings.Contains(got, want) || want != "node-attestation-requester" && strings.Contains(got, "bind") {
			t.Errorf("%s: %s", message, got)
		}
	}
}
