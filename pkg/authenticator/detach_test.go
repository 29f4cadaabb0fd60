// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// If memory is short, a worker is killed before the kubelet, from its start on. The run gets back
// the score that it had.
func TestWorkerDiesFirst(t *testing.T) {
	scoreOf := func(file string) string {
		score, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(score))
	}
	before := scoreOf(ownOOMScore)
	restore := raiseOOMScore(ownOOMScore)
	cmd := exec.CommandContext(t.Context(), "sleep", "1000")
	err := cmd.Start()
	restore()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	if got := scoreOf(fmt.Sprintf("/proc/%d/oom_score_adj", cmd.Process.Pid)); got != "1000" {
		t.Errorf("the worker has the score %s", got)
	}
	if got := scoreOf(ownOOMScore); os.Geteuid() == 0 && got != before {
		t.Errorf("the run had the score %s, and has %s", before, got)
	}
	raiseOOMScore("/proc/self/no-such-file")()
}
