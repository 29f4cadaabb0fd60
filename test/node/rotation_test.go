// SPDX-License-Identifier: Apache-2.0

package node

import (
	"crypto/x509"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// busy makes the kubelet ask for its node each second. So it also asks its plugin in the few
// seconds in which a short-lived certificate is due. The Lease is still renewed every 10 s.
const busy = "nodeStatusUpdateFrequency: 1s\n"

// watchNodes has kube-controller-manager find out about nodes without a heartbeat. It has no CA:
// the signer is ours.
func (c *cluster) watchNodes(t *testing.T) {
	t.Helper()
	err := c.StartControllerManager(t.Context(), "--controllers=node-lifecycle-controller", "--cluster-signing-cert-file=", "--cluster-signing-key-file=")
	if err != nil {
		t.Fatal(err)
	}
}

// startShortLived starts a node whose certificates live only so long.
func startShortLived(t *testing.T, name string, lifetime time.Duration) (*machine, *signer) {
	t.Helper()
	c := newCluster(t, approveOnly)
	c.watchNodes(t)
	s := c.newSigner(t, lifetime)
	m := c.newTokenMachine(t, name, "--signer-name="+builtinSigner)
	c.admit(t, m.identity(t))
	m.startKubelet(t, busy)
	harness.Eventually(t, time.Minute, "the node is ready", func() bool { return m.ready(t.Context()) == "" })
	if leaf := m.leaf(t); leaf.NotAfter.Sub(leaf.NotBefore) != lifetime {
		t.Fatalf("the certificate is valid from %s to %s: it is another signer's", leaf.NotBefore, leaf.NotAfter)
	}
	return m, s
}

// One certificate follows the other, each with a new attestation, and the node never misses a
// heartbeat.
func TestRotations(t *testing.T) {
	t.Parallel()
	const lifetime, rotations = 35 * time.Second, 6
	m, _ := startShortLived(t, "rotating", lifetime)
	p := m.watch(t)
	began := time.Now()
	leaves := []*x509.Certificate{m.leaf(t)}
	harness.Eventually(t, 4*time.Minute, "the certificate is rotated again and again", func() bool {
		if last := leaves[len(leaves)-1]; !m.leaf(t).Equal(last) {
			leaves = append(leaves, m.leaf(t))
			t.Logf("rotation %d after %s, %s before the end", len(leaves)-1, time.Since(began).Round(100*time.Millisecond),
				time.Until(last.NotAfter).Round(100*time.Millisecond))
		}
		return len(leaves) > rotations
	})
	// The last one is used, too.
	seen := p.Count()
	harness.Eventually(t, maxGap, "the Lease is renewed after the last rotation", func() bool { return p.Count() > seen })
	p.Stop()
	p.Steady(t, maxGap, time.Now())
	late := 0
	for i, leaf := range leaves[1:] {
		if !leaf.NotBefore.Before(leaves[i].NotAfter) {
			late++
		}
	}
	// Each certificate is due for a few seconds only, and a busy machine may miss some of them.
	if late > 2 {
		t.Errorf("%d rotations came after the old certificate's end", late)
	}
	if hellos, proofs := m.requests(t); len(hellos) > len(leaves)+late || len(proofs) > len(leaves)+late {
		t.Errorf("%d hellos and %d proofs for %d certificates", len(hellos), len(proofs), len(leaves))
	}
}

// Neither controller nor signer is there while the certificate is due. The old one serves to its
// end, and as soon as they are back the node gets a new one.
func TestSignerDownForTheWholeWindow(t *testing.T) {
	t.Parallel()
	// Due for 20 s at least, so that a kubelet whose plugin fails meanwhile misses a renewal of the
	// Lease.
	const lifetime, outage = 200 * time.Second, 12 * time.Second
	m, s := startShortLived(t, "forsaken", lifetime)
	p := m.watch(t)
	leaf := m.leaf(t)
	// The window begins when three tenths of the lifetime are left.
	// Until then nothing may happen, and nothing says so.
	time.Sleep(time.Until(leaf.NotAfter.Add(-lifetime * 4 / 10)))
	s.away.Store(true)
	if err := m.controller.Kill(); err != nil {
		t.Fatal(err)
	}
	if !m.leaf(t).Equal(leaf) {
		t.Fatal("the certificate was replaced before the window")
	}

	// The calls of this whole time are counted.
	time.Sleep(time.Until(leaf.NotAfter.Add(-time.Second)))
	if total, failed := m.calls(t); failed > 0 || total < 3 {
		t.Errorf("while the certificate was valid, %d of %d calls of the plugin failed", failed, total)
	}
	time.Sleep(time.Until(leaf.NotAfter))
	p.Steady(t, maxGap, leaf.NotAfter)
	if hellos, _ := m.requests(t); len(hellos) != 2 {
		t.Errorf("%d hellos, not the first and one for the renewal", len(hellos))
	}
	time.Sleep(outage) // how often the kubelet asks meanwhile is counted
	seen := p.Count()

	back := time.Now()
	s.away.Store(false)
	m.startController(t)
	harness.Eventually(t, time.Minute, "the Lease is renewed after the signer's return", func() bool { return p.Count() > seen })
	t.Logf("the Lease is renewed %s after the signer's return", time.Since(back).Round(100*time.Millisecond))
	harness.Eventually(t, harness.Soon, "the node is ready", func() bool { return m.ready(t.Context()) == "" })
	if hellos, _ := m.requests(t); len(hellos) > 3 {
		t.Errorf("%d hellos", len(hellos))
	}
}
