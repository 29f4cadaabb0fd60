// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// System calls of the worker fail, or the worker is killed at them, one after the other. What was
// valid stays, and the next runs get the certificate. strace counts calls by thread and Go moves
// between threads, so this is a dense sample. TestKilledBeforeEachStep covers each step for
// certain.
func TestSystemCallsFail(t *testing.T) {
	if _, err := exec.LookPath("strace"); err != nil {
		t.Fatal("strace is needed: apt-get install strace")
	}
	for call, faults := range map[string][]string{
		"fsync":    {"error=EIO", "signal=SIGKILL"},
		"renameat": {"error=EROFS", "signal=SIGKILL"},
		"unlinkat": {"error=EIO", "signal=SIGKILL"},
		"openat":   {"error=ENOSPC", "signal=SIGKILL"},
		"write":    {"error=ENOSPC", "signal=SIGKILL"},
		"flock":    {"error=ENOLCK", "signal=SIGKILL"},
	} {
		for _, fault := range faults {
			t.Run(call+"/"+strings.ReplaceAll(fault, "=", "-"), func(t *testing.T) {
				t.Parallel()
				hits := 0
				for when := 1; when <= 60; when++ {
					n := renewingNode(t)
					n.name = fmt.Sprintf("%s-%d", strings.ReplaceAll(n.name, "=", "-"), when)
					old := n.installDue(t)
					if !n.faultyWorker(t, call, fault, when) {
						break // there are not that many calls
					}
					hits++
					r := n.run(t)
					if r.Code != 0 || r.Leaf.NotAfter.Before(old.Leaf.NotAfter) {
						t.Fatalf("%s %s at call %d: exit code %d: %s", call, fault, when, r.Code, r.Stderr)
					}
					harness.Eventually(t, 30*time.Second, "the new certificate is printed", func() bool {
						r = n.run(t)
						return r.Code == 0 && !bytes.Equal(r.Leaf.Raw, old.Leaf.Raw)
					})
					if live := n.live(t); live != 0 {
						t.Errorf("%s %s at call %d: %d live requests", call, fault, when, live)
					}
				}
				if hits == 0 {
					t.Error("the worker makes no such call")
				}
				t.Logf("%d calls failed", hits)
			})
		}
	}
}

// faultyWorker runs one worker under strace and reports whether the fault was met.
func (n *node) faultyWorker(t *testing.T, call, fault string, when int) bool {
	t.Helper()
	trace := n.bootstrap + ".trace"
	args := []string{"-f", "-qq", "-o", trace, "-e", "trace=" + call, "-e", fmt.Sprintf("inject=%s:%s:when=%d", call, fault, when)}
	args = append(append(args, n.plugin, "worker"), n.flags()...)
	cmd := exec.CommandContext(t.Context(), "strace", args...)
	cmd.Env = append(os.Environ(), n.ask())
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("strace: %v: %s", err, out)
	}
	data, err := os.ReadFile(trace)
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Contains(data, []byte("INJECTED")) || bytes.Contains(data, []byte("killed by SIGKILL"))
}
