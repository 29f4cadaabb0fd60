// SPDX-License-Identifier: Apache-2.0

package node

import (
	"os"
	"slices"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// largeStandIn stands in for a kubelet that uses 32 MiB and more, which is more than a worker. It
// makes the file $0 before it calls the plugin, and again after that, and waits until the file is
// gone.
const largeStandIn = `memory=$(head -c 33554432 /dev/zero | tr '\0' k)
wait_here() { : >"$0"; while [ -e "$0" ]; do sleep 0.01; done; }
wait_here
"$@"
code=$?
wait_here
exit $code`

// The kubelet's unit has too little memory left for a worker. The kernel kills the worker, and not
// the kubelet, which is larger. A valid certificate is printed, and with more memory the node gets
// the next one. On a busy machine the kernel may find the run in the moment in which its worker
// starts, and kill it, too: then the kubelet calls again.
func TestWorkerIsKilledBeforeTheKubelet(t *testing.T) {
	t.Parallel()
	u := newUnit(t, built.plugin)
	old := u.due(t)
	g, err := testbed.NewMemoryGroup(1 << 30)
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, g.Remove()) })
	file := u.Bootstrap + ".waits"
	ended := make(chan harness.Result, 1)
	kubelet := testbed.Command{Path: "/bin/sh", Args: slices.Concat([]string{"-c", largeStandIn, file, u.Plugin}, u.Flags())}
	go func() { ended <- u.runCommand(t, g.Within(kubelet)) }()
	waits := func() bool {
		_, err := os.Stat(file)
		return err == nil || len(ended) > 0
	}
	harness.Eventually(t, time.Minute, "the stand-in uses its memory", waits)
	used, err := g.Anonymous()
	harness.Must(t, err)
	const left = 7 << 19 // enough for a run, and too little for a worker
	harness.Must(t, g.Limit(used+left))
	harness.Must(t, os.Remove(file))
	harness.Eventually(t, time.Minute, "the plugin has ended", waits)
	harness.WorkerEnds(t, u.Certs())
	_ = os.Remove(file) // it is there unless the stand-in was killed
	r := <-ended
	killed, err := g.Killed()
	harness.Must(t, err)
	t.Logf("%d KiB in use, %d KiB left: exit code %d, %d processes killed", used>>10, left>>10, r.Code, killed)
	const runKilled = 128 + 9 // the stand-in for the kubelet says so, and has outlived it
	if r.Code != 0 && r.Code != runKilled {
		t.Errorf("exit code %d: %s", r.Code, r.Stderr)
	}
	if killed == 0 {
		t.Error("nothing was killed: there was enough memory")
	}
	(&call{unit: u, old: old}).recovers(t)
}
