// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"bytes"
	"context"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/attestor"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// node is a machine whose TPM is behind a proxy. The attestor answers its requests.
type node struct {
	*harness.Machine
	proxy *swtpm.Proxy
}

// newNode returns a machine without a certificate, with a bootstrap token of its own.
func newNode(t *testing.T) *node {
	t.Helper()
	m := harness.NewMachine(t, plugin, harness.TestNode(t), swtpm.Options{Certified: []string{"ecc-p256"}, Chain: true})
	n := &node{m, swtpm.NewProxy(t, m.Chip)}
	m.Device = n.proxy.Socket()
	token, err := cluster.CreateBootstrapToken(t.Context(), time.Hour)
	harness.Must(t, err)
	harness.WriteFile(t, m.Bootstrap, cluster.BootstrapKubeconfig(token))
	attestor.Start(t, cluster, m.Name, m.Chip)
	t.Cleanup(func() { harness.KillWorker(t, m.Certs()) })
	return n
}

// due gives the node a certificate that is due. It also removes the time of the last certificate
// from the state, because the plugin pauses after many certificates in a short time.
func (n *node) due(t *testing.T) *cache.Pair {
	t.Helper()
	issued, err := cluster.ClientCA().IssueClient("system:node:"+n.Name, []string{"system:nodes"}, time.Now().Add(-95*time.Minute), time.Now().Add(10*time.Minute))
	harness.Must(t, err)
	pair, err := cache.ParsePair(append(bytes.Clone(issued.CertPEM), issued.KeyPEM...))
	harness.Must(t, err)
	pair.Origin = &cache.Origin{Server: cluster.ServerURL(), CertificateAuthorityData: cluster.ServerCA()}
	harness.WorkerEnds(t, n.Certs())
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	lock, err := n.Certs().WaitLock(ctx)
	harness.Must(t, err)
	defer lock.Unlock()
	if state, err := n.Certs().State(); err == nil {
		state.Issued, state.Hasty, state.NextAttempt = time.Time{}, 0, time.Time{}
		harness.Must(t, lock.SetState(state))
	}
	harness.Must(t, lock.Install(pair))
	return pair
}

// settles runs the plugin as client-go does, until it prints another certificate than old, which is
// nil for none. It returns how long that took. While there is an old certificate each run prints
// one.
func (n *node) settles(t *testing.T, old *cache.Pair, limit time.Duration) time.Duration {
	t.Helper()
	began := time.Now()
	harness.Eventually(t, limit, "a new certificate is printed", func() bool {
		r := n.Run(t, cluster)
		if old == nil {
			return r.Code == 0
		}
		if r.Code != 0 {
			t.Fatalf("exit code %d while the old certificate is valid: %s", r.Code, r.Stderr)
		}
		return !bytes.Equal(r.Leaf.Raw, old.Leaf.Raw)
	})
	took := time.Since(began)
	harness.WorkerEnds(t, n.Certs())
	return took
}

// filed checks how many hellos and proofs the node has filed.
func (n *node) filed(t *testing.T, hellos, proofs int) {
	t.Helper()
	if a, b := harness.Requests(t, cluster, n.Name); len(a) != hellos || len(b) != proofs {
		t.Errorf("%d hellos and %d proofs were filed, not %d and %d", len(a), len(b), hellos, proofs)
	}
}

// nothingLeft checks that the TPM is as it was found.
func (n *node) nothingLeft(t *testing.T) {
	t.Helper()
	if handles, err := n.Chip.Handles(); err != nil || len(handles) > 0 {
		t.Errorf("left in the TPM: %x, %v", handles, err)
	}
}

// wantReason checks that a run failed with a class of failure, says these texts, and has a hint.
func wantReason(t *testing.T, r harness.Result, code int, says ...string) {
	t.Helper()
	r.Want(t, code, append(says, "hint: ")...)
}

// kinds are what each fault meets: a node without a certificate, and one whose certificate is due.
var kinds = []string{"enrolment", "renewal"}

// begin returns a node of that kind, and its certificate if it has one.
func begin(t *testing.T, kind string) (*node, *cache.Pair) {
	t.Helper()
	n := newNode(t)
	if kind == "renewal" {
		return n, n.due(t)
	}
	return n, nil
}

func label(s string) string { return strings.ReplaceAll(s, " ", "-") }
