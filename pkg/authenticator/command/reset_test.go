// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// reset removes nothing without a confirmation, and nothing while a kubelet runs with the
// kubeconfig.
func TestResetIsConfirmed(t *testing.T) {
	kubeconfig := func(n node) string { return filepath.Join(n.root, "kubelet.conf") }
	for name, c := range map[string]struct {
		args    []string
		kubelet string // file that a running kubelet's --kubeconfig names
		code    int
		says    string
		removed bool
	}{
		"no terminal":                      {nil, "", 44, "hint: --yes", false},
		"yes":                              {[]string{"--yes"}, "", 0, "removed ", true},
		"dry run":                          {[]string{"--dry-run"}, "", 0, "to be removed: ", false},
		"dry run is stronger than yes":     {[]string{"--dry-run", "--yes", "--force"}, "", 0, "to be removed: ", false},
		"a kubelet runs":                   {[]string{"--yes"}, "kubelet.conf", 44, "hint: systemctl stop kubelet", false},
		"a kubelet runs, forced":           {[]string{"--yes", "--force"}, "kubelet.conf", 0, "removed ", true},
		"forced is not confirmed":          {[]string{"--force"}, "kubelet.conf", 44, "hint: --yes", false},
		"another kubelet runs":             {[]string{"--yes"}, "other.conf", 0, "removed ", true},
		"a dry run while the kubelet runs": {[]string{"--dry-run"}, "kubelet.conf", 0, "a kubelet runs with ", false},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			enrolled(t, n.certs)
			if c.kubelet != "" {
				playKubelet(t, filepath.Join(n.root, c.kubelet))
			}
			before := tree(t, n.root)
			o := call(t, "", append(n.with("--kubelet-kubeconfig="+kubeconfig(n), "reset", "--env-file="+filepath.Join(n.root, "kubelet.env")), c.args...)...)
			if o.code != c.code || o.stdout != "" || !strings.Contains(o.stderr, c.says) {
				t.Errorf("%+v", o)
			}
			if _, err := os.Stat(filepath.Join(n.certs, cache.CurrentFile)); (err != nil) != c.removed {
				t.Errorf("removed: %v", err)
			}
			if after := tree(t, n.root); !c.removed && after != before {
				t.Errorf("it changed\n%s\nto\n%s", before, after)
			}
		})
	}
}

// On a terminal it asks, and only "yes" is a yes.
func TestResetAsks(t *testing.T) {
	for answer, code := range map[string]int{"yes\n": 0, "y\n": reason.NotConfirmed.Code(), "\n": reason.NotConfirmed.Code()} {
		n := newNode(t)
		enrolled(t, n.certs)
		master, terminal := openTerminal(t)
		if _, err := master.WriteString(answer); err != nil {
			t.Fatal(err)
		}
		var stderr bytes.Buffer
		got := testProgram().Run(t.Context(), Process{
			Args: n.with("reset", "--env-file="+filepath.Join(n.root, "kubelet.env")), Stdin: terminal, Stdout: &stderr, Stderr: &stderr, Getenv: func(string) string { return "" },
		})
		if got != code || !strings.Contains(stderr.String(), "to be removed: "+filepath.Join(n.certs, cache.CurrentFile)) || !strings.Contains(stderr.String(), "Type yes: ") {
			t.Errorf("%q: %d: %s", answer, got, stderr.String())
		}
	}
}

// playKubelet runs a process that looks like a kubelet with a kubeconfig.
func playKubelet(t *testing.T, kubeconfig string) {
	t.Helper()
	// the builtin read waits for the end of standard input, without another process
	kubelet := exec.CommandContext(t.Context(), "bash", "-c", "read x", "--kubeconfig="+kubeconfig)
	kubelet.Args[0] = "kubelet"
	stdin, err := kubelet.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := kubelet.Start(); err != nil {
		t.Fatal(fmt.Errorf("play a kubelet: %w", err))
	}
	t.Cleanup(func() {
		_ = stdin.Close()
		_ = kubelet.Wait() // "read" fails at the end of its input
	})
}
