// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/enrol"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// If a run or a worker is killed before any step, the next runs get a valid credential, from the
// one request that was filed.
func TestKilledBeforeEachStep(t *testing.T) {
	for _, kind := range []string{"enrolment", "renewal"} {
		for _, step := range authenticator.Steps() {
			switch step {
			case enrol.StepChallenge, enrol.StepProve:
				continue // those of a provider with a hello: TestTPMKilledBeforeEachStep
			case enrol.StepAnnouncement, enrol.StepReport:
				continue // TestKilledInAnAnnouncedRenewal
			}
			t.Run(kind+"/"+strings.ReplaceAll(string(step), " ", "-"), func(t *testing.T) {
				n := renewingNode(t)
				var old *cache.Pair
				if kind == "renewal" {
					old = n.installDue(t)
				}
				trap := filepath.Join(t.TempDir(), "kill")
				harness.WriteFile(t, trap, []byte(step))
				n.env = append(n.env, "TEST_KILL_FILE="+trap)

				n.survives(t, trap, old)
				if filed, live := len(n.requests(t)), n.live(t); filed != 1 || live != 0 {
					t.Errorf("%d requests were filed, %d are live", filed, live)
				}
				// The next process cleans up what the killed one left behind.
				n.run(t)
				harness.WorkerEnds(t, n.dir)
				if left, err := filepath.Glob(n.dir.File(".*")); err != nil || len(left) > 0 {
					t.Errorf("left behind: %v, %v", left, err)
				}
			})
		}
	}
}

// survives runs the plugin into the trap that kills one of its processes. Then it runs the plugin
// until it prints a credential that is not the old one, and that the API server accepts. While the
// old certificate is valid no run fails.
func (n *node) survives(t *testing.T, trap string, old *cache.Pair) {
	t.Helper()
	if killed := n.run(t); old != nil && killed.Code > 0 {
		t.Errorf("exit code %d while the old certificate is valid: %s", killed.Code, killed.Stderr)
	}
	harness.Eventually(t, harness.Soon, "the process is killed", func() bool { return !exists(trap) })
	var r harness.Result
	harness.Eventually(t, 30*time.Second, "a valid credential is printed", func() bool {
		r = n.run(t)
		if old != nil && r.Code != 0 {
			t.Fatalf("exit code %d while the old certificate is valid: %s", r.Code, r.Stderr)
		}
		return r.Code == 0 && (old == nil || !bytes.Equal(r.Leaf.Raw, old.Leaf.Raw))
	})
	if got := n.whoami(t, r); got != "system:node:"+n.name {
		t.Errorf("the API server takes it for %q", got)
	}
}

// If the API server's answer to a created request is lost, the plugin finds the request again, and
// files no other.
func TestLostAnswerToThePost(t *testing.T) {
	n := newNode(t)
	proxy := n.behindProxy(t)
	cut := proxy.CutAfterRequest(0)
	r := n.run(t)
	<-cut
	if r.Code == 0 {
		t.Log("the worker found its request within one run")
	}
	r = n.enrol(t)
	if got := n.whoami(t, r); got != "system:node:"+n.name {
		t.Errorf("the API server takes it for %q", got)
	}
	if got := len(n.requests(t)); got != 1 {
		t.Errorf("%d requests were filed", got)
	}
}

// A provider that hangs, and ignores its context, does not make a worker outlive its deadline, nor
// a run its wait.
func TestWorkerNeverOutlivesItsDeadline(t *testing.T) {
	n := renewingNode(t)
	n.provider = "hanging"
	n.env = append(n.env, "TEST_WORKER_DEADLINE=1s")
	r := n.run(t, "--wait-timeout=500ms")
	if r.Code != 13 {
		t.Errorf("exit code %d: %s", r.Code, r.Stderr)
	}
	if r.Took > 5*time.Second {
		t.Errorf("the run took %s", r.Took)
	}
	worker := n.dir.Worker()
	if !worker.Alive() {
		t.Fatal("no worker runs")
	}
	// The worker's deadline, and 5 s for its end.
	harness.Eventually(t, harness.Soon, "the worker ends", func() bool { return !worker.Alive() })
}

// A worker that waits for the signer ends at its deadline. The next worker continues with its
// request.
func TestWorkersTakeOverFromEachOther(t *testing.T) {
	n := renewingNode(t)
	n.signer = "example.com/by-hand"
	n.env = append(n.env, "TEST_WORKER_DEADLINE=2s")
	n.run(t, "--wait-timeout=100ms")
	n.request(t)
	seen := map[string]bool{}
	for range 4 {
		if r := n.run(t, "--wait-timeout=1500ms"); r.Code != 23 || !strings.Contains(r.Stderr, "hint: ") {
			t.Fatalf("exit code %d: %s", r.Code, r.Stderr)
		}
		seen[n.dir.Worker().String()] = true
	}
	if len(seen) < 2 {
		t.Errorf("only %d workers", len(seen))
	}
	request := n.requests(t)
	if len(request) != 1 {
		t.Fatalf("%d requests", len(request))
	}
	n.issue(t, request[0].Name, n.sign(t, request[0], time.Hour))
	if r := n.run(t); r.Code != 0 {
		t.Errorf("exit code %d: %s", r.Code, r.Stderr)
	}
}
