// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"bytes"
	"context"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// A node renews a due certificate with that certificate, so its bootstrap token may have expired.
func TestRenewalWithTheNodesOwnCertificate(t *testing.T) {
	n := renewingNode(t)
	old := n.installDue(t)
	if err := os.Remove(n.bootstrap); err != nil {
		t.Fatal(err)
	}
	mark, err := n.AuditMark()
	if err != nil {
		t.Fatal(err)
	}
	r := n.run(t)
	if r.Code != 0 {
		t.Fatalf("exit code %d: %s", r.Code, r.Stderr)
	}
	harness.Eventually(t, harness.Soon, "the new certificate is printed", func() bool {
		r = n.run(t)
		return !bytes.Equal(r.Leaf.Raw, old.Leaf.Raw)
	})
	if got := n.whoami(t, r); got != "system:node:"+n.name {
		t.Errorf("the API server takes it for %q", got)
	}
	requests := n.requests(t)
	if len(requests) != 1 || requests[0].Spec.Username != "system:node:"+n.name {
		t.Errorf("%d requests were filed, the first by %q", len(requests), requests[0].Spec.Username)
	}
	events, err := n.AuditSince(mark)
	if err != nil {
		t.Fatal(err)
	}
	if posts := len(ofPlugin(events, "create")); posts != 1 {
		t.Errorf("%d POSTs", posts)
	}
}

// The provider insecure uses its certificate until it expires, and then enrols again with the
// bootstrap credential.
func TestInsecureDoesNotRenew(t *testing.T) {
	n := newNode(t)
	old := n.installDue(t)
	if r := n.run(t); r.Code != 0 || !bytes.Equal(r.Leaf.Raw, old.Leaf.Raw) || len(n.requests(t)) != 0 {
		t.Fatalf("it renewed: %+v", r)
	}
	n.install(t, time.Now().Add(-time.Hour), time.Now().Add(-time.Second))
	r := n.run(t)
	if r.Code != 0 || n.whoami(t, r) != "system:node:"+n.name {
		t.Fatalf("exit code %d after the end: %s", r.Code, r.Stderr)
	}
	if !strings.Contains(r.Stderr, "provider insecure sends no evidence") {
		t.Errorf("the operator is not warned: %q", r.Stderr)
	}
	requests := n.requests(t)
	if len(requests) != 1 || !strings.HasPrefix(requests[0].Spec.Username, "system:bootstrap:") {
		t.Errorf("%d requests, the first by %q", len(requests), requests[0].Spec.Username)
	}
}

// No request waits for a renewal, and yet the new certificate is soon in use: client-go asks again
// after 30 s at most. A certificate with hours left makes it as late as it can be.
func TestNewCertificateIsSoonInUse(t *testing.T) {
	t.Parallel()
	n := renewingNode(t)
	n.signer = "example.com/by-hand" // another test stops kube-controller-manager
	old := n.installDue(t)
	if left := time.Until(old.Leaf.NotAfter); left < 5*time.Minute {
		t.Fatalf("%s are left: client-go would ask earlier", left)
	}
	client := exec.CommandContext(t.Context(), n.client, n.execKubeconfig(t, "client.authentication.k8s.io/v1"), "100ms", "1m")
	output, err := client.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := client.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = client.Wait() }()
	defer func() { _ = client.Process.Kill() }()
	var issued time.Time
	requests := 0
	for lines := bufio.NewScanner(output); lines.Scan(); requests++ {
		fields := strings.Fields(lines.Text())
		if !issued.IsZero() && fields[0] == "failed" && strings.HasSuffix(lines.Text(), net.ErrClosed.Error()) {
			continue // client-go closes its connections when it is given another certificate
		}
		if fields[0] != "ok" || len(fields) != 4 {
			t.Fatalf("request %d: %s", requests, lines.Text())
		}
		// later on, a list for each line would make the test fall behind the client
		if issued.IsZero() {
			if all := n.requests(t); len(all) == 1 {
				n.issue(t, all[0].Name, n.signBy(t, n.ClientCA(), all[0], -time.Minute, time.Hour))
				issued = time.Now()
			}
		}
		if fields[3] != "X509SHA256="+old.Fingerprint() {
			if issued.IsZero() {
				t.Fatal("it is not known when the certificate was issued")
			}
			took := time.Since(issued)
			t.Logf("in use %s after it was issued, after %d requests", took.Round(time.Millisecond), requests)
			if took > 35*time.Second {
				t.Errorf("in use %s after it was issued", took)
			}
			return
		}
	}
	t.Errorf("the new certificate was not in use after %d requests", requests)
}

