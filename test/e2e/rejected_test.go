// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// installForeign gives the node a certificate of a CA that the API server does not know.
func (n *node) installForeign(t *testing.T) *cache.Pair {
	t.Helper()
	other, err := testbed.NewCA("other")
	if err != nil {
		t.Fatal(err)
	}
	issued, err := other.IssueClient("system:node:"+n.name, []string{"system:nodes"}, time.Now().Add(-time.Minute), time.Now().Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	return n.installPair(t, issued)
}

// reviews returns the SelfSubjectReviews of the plugin since a mark, by whether they were answered
// with 401.
func (n *node) reviews(t *testing.T, mark testbed.AuditMark) (all, rejected int) {
	t.Helper()
	events, err := n.AuditSince(mark)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, e := range events {
		ours := strings.HasPrefix(e.UserAgent, "testplugin/") || strings.HasPrefix(e.UserAgent, "kubelet-authenticator/")
		// A request that is not authenticated has one event, of another stage.
		if ours && strings.HasSuffix(e.RequestURI, "/selfsubjectreviews") && !seen[e.ID] {
			seen[e.ID] = true
			all++
			if e.Code == 401 {
				rejected++
			}
		}
	}
	return all, rejected
}

// After a 401, client-go runs the plugin again early. Then the plugin reviews its certificate once,
// and enrols again with the bootstrap credential.
func TestRejectedCertificateIsReplaced(t *testing.T) {
	n := newNode(t)
	n.installForeign(t)
	kubeconfig := n.execKubeconfig(t, "client.authentication.k8s.io/v1")
	out, err := runClient(t, n, kubeconfig, "200ms", "15s")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out, "ok ") || !strings.Contains(out, "system:node:"+n.name) {
		t.Errorf("the node did not come back:\n%s", out)
	}
	if got := len(n.requests(t)); got != 1 {
		t.Errorf("%d requests were filed", got)
	}
}

// While the node cannot enrol again, the plugin prints even the rejected certificate, and reviews
// it at most once a minute.
func TestRejectedCertificateIsServedWhileEnrolmentFails(t *testing.T) {
	n := newNode(t)
	old := n.installForeign(t)
	if err := os.Remove(n.bootstrap); err != nil {
		t.Fatal(err)
	}
	mark, err := n.AuditMark()
	if err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		r := n.run(t)
		if r.Code != 0 || !bytes.Equal(r.Leaf.Raw, old.Leaf.Raw) {
			t.Fatalf("exit code %d: %s", r.Code, r.Stderr)
		}
		if i > 0 && !strings.Contains(r.Stderr, "the API server rejects it") {
			t.Errorf("run %d does not say so: %q", i, r.Stderr)
		}
	}
	if all, rejected := n.reviews(t, mark); all != 1 || rejected != 1 {
		t.Errorf("%d reviews, %d of them rejected", all, rejected)
	}
}

// If client-go runs the plugin early, a good certificate is reviewed and printed, and nothing else
// happens.
func TestEarlyQuestionAboutAGoodCertificate(t *testing.T) {
	n := newNode(t)
	first := n.enrol(t)
	mark, err := n.AuditMark()
	if err != nil {
		t.Fatal(err)
	}
	for range 4 {
		if r := n.run(t); r.Stdout != first.Stdout || r.Stderr != "" {
			t.Errorf("another answer: %q", r.Stderr)
		}
	}
	if all, rejected := n.reviews(t, mark); all != 1 || rejected != 0 {
		t.Errorf("%d reviews, %d of them rejected", all, rejected)
	}
	if got := len(n.requests(t)); got != 1 {
		t.Errorf("%d requests", got)
	}
}

// The renewing node whose certificate is rejected when it files its request falls back on the
// bootstrap credential by itself.
func TestRejectionIsNoticedByTheWorker(t *testing.T) {
	n := renewingNode(t)
	other, err := testbed.NewCA("other")
	if err != nil {
		t.Fatal(err)
	}
	issued, err := other.IssueClient("system:node:"+n.name, []string{"system:nodes"}, time.Now().Add(-95*time.Minute), time.Now().Add(10*time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	old := n.installPair(t, issued)
	var r harness.Result
	harness.Eventually(t, harness.Soon, "the new certificate is printed", func() bool {
		r = n.run(t)
		return !bytes.Equal(r.Leaf.Raw, old.Leaf.Raw)
	})
	if got := n.requests(t); len(got) != 1 || !strings.HasPrefix(got[0].Spec.Username, "system:bootstrap:") {
		t.Errorf("%d requests, the first by %q", len(got), got[0].Spec.Username)
	}
}

// With another node name or another cluster, the certificate is unusable, and a new one is
// requested.
func TestCertificateOfAnotherNodeOrCluster(t *testing.T) {
	t.Run("node", func(t *testing.T) {
		n := newNode(t)
		n.enrol(t)
		n.name += "-renamed"
		r := n.run(t)
		if r.Code != 0 || n.whoami(t, r) != "system:node:"+n.name {
			t.Errorf("exit code %d: %s", r.Code, r.Stderr)
		}
	})
	t.Run("cluster", func(t *testing.T) {
		n := newNode(t)
		other, err := testbed.NewCA("other")
		if err != nil {
			t.Fatal(err)
		}
		pair := n.installForeign(t)
		n.reinstallFrom(t, pair, other.CertPEM())
		// A run waits for the new certificate, but not for long: on a busy machine a later one
		// prints it.
		var r harness.Result
		harness.Eventually(t, harness.Soon, "the new certificate is printed", func() bool {
			r = n.run(t)
			return r.Code != 0 || !r.Leaf.Equal(pair.Leaf)
		})
		if r.Code != 0 || n.whoami(t, r) != "system:node:"+n.name {
			t.Errorf("exit code %d: %s", r.Code, r.Stderr)
		}
		if got := len(n.requests(t)); got != 1 {
			t.Errorf("%d requests", got)
		}
	})
	// The CA was replaced at once: the certificate seems to be of another cluster, but the cluster
	// accepts it, so the node keeps it.
	t.Run("new CA", func(t *testing.T) {
		n := newNode(t)
		other, err := testbed.NewCA("old")
		if err != nil {
			t.Fatal(err)
		}
		pair := n.install(t, time.Now().Add(-time.Minute), time.Now().Add(time.Hour))
		n.reinstallFrom(t, pair, other.CertPEM())
		r := n.run(t)
		if r.Code != 0 || !r.Leaf.Equal(pair.Leaf) {
			t.Fatalf("exit code %d: %s", r.Code, r.Stderr)
		}
		if got := len(n.requests(t)); got != 0 {
			t.Errorf("%d requests", got)
		}
	})
}

// reinstallFrom stores a certificate as one from another cluster.
func (n *node) reinstallFrom(t *testing.T, pair *cache.Pair, ca []byte) {
	t.Helper()
	moved := *pair
	moved.Origin = &cache.Origin{Server: "https://elsewhere.example:6443", CertificateAuthorityData: ca}
	lock, err := n.dir.TryLock()
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Unlock()
	if err := lock.Install(&moved); err != nil {
		t.Fatal(err)
	}
}

// A key that others could read is replaced at once. Until then it is used.
func TestExposedKeyIsReplaced(t *testing.T) {
	n := renewingNode(t)
	pair := n.install(t, time.Now().Add(-time.Minute), time.Now().Add(time.Hour))
	if err := os.Chmod(n.dir.File(cache.CurrentFile), 0o644); err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, harness.Soon, "a new key is printed", func() bool {
		r := n.run(t)
		return r.Code == 0 && !r.Leaf.Equal(pair.Leaf)
	})
}
