// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"bytes"
	"context"
	"crypto/x509"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/attestor"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const year = 365 * 24 * time.Hour

// clocks are wrong clocks, by how much they differ from the right one.
func clocks() map[string]time.Duration {
	return map[string]time.Duration{"1970": time.Until(time.Unix(0, 0)), "a-year-behind": -year, "ten-years-ahead": 10 * year}
}

// Exit codes of the plugin: docs/node.md.
const (
	clockIsWrong, apiIsUntrusted = 25, 26
)

// timedNode is a machine with a TPM whose clock a test sets.
type timedNode struct {
	*harness.Machine
	t        *testing.T
	cluster  *testbed.ControlPlane
	attestor *attestor.Attestor
	clock    string
	off      time.Duration
}

// newTimedNode returns a machine with the right clock and no certificate.
func newTimedNode(t *testing.T, cluster *testbed.ControlPlane) *timedNode {
	t.Helper()
	program, err := shared.clockPlugin()
	harness.Must(t, err)
	n := &timedNode{Machine: harness.NewMachine(t, program, harness.TestNode(t), swtpm.Options{Certified: []string{"ecc-p256"}}), t: t, cluster: cluster}
	n.clock = filepath.Join(n.Dir, "clock")
	n.set(0)
	token, err := cluster.CreateBootstrapToken(t.Context(), time.Hour)
	harness.Must(t, err)
	harness.WriteFile(t, n.Bootstrap, cluster.BootstrapKubeconfig(token))
	n.attestor = attestor.New(t, cluster, n.Name, n.Chip)
	t.Cleanup(func() { harness.KillWorker(t, n.Certs()) })
	return n
}

// set moves the machine's clock: 0 is right.
func (n *timedNode) set(off time.Duration) {
	n.t.Helper()
	n.off = off
	harness.Must(n.t, compile.SetClock(n.clock, off))
}

// now is what the machine's clock says.
func (n *timedNode) now() time.Time { return time.Now().Add(n.off) }

// run runs the plugin as a kubelet on the machine does, and waits for the worker. A credential has
// to be for some time to come, by the machine's clock.
func (n *timedNode) run() harness.Result {
	n.t.Helper()
	cmd := exec.CommandContext(n.t.Context(), n.Plugin, n.Flags()...)
	cmd.Env = append(harness.ExecEnv(n.cluster), compile.ClockVariable+"="+n.clock)
	r := harness.Run(n.t, cmd)
	if r.Code == 0 {
		r.Credential, r.Leaf = harness.ParseCredentialAt(n.t, r.Stdout, n.now().Add(-time.Second))
	} else if r.Stdout != "" {
		n.t.Errorf("exit code %d, and on standard output: %s", r.Code, r.Stdout)
	}
	harness.WorkerEnds(n.t, n.Certs())
	n.t.Logf("clock off by %s: exit code %d after %s: %s", n.off, r.Code, r.Took.Round(time.Millisecond), r.Stderr)
	return r
}

// wantFiled checks how many hellos and proofs the node has filed.
func (n *timedNode) wantFiled(hellos, proofs int) {
	n.t.Helper()
	a, b := harness.Requests(n.t, n.cluster, n.Name)
	if len(a) != hellos || len(b) != proofs {
		n.t.Errorf("%d hellos and %d proofs were filed, not %d and %d; refused: %v", len(a), len(b), hellos, proofs, n.attestor.Refused())
	}
}

// wantAccepted checks that the API server takes the credential for the node's.
func (n *timedNode) wantAccepted(r harness.Result) {
	n.t.Helper()
	if r.Code != 0 {
		n.t.Fatalf("exit code %d: %s", r.Code, r.Stderr)
	}
	config := n.cluster.AdminConfig()
	config.CertData, config.KeyData = []byte(r.Credential.Status.ClientCertificateData), []byte(r.Credential.Status.ClientKeyData)
	client, err := kubernetes.NewForConfig(config)
	harness.Must(n.t, err)
	review, err := client.AuthenticationV1().SelfSubjectReviews().Create(context.WithoutCancel(n.t.Context()), &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err != nil || review.Status.UserInfo.Username != "system:node:"+n.Name {
		n.t.Errorf("the API server takes it for %q, %v", review.Status.UserInfo.Username, err)
	}
}

// wantRecovery checks that the plugin prints a certificate at once, since the clock is right again.
// It is the one held before, if there was one.
func (n *timedNode) wantRecovery(held *x509.Certificate) harness.Result {
	n.t.Helper()
	n.set(0)
	r := n.run()
	n.wantAccepted(r)
	if r.Stderr != "" {
		n.t.Errorf("with the right clock it says: %s", r.Stderr)
	}
	if held != nil && !r.Leaf.Equal(held) {
		n.t.Error("the certificate was replaced")
	}
	return r
}

// content returns the file with the certificate.
func (n *timedNode) content() []byte {
	n.t.Helper()
	data, err := os.ReadFile(n.Certs().File(cache.CurrentFile))
	harness.Must(n.t, err)
	return data
}

// ordinaryCluster starts an API server with a certificate that is valid today alone.
func ordinaryCluster(t *testing.T) *testbed.ControlPlane {
	t.Helper()
	cluster, err := testbed.Start(t.Context(), testbed.Options{Etcd: shared.ControlPlane})
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, cluster.Stop()) })
	harness.Must(t, cluster.BindKubeadmBootstrap(t.Context()))
	return cluster
}

