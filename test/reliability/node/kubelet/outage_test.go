// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"slices"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/reliability"
)

const (
	// maxGap is the longest time between two renewals of a node's Lease that does not count as a
	// missed one. The kubelet renews the Lease every 10 s, and one missed renewal makes 20 s. A
	// busy machine may be late.
	maxGap = 19 * time.Second
	// nearest is the longest time between two calls of the plugin while a certificate is due.
	nearest = 31 * time.Second
)

// outage is how long nobody signs, and which certificate the node has meanwhile.
type outage struct {
	lasts time.Duration
	// age and left are of the certificate. It is due when it is issued, and outlasts the outage.
	age, left time.Duration
}

// A certificate is due, and nobody challenges, approves or signs for a long time. The kubelet calls
// its plugin again and again. It misses no heartbeat, its node is always Ready, and only one
// request is filed. When the signer is back, the node gets its certificate with the old one.
func TestSignerIsAwayWhileACertificateIsDue(t *testing.T) {
	t.Parallel()
	o := reliability.Size(t, "signer-outage",
		outage{lasts: 25 * time.Second, age: 20 * time.Minute, left: 75 * time.Second},
		outage{lasts: time.Hour, age: 15 * time.Hour, left: 90 * time.Minute})
	controller := newController(t)
	signer := newSigner(t)
	// The node's first certificate is due at once, so the kubelet calls its plugin again and again.
	// The signer issues no other one.
	signer.issues(o.age, o.left)
	n := newNode(t, "forsaken")
	harness.Must(t, controller.Kill())
	began, due := time.Now(), n.pair(t)
	p := harness.WatchNode(t, shared.Client(), n.Name)

	time.Sleep(time.Until(began.Add(o.lasts))) // the heartbeats of this time are counted
	outageEnd := time.Now()
	calls := n.calls(t)
	t.Logf("%s without a signer: %d calls of the plugin, %d renewals of the Lease, %s between two at most",
		round(outageEnd.Sub(began)), calls, p.Count(), round(p.Longest(outageEnd)))
	// A call comes when the timestamp of the one before has passed, and the kubelet sends a
	// request.
	if least := int(o.lasts / (nearest + 5*time.Second)); calls < least {
		t.Errorf("%d calls of the plugin, not %d at least: the certificate was not due", calls, least)
	}
	if held := n.pair(t); held.Fingerprint() != due.Fingerprint() {
		t.Error("there is another certificate, and nobody has signed")
	}
	if hellos, proofs := harness.Requests(t, shared, n.Name); len(hellos) != 2 || len(proofs) > 2 {
		t.Errorf("%d hellos and %d proofs: the first certificate's, and the pending ones", len(hellos), len(proofs))
	}

	signer.issues(0, 24*time.Hour)
	start(t, controller)
	back := time.Now()
	harness.Eventually(t, o.left-o.lasts, "the node has a new certificate", func() bool {
		return n.pair(t).Fingerprint() != due.Fingerprint()
	})
	t.Logf("a new certificate %s after the controller's return", round(time.Since(back)))
	harness.Eventually(t, nearest+10*time.Second, "the kubelet asks for the new certificate", func() bool { return n.calls(t) > calls })
	used := time.Now()
	harness.Eventually(t, maxGap, "the Lease is renewed with the new certificate", func() bool {
		_, renewed := p.FirstAfter(used)
		return renewed
	})
	p.Stop()
	p.Steady(t, maxGap, time.Now())
	hellos, proofs := harness.Requests(t, shared, n.Name)
	t.Logf("%d hellos and %d proofs for two certificates", len(hellos), len(proofs))
	if len(hellos) > 3 || len(proofs) > 3 {
		t.Errorf("%d hellos and %d proofs: two, and one more where the challenge had expired", len(hellos), len(proofs))
	}
	for _, r := range slices.Concat(hellos, proofs) {
		if r.CreationTimestamp.After(began) && r.Spec.Username != "system:node:"+n.Name {
			t.Errorf("request %s came from %s, not from the node itself", r.Name, r.Spec.Username)
		}
	}
}

// calls returns how often the kubelet has called its plugin. No call may have failed.
func (n *node) calls(t *testing.T) int {
	t.Helper()
	total, failed, err := n.kubelet.PluginCalls(t.Context())
	harness.Must(t, err)
	if failed > 0 {
		t.Fatalf("%d of %d calls of the plugin failed", failed, total)
	}
	return total
}

func round(d time.Duration) time.Duration { return d.Round(10 * time.Millisecond) }