// An unavailable signer does not affect the node. Each run prints the old certificate within 2 s,
// and no request through the exec transport fails. The signer issues for the same CSR when it is
// back.
func TestSignerIsAway(t *testing.T) {
	t.Parallel()
	const away = 60 * time.Second
	n := renewingNode(t)
	old := n.installDue(t)
	if err := n.StopControllerManager(); err != nil {
		t.Fatal(err)
	}
	running := false
	t.Cleanup(func() {
		if !running {
			_ = n.StartControllerManager(context.WithoutCancel(t.Context()))
		}
	})

	var output bytes.Buffer
	client := exec.CommandContext(t.Context(), n.client, n.execKubeconfig(t, "client.authentication.k8s.io/v1"), "1s", away.String())
	client.Stdout = &output
	if err := client.Start(); err != nil {
		t.Fatal(err)
	}
	slowest := time.Duration(0)
	// The test measures a whole minute.
	for end := time.Now().Add(away); time.Now().Before(end); time.Sleep(3 * time.Second) {
		r := n.run(t)
		slowest = max(slowest, r.Took)
		if r.Code != 0 || !bytes.Equal(r.Leaf.Raw, old.Leaf.Raw) {
			t.Fatalf("exit code %d, or another certificate: %s", r.Code, r.Stderr)
		}
		if r.Took > 2*time.Second+slack {
			t.Errorf("a run took %s", r.Took)
		}
		if in := time.Until(r.Credential.Status.ExpirationTimestamp.Time); in > 31*time.Second {
			t.Errorf("client-go is told to come back in %s only", in)
		}
	}
	if err := client.Wait(); err != nil {
		t.Fatal(err)
	}
	requests := 0
	for lines := bufio.NewScanner(&output); lines.Scan(); requests++ {
		if !strings.HasPrefix(lines.Text(), "ok ") {
			t.Errorf("request %d through the exec transport: %s", requests, lines.Text())
		}
	}
	if requests < 25 {
		t.Errorf("only %d requests were made", requests)
	}
	t.Logf("%d requests in %s, none lost; slowest run %s", requests, away, slowest.Round(time.Millisecond))

	pending := n.requests(t)
	if len(pending) != 1 || n.live(t) != 1 {
		t.Fatalf("%d requests were filed, %d are live", len(pending), n.live(t))
	}
	if err := n.StartControllerManager(t.Context()); err != nil {
		t.Fatal(err)
	}
	running = true
	back := time.Now()
	// One retry interval is 30 s.
	var r harness.Result
	harness.Eventually(t, 35*time.Second, "the new certificate is served", func() bool {
		r = n.run(t) // it waits for a second
		return r.Code == 0 && !bytes.Equal(r.Leaf.Raw, old.Leaf.Raw)
	})
	t.Logf("the new certificate was served %s after the signer came back", time.Since(back).Round(time.Millisecond))
	if after := n.requests(t); len(after) != 1 || after[0].Name != pending[0].Name {
		t.Errorf("%d requests now", len(after))
	}
}