// A machine with a wrong clock takes the API server's certificate for one of another time. It files
// nothing, says why, loses no certificate that it has, and enrols once the clock is right.
func TestWrongClockDistrustsTheAPIServer(t *testing.T) {
	cluster := ordinaryCluster(t)
	for name, off := range clocks() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newTimedNode(t, cluster)
			n.attestor.RunUntilEnd(t)
			n.set(off)
			if n.now().Before(built) { // the clock is evidently wrong
				n.run().Want(t, clockIsWrong, "this machine's clock says "+n.now().UTC().Format("2006-"), "hint: set this machine's clock")
			} else {
				n.run().Want(t, apiIsUntrusted, "certificate has expired or is not yet valid", n.now().UTC().Format("2006-"))
			}
			n.wantFiled(0, 0)
			held := n.wantRecovery(nil).Leaf
			n.wantFiled(1, 1)

			n.set(off)
			before := n.content()
			if r := n.run(); off < 0 {
				// The API server goes by its own clock.
				n.wantAccepted(r)
				r.Want(t, 0, "is not valid before", "this machine's clock says", "hint: check this machine's clock")
			} else {
				r.Want(t, apiIsUntrusted, "certificate has expired")
			}
			if !bytes.Equal(n.content(), before) {
				t.Error("the certificate was touched")
			}
			n.wantRecovery(held)
			n.wantFiled(1, 1)
		})
	}
}

// A machine whose clock is behind enrols all the same if it trusts the API server: that goes by its
// own clock. One whose clock is ahead cannot tell what is valid. It installs nothing, and asks
// again after a pause. All of them keep what they hold.
func TestWrongClockThatTrustsTheAPIServer(t *testing.T) {
	for name, off := range clocks() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newTimedNode(t, shared.ControlPlane)
			n.attestor.RunUntilEnd(t)
			n.set(off)
			var held *x509.Certificate
			requests := 1
			if off < 0 {
				for range 2 {
					r := n.run()
					n.wantAccepted(r)
					r.Want(t, 0, "is not valid before", "this machine's clock says "+n.now().UTC().Format("2006-"), "hint: check this machine's clock")
					held = r.Leaf
				}
			} else {
				for range 3 { // the back-off
					n.run().Want(t, clockIsWrong, "it expired at", "this machine's clock says "+n.now().UTC().Format("2006-"))
				}
				n.wantFiled(1, 1)
				requests++
			}
			held = n.wantRecovery(held).Leaf
			n.wantFiled(requests, requests)

			before := n.content()
			n.set(off)
			for range 2 {
				if r := n.run(); off < 0 {
					n.wantAccepted(r)
				} else {
					r.Want(t, clockIsWrong, "it expired at")
				}
			}
			if !bytes.Equal(n.content(), before) {
				t.Error("the certificate was touched")
			}
			n.wantRecovery(held)
			if off > 0 {
				requests++ // to no avail
			}
			n.wantFiled(requests, requests)
		})
	}
}

// The clock is set while a worker waits for its first certificate. It takes the certificate, unless
// that has ended by the new clock.
func TestClockIsSetWhileAWorkerRuns(t *testing.T) {
	for name, off := range clocks() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newTimedNode(t, shared.ControlPlane)
			n.setBeforeIssue(off)
			n.attestor.RunUntilEnd(t)
			r := n.run()
			if off < 0 {
				r.Want(t, 0, "is not valid before")
				n.wantRecovery(r.Leaf)
				n.wantFiled(1, 1)
				return
			}
			r.Want(t, clockIsWrong, "it expired at")
			n.wantRecovery(nil)
			n.wantFiled(2, 2)
		})
	}
}

// The clock is set back while a worker waits for a renewal. It is not set back so far that it is
// evidently wrong: it may be the signer's clock that is wrong. The node keeps its certificate. When
// the clock is right again, it renews.
func TestClockIsSetBackInARenewal(t *testing.T) {
	n := newTimedNode(t, shared.ControlPlane)
	held := duePair(t, n.Name)
	lock, err := n.Certs().TryLock()
	harness.Must(t, err)
	harness.Must(t, lock.Install(held))
	lock.Unlock()
	before := n.content()
	n.set(0)
	n.setBeforeIssue(-time.Hour)
	n.attestor.RunUntilEnd(t)
	for range 2 {
		if r := n.run(); r.Code != 0 || !r.Leaf.Equal(held.Leaf) {
			t.Fatalf("the held certificate is not printed: exit code %d: %s", r.Code, r.Stderr)
		}
	}
	if !bytes.Equal(n.content(), before) {
		t.Error("the certificate was touched")
	}
	n.wantFiled(1, 1)
	n.set(0)
	n.run() // it prints the old one, and starts a worker
	if r := n.wantRecovery(nil); r.Leaf.Equal(held.Leaf) {
		t.Error("it has not renewed")
	}
	n.wantFiled(2, 2)
}

// setBeforeIssue has the clock moved when the first certificate is about to be issued. The runs
// from now on end by that clock.
func (n *timedNode) setBeforeIssue(off time.Duration) {
	var done atomic.Bool
	n.attestor.BeforeIssue = func(string) {
		if !done.Swap(true) {
			harness.Must(n.t, compile.SetClock(n.clock, off))
		}
	}
	n.off = off
}
