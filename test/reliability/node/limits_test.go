// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/reliability"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// search lowers a limit step by step. All tries succeed at most, and at enough.
type search struct {
	most, enough, least, step int64
	tries                     int
}

// group is a control group with a limit.
type group interface {
	Within(c testbed.Command) testbed.Command
	Remove() error
}

// Plugin and worker have less and less memory (MemoryMax of systemd). The stand-in for the kubelet
// is in the same group.
func TestMemoryLimit(t *testing.T) {
	t.Parallel()
	u := newUnit(t, built.plugin)
	limited := func(kilobytes int64) (group, func() string) {
		g, err := testbed.NewMemoryGroup(kilobytes << 10)
		harness.Must(t, err)
		return g, func() string {
			peak, err := g.Peak()
			harness.Must(t, err)
			killed, err := g.Killed()
			harness.Must(t, err)
			return fmt.Sprintf("peak %d KiB, %d killed", peak>>10, killed)
		}
	}
	u.enrolsBelow(t, "KiB of memory", reliability.Size(t, "limits",
		search{32768, 32768, 4096, 28672, 1},
		search{32768, 32768, 1024, 1024, 3}), limited)
	u.printsBelow(t, "KiB of memory", reliability.Size(t, "limits",
		search{16384, 16384, 1024, 15360, 1},
		search{16384, 16384, 512, 512, 10}), limited)
}

// Plugin and worker may have fewer and fewer processes and threads (TasksMax of systemd). The
// stand-in for the kubelet is one of them.
func TestTasksLimit(t *testing.T) {
	t.Parallel()
	u := newUnit(t, built.plugin)
	limited := func(tasks int64) (group, func() string) {
		g, err := testbed.NewTaskGroup()
		harness.Must(t, err)
		harness.Must(t, g.Limit(int(tasks)))
		return g, func() string {
			refused, err := g.Refused()
			harness.Must(t, err)
			return fmt.Sprintf("%d refused", refused)
		}
	}
	u.enrolsBelow(t, "tasks", reliability.Size(t, "limits",
		search{40, 40, 5, 35, 1},
		search{40, 40, 2, 1, 5}), limited)
	u.printsBelow(t, "tasks", reliability.Size(t, "limits",
		search{20, 20, 2, 18, 1},
		search{20, 20, 2, 1, 20}), limited)
}

// enrolsBelow has the plugin get a certificate below a limit that is lowered. A failure damages
// nothing, and without the limit the node gets its certificate, by the request that was filed.
func (u *unit) enrolsBelow(t *testing.T, what string, s search, limited func(int64) (group, func() string)) {
	t.Helper()
	u.lowers(t, "enrolment, "+what, s, limited, []string{"--wait-timeout=10s"}, func() (check func(harness.Result)) {
		u.RemoveState(t)
		hellosBefore, proofsBefore := harness.Requests(t, shared, u.Name)
		return func(r harness.Result) {
			u.isWhole(t)
			if r.Code != 0 {
				harness.Eventually(t, time.Minute, "the node gets its certificate without the limit", func() bool {
					return u.runOutside(t).Code == 0
				})
			}
			harness.WorkerEnds(t, u.Certs())
			u.isClean(t)
			hellos, proofs := harness.Requests(t, shared, u.Name)
			if h, p := len(hellos)-len(hellosBefore), len(proofs)-len(proofsBefore); h != 1 || p != 1 {
				t.Errorf("%d hellos and %d proofs for one certificate", h, p)
			}
		}
	})
}

// printsBelow has the plugin print a certificate that is due and valid, below a limit that is
// lowered. So it starts a worker, too, and does not wait for it.
func (u *unit) printsBelow(t *testing.T, what string, s search, limited func(int64) (group, func() string)) {
	t.Helper()
	u.lowers(t, "a valid certificate, "+what, s, limited, nil, func() (check func(harness.Result)) {
		u.RemoveState(t)
		old := u.due(t)
		return func(r harness.Result) {
			harness.WorkerEnds(t, u.Certs())
			u.isWhole(t)
			if current, err := u.Certs().Current(); err != nil || current.Leaf.NotAfter.Before(old.Leaf.NotAfter) {
				t.Errorf("the certificate is lost: %v", err)
			}
			if r.Code == 0 && !bytes.Equal(r.Leaf.Raw, old.Leaf.Raw) {
				t.Error("it printed another certificate")
			}
		}
	})
}

// lowers runs the plugin below a limit that is lowered, and logs the lowest one at which every try
// succeeds. A run that fails prints no certificate. prepare comes before each run, and returns what
// checks it.
func (u *unit) lowers(t *testing.T, what string, s search, limited func(int64) (group, func() string), args []string, prepare func() func(harness.Result)) {
	t.Helper()
	lowest, failed := int64(0), map[int]int{}
	for limit := s.most; limit >= s.least; limit -= s.step {
		good := 0
		for range s.tries {
			check := prepare()
			g, usage := limited(limit)
			r := u.runIn(t, g, args...)
			check(r)
			used := usage()
			harness.Must(t, g.Remove())
			if r.Code == 0 {
				good++
				continue
			}
			t.Logf("%s, limit %d: exit code %d after %s, %s: %.300q", what, limit, r.Code, round(r.Took), used, r.Stderr)
			failed[r.Code]++
			isHonest(t, r)
		}
		t.Logf("%s, limit %d: %d of %d succeed", what, limit, good, s.tries)
		switch {
		case good < s.tries && limit >= s.enough:
			t.Errorf("%s: %d is not enough", what, limit)
		case good == s.tries && (lowest == 0 || lowest == limit+s.step):
			lowest = limit
		}
	}
	t.Logf("%s: %d is the lowest limit at which all of %d succeed; failures by exit code: %v", what, lowest, s.tries, failed)
	if len(failed) == 0 {
		t.Errorf("%s: %d still succeeds, so no failure was seen", what, s.least)
	}
}

// runIn calls the plugin in another control group.
func (u *unit) runIn(t *testing.T, g group, args ...string) harness.Result {
	t.Helper()
	return u.runCommand(t, g.Within(u.command(args...)))
}

// isHonest checks that a run that failed has ended by an exit code of its own, by the Go runtime's,
// or by the kernel's signal. That signal may also end the shell that starts the plugin in its
// group.
func isHonest(t *testing.T, r harness.Result) {
	t.Helper()
	const byRuntime, killed, noProcess, shellKilled = 2, 128 + 9, 126, -1
	if r.Code != byRuntime && r.Code != killed && r.Code != noProcess && r.Code != shellKilled {
		isActionable(t, r)
	}
}

func round(d time.Duration) time.Duration { return d.Round(10 * time.Millisecond) }
