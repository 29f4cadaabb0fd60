// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// The evidence of one round: accepted, refused, not to be judged now, and of a machine that is not
// known yet.
func TestEvidenceOfOneRound(t *testing.T) {
	for name, c := range map[string]struct {
		d    document
		want string
	}{
		"accepted":              {document{Machine: "worker-1"}, "Approve Sign"},
		"of another machine":    {document{Machine: "worker-2"}, "Deny"},
		"false":                 {document{Machine: "worker-1", Refused: "EvidenceForged"}, "Deny"},
		"not to be judged now":  {document{Machine: "worker-1", Unavailable: true}, "Wait"},
		"no machine known yet":  {document{}, "Wait"},
		"a machine that is not": {document{Machine: "worker-9"}, "Wait"},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(k *kit) {
				in := k.start(inSync)
				in.once(k.request("r", acmeSigner, "worker-1", asToken("worker-1"), c.d).Name)
				if got := k.journal.outcomes(); got != c.want {
					k.Errorf("%q", got)
				}
			})
		})
	}
}

// Without evidence the requester counts as the machine that its token was made for, and only a
// document that says just that counts.
func TestInsecureSigner(t *testing.T) {
	for name, c := range map[string]struct {
		document, username string
		want               string
	}{
		"a token":          {`{"version":"insecure/v1"}`, asToken("worker-1"), "Approve Sign"},
		"another's token":  {`{"version":"insecure/v1"}`, asToken("worker-2"), "Deny"},
		"an unknown token": {`{"version":"insecure/v1"}`, asToken("worker-9"), "Wait"},
		"no token":         {`{"version":"insecure/v1"}`, asNode("worker-1"), "Deny"},
		"other evidence":   {`{"version":"insecure/v1" }`, asToken("worker-1"), "Deny"},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(k *kit) {
				k.policy.InsecureSigner = verifier.InsecureSignerName
				k.config.Providers = append(k.config.Providers, evidence.FromSigner(verifier.InsecureProvider, evidence.InsecureSigner{Tokens: k.machines}))
				k.machines.set(machineNamed("worker-1"), machineNamed("worker-2"))
				in := k.start(inSync)
				content := attestation.Request{
					PKCS10: must(csr.PKCS10(csr.Identity{NodeName: "worker-1"}, nodeKey())), Provider: verifier.InsecureProvider, Data: []byte(c.document),
				}
				in.once(k.file(csr.Object("r", verifier.InsecureSignerName, must(content.Marshal()), nodeKey().Public(), nil), c.username).Name)
				if got := k.journal.outcomes(); got != c.want {
					k.Errorf("%q, %q", got, k.journal.events)
				}
			})
		})
	}
	s := evidence.InsecureSigner{}
	request := requestNamed("r", "r")
	request.Spec.Username = asToken("worker-1")
	if name, err := s.MachineName(t.Context(), request); name != "" || err != nil {
		t.Errorf("without tokens the machine is %q, %v", name, err)
	}
	if err := s.VerifyServingAttestationData(t.Context(), request); !errors.As(err, &verifier.Refusals{}) {
		t.Error("a serving certificate passes")
	}
}