// After a denied or failed request, the old certificate is still printed, and the next request
// waits.
func TestDeniedAndFailedRenewalsKeepTheOldCertificate(t *testing.T) {
	for _, outcome := range []string{"denied", "failed"} {
		t.Run(outcome, func(t *testing.T) {
			n := renewingNode(t)
			n.signer = "example.com/by-hand"
			old := n.installDue(t)
			n.run(t)
			harness.Eventually(t, harness.Soon, "a request is filed", func() bool { return n.live(t) == 1 })
			name := n.request(t).Name
			var err error
			if outcome == "denied" {
				err = n.Deny(t.Context(), name, "NotThisOne", "go \x1b[31maway")
			} else {
				err = n.Fail(t.Context(), name, "CannotSign", "broken")
			}
			if err != nil {
				t.Fatal(err)
			}
			harness.WorkerEnds(t, n.dir)
			r := n.run(t)
			if r.Code != 0 || !bytes.Equal(r.Leaf.Raw, old.Leaf.Raw) {
				t.Fatalf("exit code %d: %s", r.Code, r.Stderr)
			}
			if !strings.Contains(r.Stderr, name) || !strings.Contains(r.Stderr, outcome) || strings.Contains(r.Stderr, "\x1b") {
				t.Errorf("stderr: %q", r.Stderr)
			}
			state, err := n.dir.State()
			if err != nil || time.Until(state.NextAttempt) < 20*time.Second {
				t.Errorf("the next attempt is at %v, %v", state.NextAttempt, err)
			}
			if got := len(n.requests(t)); got != 1 {
				t.Errorf("%d requests", got)
			}
			if pending, err := n.dir.Pending(); pending != nil || err != nil {
				t.Errorf("the request is still pending: %v", err)
			}

			// remove the back-off
			renewed := make(chan harness.Result, 1)
			go func() {
				cmd := exec.CommandContext(t.Context(), n.plugin, append(n.flags(), "renew", "--timeout=1m")...)
				cmd.Env = append(os.Environ(), n.ask())
				renewed <- harness.Run(t, cmd)
			}()
			harness.Eventually(t, harness.Soon, "renew files a request", func() bool { return n.live(t) == 1 })
			for _, request := range n.requests(t) {
				if request.Name != name {
					n.issue(t, request.Name, n.sign(t, request, time.Hour))
				}
			}
			if r := <-renewed; r.Code != 0 || r.Stdout != "" || !strings.Contains(r.Stderr, "has a certificate, valid until ") {
				t.Errorf("renew: exit code %d: %s%s", r.Code, r.Stdout, r.Stderr)
			}
			if r := n.run(t); r.Code != 0 || bytes.Equal(r.Leaf.Raw, old.Leaf.Raw) {
				t.Errorf("after renew: exit code %d: %s", r.Code, r.Stderr)
			}
		})
	}
}

// A request that is deleted while a worker waits for it is filed again.
func TestDeletedRequestIsFiledAgain(t *testing.T) {
	n := newNode(t)
	n.signer = "example.com/by-hand"
	n.run(t, "--wait-timeout=500ms")
	first := n.request(t)
	n.remove(t, first.Name)
	harness.Eventually(t, harness.Soon, "another is filed", func() bool { return len(n.requests(t)) == 1 && n.requests(t)[0].Name != first.Name })
	if !bytes.Contains(n.read(t, cache.PendingFile), []byte(n.request(t).Name)) {
		t.Error("the new name was not written down")
	}
	// The same holds if the request is deleted while no worker runs.
	harness.KillWorker(t, n.dir)
	second := n.request(t)
	n.remove(t, second.Name)
	n.run(t, "--wait-timeout=500ms")
	harness.Eventually(t, harness.Soon, "a third is filed", func() bool { return n.live(t) == 1 })
}

// Certificates with intermediates are printed whole, leaf first.
func TestChainIsKept(t *testing.T) {
	n := newNode(t)
	n.signer = "example.com/by-hand"
	n.run(t, "--wait-timeout=500ms")
	request := n.request(t)
	chain := append(n.sign(t, request, time.Hour), n.ClientCA().CertPEM()...)
	n.issue(t, request.Name, chain)
	r := n.enrol(t)
	if got := r.Credential.Status.ClientCertificateData; got != string(chain) {
		t.Errorf("printed:\n%s\nissued:\n%s", got, chain)
	}
}
