// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"errors"
	"slices"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
)

// A node's request was pending when the node was revoked, so a thief may have the request's key,
// too. That key gets no certificate. The node gets one for its next key, which is not revoked.
func TestRequestIsOlderThanTheRevocation(t *testing.T) {
	c := started(t, nil)
	n := newNodes(t, "pending", 1)[0]
	n.joins(t)
	stolen := n.credential()
	if err := c.Kill(); err != nil {
		t.Fatal(err)
	}
	requests := func() (all []certificatesv1.CertificateSigningRequest) {
		list := &certificatesv1.CertificateSigningRequestList{}
		if err := shared.client.List(t.Context(), list); err != nil {
			t.Fatal(err)
		}
		return slices.DeleteFunc(list.Items, func(r certificatesv1.CertificateSigningRequest) bool { return r.Spec.Username != "system:node:"+n.Name })
	}
	back := make(chan error, 1)
	go func() {
		err := n.attest(t.Context())
		// The controller may have approved the proof before it numbered the revocation. Then the
		// proof fails, and a plugin files the next request after its back-off.
		if refused := (*fleet.RefusedError)(nil); errors.As(err, &refused) && refused.Decision.Reason == attestation.ReasonExpired {
			err = n.attest(t.Context())
		}
		back <- err
	}()
	eventually(t, "the hello is pending", func() bool { return len(requests()) == 1 })
	key := requests()[0].Name
	revoke(t, v1alpha1.RevokeImmediately, nil, n)
	start(t, c)
	if err := <-back; err != nil {
		t.Fatal(err)
	}
	stolen.RefusedWithin(t, refusedIn, attestation.MessageRevoked)
	n.credential().MustWrite(t)
	var ended, issued []string
	for _, r := range requests() {
		expired := func(c certificatesv1.CertificateSigningRequestCondition) bool {
			return c.Reason == attestation.ReasonExpired
		}
		switch {
		case len(r.Status.Certificate) > 0:
			issued = append(issued, r.Name)
		case slices.ContainsFunc(r.Status.Conditions, expired):
			ended = append(ended, r.Name)
		}
	}
	if len(ended) != 1 || len(issued) != 1 {
		t.Errorf("hello %s is older than the revocation; refused proofs: %q; issued: %q", key, ended, issued)
	}
	if certificates := n.record(t).Status.Certificates; certificates[len(certificates)-1].Revoked {
		t.Errorf("the new certificate is revoked: %+v", certificates)
	}
}
