// SPDX-License-Identifier: Apache-2.0

package revocation

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/pem"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// A thief can encode a revoked certificate in another way. API servers authenticate the copy, which
// has another fingerprint, and refuse its writes. The node's current certificate still works.
func TestReencodedCertificate(t *testing.T) {
	for name, c := range map[string]struct {
		entry     func(*credential) v1alpha1.RevokedCertificate
		message   string
		mayAttest bool
	}{
		"revoked": {revoked, attestation.MessageRevoked, true},
		"suspended": {func(c *credential) v1alpha1.RevokedCertificate {
			entry := suspended(c)
			entry.NodeSuspended = true
			return entry
		}, attestation.MessageSuspended, false},
	} {
		t.Run(name, func(t *testing.T) {
			node := "encoded-" + name
			pair, err := shared.ClientCA().IssueClient("system:node:"+node, []string{"system:nodes"}, time.Now().Add(-time.Minute), time.Now().Add(time.Hour))
			harness.Must(t, err)
			stolen := pairCredential(t, pair)
			stolen.node = node
			made := makeNode(t, node)
			hello := write{call: requestTo(attestation.HelloSignerName, "client auth")}.of(made)
			encodings, err := shared.ClientCA().Reencode(pair.CertPEM)
			harness.Must(t, err)
			others := map[string]*credential{}
			for encoding, certificate := range encodings {
				o := pairCredential(t, testbed.KeyPair{CertPEM: certificate, KeyPEM: pair.KeyPEM})
				if o.sha256 == stolen.sha256 {
					t.Fatalf("%s has the same fingerprint", encoding)
				}
				for server := range shared.servers {
					passes(t, o, server, renewal(node), false)
				}
				others[encoding] = o
			}
			inForceFor(t, lists{1: {c.entry(stolen)}}, node, stolen)
			for encoding, o := range others {
				for server := range shared.servers {
					if a := o.do(t.Context(), server, renewal(node)); !a.refused(c.message) {
						t.Errorf("%s, API server %d: %s", encoding, server, a)
					}
					if a := o.do(t.Context(), server, hello); (a.code == 201) != c.mayAttest || !c.mayAttest && !a.refused(c.message) {
						t.Errorf("%s, API server %d, hello: %s", encoding, server, a)
					}
				}
			}
			for server := range shared.servers {
				passes(t, made.fine, server, renewal(node), false)
			}
		})
	}
}

// pairCredential is the credential of a client certificate with its key.
func pairCredential(t *testing.T, pair testbed.KeyPair) *credential {
	t.Helper()
	block, _ := pem.Decode(pair.CertPEM)
	sum := sha256.Sum256(block.Bytes)
	return credentialOf(t, hex.EncodeToString(sum[:]), func(s *testbed.APIServer) []byte { return s.Kubeconfig(testbed.CertificateUser(pair)) })
}
