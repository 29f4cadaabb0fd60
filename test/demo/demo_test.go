// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// asDemo has this program be the demo, in the place of its tests.
const asDemo = "KUBELET_AUTHENTICATOR_TEST_DEMO"

func TestMain(m *testing.M) {
	if os.Getenv(asDemo) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// The demo that is kept shows who got in and why, and what it says to try works. When it is
// interrupted, nothing is left of it.
func TestDemoIsKept(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	program, err := os.Executable()
	harness.Must(t, err)
	process, err := testbed.StartProcess(testbed.Command{
		Path: program, Args: []string{"-keep"}, Dir: module, Env: []string{"TMPDIR=" + dir, asDemo + "=1"}, LogFile: filepath.Join(dir, "log"),
	})
	harness.Must(t, err)
	t.Cleanup(func() { _ = process.Kill() })
	shown := func() string {
		content, err := os.ReadFile(filepath.Join(dir, "log"))
		harness.Must(t, err)
		return string(content)
	}
	harness.EventuallyOf(t, process, 2*time.Minute, "it says how it ends", func() bool { return strings.Contains(shown(), "\nCtrl-C here ends it all") })

	out := shown()
	for name, want := range map[string]string{
		"actors":   `(?m)^the impostors  +they have the same token`,
		"metrics":  `(?m)^Sign +Attested +1 +cluster\.x-k8s\.io/`,
		"node":     `(?m)^the node\n  has +the token, the TPM in the inventory\n  got in +yes\n  why +Attested: `,
		"no TPM":   `(?m)^impostor without a TPM\n.*\n  got in +no\n  why +the admission policy`,
		"before":   `(?m)^impostor with another TPM, before the node\n.*\n  got in +no\n  why +NodeNameMismatch: `,
		"after":    `(?m)^impostor with another TPM, after the node\n.*\n  got in +no\n  why +.*IdentityBound: `,
		"revoked":  `(?m)^=== the node renews its Lease again: a policy refuses the write\n(.*\n){1,6}.*revoked: the node may only attest`,
		"back":     `(?m)^=== kubelet-authenticator renew: .*\n(.*\n)?.*has a certificate, valid until .*\nlease.coordination.k8s.io/demo-node serverside-applied$`,
		"one only": `\d requests, 2 certificates\n`,
	} {
		if !regexp.MustCompile(want).MatchString(out) {
			t.Errorf("%s: not shown: %s", name, want)
		}
	}
	before, _, _ := strings.Cut(out, "\n=== everything is left running")
	for line := range strings.Lines(before) {
		if len(line) > width+1 {
			t.Errorf("a line of %d columns: %s", len(line)-1, line)
		}
	}
	_, try, _ := strings.Cut(out, "in another terminal, try:\n")
	export := regexp.MustCompile(`(?m)^    export .*$`).FindString(try)
	commands := regexp.MustCompile(`(?m)^    # .*\n    (\S.*)$`).FindAllStringSubmatch(try, -1)
	if export == "" || len(commands) < 8 {
		t.Fatalf("%q: %q", export, commands)
	}
	plugin := map[string]string{
		"kubectl attest status": `(?m)^` + node + ` .* Attested `, "kubectl attest pending": `(?m) NoEvidence `, "kubectl attest check": `(?m)^kubectl-attest: 1 check failed: controller$`,
	}
	for _, command := range commands {
		// An editor that changes nothing, and a log that is not followed for ever.
		line := strings.Replace(command[1], "tail -f ", "tail ", 1)
		cmd := exec.CommandContext(t.Context(), "bash", "-e", "-o", "pipefail", "-c", export+" EDITOR=true\n"+line)
		out, err := cmd.CombinedOutput()
		if err != nil || len(out) == 0 {
			t.Errorf("%s: %v: %s", line, err, out)
		}
		for begins, want := range plugin {
			if !strings.HasPrefix(line, begins) {
				continue
			}
			delete(plugin, begins)
			if !regexp.MustCompile(want).Match(out) {
				t.Errorf("%s: %s", line, out)
			}
		}
	}
	if len(plugin) > 0 {
		t.Errorf("not printed: %v", plugin)
	}

	harness.Must(t, process.Signal(syscall.SIGINT))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	select {
	case <-process.Done():
		harness.Must(t, process.Err())
	case <-ctx.Done():
		t.Fatal("it does not end")
	}
	left, err := filepath.Glob(filepath.Join(dir, "*"))
	harness.Must(t, err)
	if len(left) != 1 { // the log
		t.Errorf("left behind: %q", left)
	}
}
