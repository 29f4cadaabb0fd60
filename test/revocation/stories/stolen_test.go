// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"strings"
	"testing"
	"time"

	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// refusedIn is how long a revoked certificate may go on writing.
const refusedIn = 2 * time.Second

// A key is stolen, and revoked. The thief loses every write. The machine comes back by its evidence
// with that very certificate, without a token. The thief, who has no TPM, does not.
func TestStolenKey(t *testing.T) {
	started(t, nil)
	nodes := newNodes(t, "stolen", 2)
	victim, other := nodes[0], nodes[1]
	victim.joins(t)
	other.joins(t)
	stolen := victim.credential()
	stolen.MustWrite(t)
	stolen.At(shared.second.URL()).MustWrite(t)
	thief := append(encodings(t, stolen), stolen)

	r := revoke(t, v1alpha1.RevokeImmediately, nil, victim)
	began := time.Now()
	t.Logf("refused %s after the revocation was created", stolen.RefusedWithin(t, refusedIn, attestation.MessageRevoked))
	stolen.At(shared.second.URL()).RefusedWithin(t, refusedIn-time.Since(began), attestation.MessageRevoked)
	t.Logf("by the second API server, too, after %s", time.Since(began))
	mustBeRefused(t, attestation.MessageRevoked, thief...)
	other.credential().MustWrite(t)
	other.credential().At(shared.second.URL()).MustWrite(t)

	// It asks with the stolen certificate: Attest uses the token only without one.
	if err := victim.attest(t.Context()); err != nil {
		t.Fatal(err)
	}
	victim.credential().MustWrite(t)
	victim.credential().At(shared.second.URL()).MustWrite(t)
	mustBeRefused(t, attestation.MessageRevoked, thief...)

	eventually(t, "the revocation is complete", func() bool {
		if err := shared.client.Get(t.Context(), client.ObjectKeyFromObject(r), r); err != nil {
			t.Fatal(err)
		}
		return meta.IsStatusConditionTrue(r.Status.Conditions, v1alpha1.ConditionComplete) && r.Status.Nodes == 1 && r.Status.Renewed == 1 && r.Status.Revoked == 1
	})
	eventually(t, "the record says so", func() bool {
		record := victim.record(t)
		c := meta.FindStatusCondition(record.Status.Conditions, v1alpha1.ConditionRevoked)
		return c != nil && c.Reason == v1alpha1.ReasonRenewed && record.Status.Revocation != nil && record.Status.Revocation.Reason == r.Spec.Reason &&
			len(record.Status.Certificates) == 2 && record.Status.Certificates[0].Revoked && !record.Status.Certificates[1].Revoked
	})
	eventually(t, "Events say so on the record and on the Node", func() bool {
		on := map[string]bool{}
		events := &eventsv1.EventList{}
		if err := shared.client.List(t.Context(), events); err != nil {
			t.Fatal(err)
		}
		for _, e := range events.Items {
			if e.Reason == v1alpha1.ReasonRevoked && strings.Contains(e.Note, r.Spec.Reason) {
				on[e.Regarding.Kind] = true
			}
		}
		return on["Node"] && on["NodeAttestation"]
	})

	// It renews again. The new certificate is in force at each API server when the node gets it,
	// and the one before stays in force.
	before := victim.credential()
	if err := victim.attest(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, c := range []harness.Credential{victim.credential(), before} {
		c.MustWrite(t)
		c.At(shared.second.URL()).MustWrite(t)
	}

	// The record is deleted, and the revocation. The certificate has not ended, and stays refused.
	// The node goes on.
	if err := shared.client.Delete(t.Context(), victim.record(t)); err != nil {
		t.Fatal(err)
	}
	if err := shared.client.Delete(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	time.Sleep(3 * time.Second) // more than a round
	mustBeRefused(t, attestation.MessageRevoked, thief...)
	victim.credential().MustWrite(t)
	victim.credential().At(shared.second.URL()).MustWrite(t)
	list := &v1alpha1.RevocationSlice{}
	if err := shared.client.Get(t.Context(), client.ObjectKey{Namespace: controllerprocess.Namespace, Name: revocation.PolicyName(1)}, list); err != nil {
		t.Fatal(err)
	}
	if len(list.Spec.Certificates) == 0 {
		t.Error("the list is empty")
	}
}
