// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

// announced reads the announcement with the credential of a node, as the plugin does.
func (n *node) announced(t *testing.T) attestation.Announcement {
	t.Helper()
	object := &corev1.ConfigMap{}
	key := client.ObjectKey{Namespace: attestation.AnnouncementNamespace, Name: attestation.AnnouncementName}
	if err := n.client(t).Get(t.Context(), key, object); err != nil {
		t.Fatal(err)
	}
	a, err := attestation.ParseAnnouncement([]byte(object.Data[attestation.AnnouncementKey]))
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// uses has the node say which certificate its kubelet uses.
func (n *node) uses(t *testing.T, sha256 string) {
	t.Helper()
	patch := fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, attestation.AnnotationCertificate, sha256)
	object := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name}}
	if err := n.client(t).Patch(t.Context(), object, client.RawPatch("application/merge-patch+json", []byte(patch))); err != nil {
		t.Fatal(err)
	}
}

// A rotation is announced. The old certificate works until the node uses the new one, or the limit
// has passed.
func TestRotation(t *testing.T) {
	started(t, nil)
	nodes := newNodes(t, "rotated", 3)
	renews, late, other := nodes[0], nodes[1], nodes[2]
	for _, n := range nodes {
		n.joins(t)
	}
	old, oldOfLate := renews.credential(), late.credential()
	limit, spread := int32(12), int32(5)
	r := revoke(t, v1alpha1.RevokeAfterRenewal, func(s *v1alpha1.NodeRevocationSpec) { s.LimitSeconds, s.SpreadSeconds = &limit, &spread }, renews, late)
	began := time.Now()
	eventually(t, "the renewal is announced", func() bool {
		_, at, due := renews.announced(t).Due(renews.Name, r.CreationTimestamp.Add(-time.Minute), nil)
		return due && !at.After(r.CreationTimestamp.Add(time.Duration(spread)*time.Second))
	})
	if _, _, due := other.announced(t).Due(other.Name, time.Now().Add(-time.Hour), nil); due {
		t.Error("it is announced to another node, too")
	}
	old.MustWrite(t)
	if err := renews.attest(t.Context()); err != nil {
		t.Fatal(err)
	}
	time.Sleep(3 * time.Second) // more than a round
	old.MustWrite(t)            // the kubelet may still use it
	certificates := renews.record(t).Status.Certificates
	renews.uses(t, certificates[len(certificates)-1].SHA256)
	t.Logf("refused %s after the node said that it uses the new one", old.RefusedWithin(t, 2*time.Second+refusedIn, attestation.MessageRevoked))
	renews.credential().MustWrite(t)

	// The one that does not renew is revoked at the limit.
	if left := time.Duration(limit)*time.Second - time.Since(began) - time.Second; left > 0 {
		oldOfLate.MustWrite(t)
		time.Sleep(left)
	}
	oldOfLate.RefusedWithin(t, time.Second+2*time.Second+refusedIn, attestation.MessageRevoked)
	if err := late.attest(t.Context()); err != nil {
		t.Fatal(err)
	}
	late.credential().MustWrite(t)
	other.credential().MustWrite(t)
	eventually(t, "it is complete, and nothing is announced", func() bool {
		if err := shared.client.Get(t.Context(), client.ObjectKeyFromObject(r), r); err != nil {
			t.Fatal(err)
		}
		return meta.IsStatusConditionTrue(r.Status.Conditions, v1alpha1.ConditionComplete) && len(renews.announced(t).Renewals) == 0
	})
}
