// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// If memory is short, a worker is killed before the kubelet, with any score that it inherits.
func TestWorkerDiesFirst(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	file := fmt.Sprintf("/proc/%d/oom_score_adj", cmd.Process.Pid)
	dieFirst(file)
	if got, err := os.ReadFile(file); err != nil || strings.TrimSpace(string(got)) != "1000" {
		t.Errorf("%q, %v", got, err)
	}
	dieFirst("/proc/self/no-such-file")
}
