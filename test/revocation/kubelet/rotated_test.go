// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

const (
	// rotationGap is the longest time between two renewals of a Lease during a rotation. A kubelet
	// renews it every 10 s.
	rotationGap = 15 * time.Second
	// refusedIn is how long a revoked certificate may go on writing.
	refusedIn = 2 * time.Second
	// slack is what a machine may take longer on which other suites run.
	slack = 3 * time.Second
)

// reported returns the certificate that a node says its kubelet uses.
func (n *node) reported(t *testing.T) string {
	t.Helper()
	object, err := shared.Client().CoreV1().Nodes().Get(t.Context(), n.Name, metav1.GetOptions{})
	harness.Must(t, err)
	return object.Annotations[attestation.AnnotationCertificate]
}

// rotate creates a NodeRevocation of mode AfterRenewal.
func rotate(t *testing.T, spread int32, change func(*v1alpha1.NodeRevocationSpec)) *v1alpha1.NodeRevocation {
	t.Helper()
	r := &v1alpha1.NodeRevocation{ObjectMeta: metav1.ObjectMeta{GenerateName: "rotate-", Namespace: controllerprocess.Namespace}}
	r.Spec = v1alpha1.NodeRevocationSpec{
		Cluster: controllerprocess.ClusterUID, Mode: v1alpha1.RevokeAfterRenewal, Reason: "rotation", SpreadSeconds: &spread,
	}
	change(&r.Spec)
	harness.NextSecond()
	harness.Must(t, shared.client.Create(t.Context(), r))
	return r
}

// A kubelet is rotated. The node stays Ready, and the old certificate works until the kubelet uses
// the new one.
func TestRotatedKubelet(t *testing.T) {
	t.Parallel()
	n := newNode(t, "rotated")
	old, before := n.Credential(t), n.Pair(t).Fingerprint()
	p := harness.WatchNode(t, shared.Client(), n.Name)
	api := old.Client(t)
	harness.Must(t, tryWrite(t.Context(), api, n.Name))

	rotate(t, 3, func(s *v1alpha1.NodeRevocationSpec) { s.Nodes = []string{n.Name} })
	began := time.Now()
	var renewed, reported time.Duration
	harness.Eventually(t, 40*time.Second, "the node says that it uses another certificate", func() bool {
		now := n.Pair(t).Fingerprint()
		if now != before && renewed == 0 {
			renewed = time.Since(began)
		}
		// The try comes first: a node may report between the two. It changes nothing, so that the
		// Lease's renewals are the kubelet's.
		err := tryWrite(t.Context(), api, n.Name)
		said := n.reported(t)
		if err != nil && (said == "" || said == before) {
			t.Fatalf("the old certificate does not work before the node reports the new one: %v", err)
		}
		reported = time.Since(began)
		return now != before && said == now
	})
	// the check, the spread, and the kubelet's next calls
	if limit := checkInterval + 3*time.Second + 15*time.Second; renewed > limit {
		t.Errorf("renewed only after %s", renewed)
	}
	harness.Eventually(t, harness.Soon, "the old certificate is refused", func() bool {
		return harness.IsRefused(tryWrite(t.Context(), api, n.Name), attestation.MessageRevoked)
	})
	t.Logf("renewed after %s, reported after %s, the old certificate refused after %s", round(renewed), round(reported), round(time.Since(began)))
	old.RefusedWithin(t, 0, attestation.MessageRevoked)
	old.At(shared.second.URL()).RefusedWithin(t, refusedIn+slack, attestation.MessageRevoked)

	seen := p.Count()
	harness.Eventually(t, 2*rotationGap, "the Lease is renewed with the new certificate", func() bool { return p.Count() > seen })
	p.Stop()
	p.Steady(t, rotationGap, time.Now())
}

func round(d time.Duration) time.Duration { return d.Round(10 * time.Millisecond) }
