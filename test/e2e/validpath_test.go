// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gofrs/flock"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// Whatever else is broken, a valid certificate is printed: at once, or after the renewal wait if
// its renewal is due.
func TestValidCertificateIsPrintedWhateverIsBroken(t *testing.T) {
	for name, wreck := range map[string]func(t *testing.T, n *node){
		"lock held for ever": func(t *testing.T, n *node) {
			lock := flock.New(n.dir.File(cache.LockFile))
			if ok, err := lock.TryLock(); !ok || err != nil {
				t.Fatal(ok, err)
			}
			t.Cleanup(func() { _ = lock.Close() })
		},
		"network black-holed": func(t *testing.T, n *node) {
			if err := n.behindProxy(t).SetMode(testbed.BlackHole); err != nil {
				t.Fatal(err)
			}
		},
		"connection refused": func(t *testing.T, n *node) {
			if err := n.behindProxy(t).SetMode(testbed.Refuse); err != nil {
				t.Fatal(err)
			}
		},
		"no TPM": func(_ *testing.T, n *node) {
			n.args = append(n.args, "--tpm-device=/nonexistent/tpm")
		},
		"no bootstrap kubeconfig": func(t *testing.T, n *node) {
			if err := os.Remove(n.bootstrap); err != nil {
				t.Fatal(err)
			}
		},
		"no runtime directory": func(_ *testing.T, n *node) {
			n.runtime = "/proc/nonexistent"
		},
		"configuration broken": func(t *testing.T, n *node) {
			config := filepath.Join(t.TempDir(), "config.yaml")
			harness.WriteFile(t, config, []byte("{nonsense"))
			n.args = append(n.args, "--config="+config)
		},
		"configuration broken, which alone names the directory": func(t *testing.T, n *node) {
			config := filepath.Join(t.TempDir(), "config.yaml")
			harness.WriteFile(t, config, []byte("provider: [\ncertDir: "+n.dir.Path()+"\nnodeName: "+n.name+"\n"))
			n.bare = true
			n.args = []string{"--config=" + config}
		},
		"host name of another": func(_ *testing.T, n *node) {
			n.bare = true
			n.args = []string{"--provider=" + n.provider, "--cert-dir=" + n.dir.Path(), "--runtime-dir=" + n.runtime, "--signer-name=example.com/nobody"}
		},
		"worker that is somebody else": func(t *testing.T, n *node) {
			harness.WriteFile(t, n.dir.File(cache.LockFile), []byte("1 1\nanother-boot\n"))
		},
		"state of a clock that was ahead": func(t *testing.T, n *node) {
			future := time.Now().Add(8 * time.Hour).UTC().Format(time.RFC3339)
			harness.WriteFile(t, n.dir.File(cache.StateFile), []byte(`{"version":1,"last":{"worker":{"pid":1,"start":1},"reason":"APIUnreachable","message":"x","started":"`+future+`","finished":"`+future+`"},"failures":1,"nextAttempt":"`+future+`"}`))
		},
		"note is a fifo": func(t *testing.T, n *node) {
			n.run(t)
			notes, err := filepath.Glob(filepath.Join(n.runtime, "*.json"))
			if err != nil || len(notes) != 1 {
				t.Fatal(notes, err)
			}
			if err := errors.Join(os.Remove(notes[0]), syscall.Mkfifo(notes[0], 0o600)); err != nil {
				t.Fatal(err)
			}
		},
		"provider unknown": func(_ *testing.T, n *node) { n.provider = "nonesuch" },
		"pending and state files damaged": func(t *testing.T, n *node) {
			harness.WriteFile(t, n.dir.File(cache.PendingFile), []byte("nonsense"))
			harness.WriteFile(t, n.dir.File(cache.StateFile), []byte("nonsense"))
		},
		"directory read-only": func(t *testing.T, n *node) { n.readOnly(t) },
	} {
		t.Run(strings.ReplaceAll(name, " ", "-"), func(t *testing.T) {
			t.Run("valid", func(t *testing.T) {
				n := renewingNode(t)
				pair := n.install(t, time.Now().Add(-time.Minute), time.Now().Add(time.Hour))
				wreck(t, n)
				r := n.run(t)
				if r.Code != 0 || !bytes.Equal(r.Leaf.Raw, pair.Leaf.Raw) {
					t.Fatalf("exit code %d: %s", r.Code, r.Stderr)
				}
				for range 2 { // a busy machine is so once; what waits does each time
					if r.Took > time.Second {
						r = n.run(t)
					}
				}
				if r.Took > time.Second {
					t.Errorf("it took %s", r.Took)
				}
			})
			t.Run("due", func(t *testing.T) {
				n := renewingNode(t)
				pair := n.installDue(t)
				wreck(t, n)
				r := n.run(t)
				if r.Code != 0 || len(n.requests(t)) == 0 && !bytes.Equal(r.Leaf.Raw, pair.Leaf.Raw) {
					t.Fatalf("exit code %d: %s", r.Code, r.Stderr)
				}
				if r.Took > 2*time.Second+slack {
					t.Errorf("it took %s", r.Took)
				}
			})
		})
	}
}

// readOnly mounts the certificate directory read-only, in place.
func (n *node) readOnly(t *testing.T) {
	t.Helper()
	needRoot(t)
	n.mount(t, "--bind", n.dir.Path())
	if out, err := exec.Command("mount", "-o", "remount,bind,ro", n.dir.Path()).CombinedOutput(); err != nil {
		t.Fatalf("mount: %v: %s", err, out)
	}
}

// mount mounts something on the certificate directory until the test ends.
func (n *node) mount(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.Command("mount", append(args, n.dir.Path())...).CombinedOutput(); err != nil {
		t.Fatalf("mount %v: %v: %s", args, err, out)
	}
	t.Cleanup(func() {
		harness.KillWorker(t, n.dir)
		harness.Eventually(t, harness.Soon, "no process of the worker uses the directory", func() bool {
			return exec.Command("umount", n.dir.Path()).Run() == nil
		})
	})
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to mount a file system")
	}
}

// The valid path, as the kernel sees it. The plugin opens the certificate and the state file. It
// takes no lock, opens no socket, and starts no process.
func TestValidPathTouchesNoLockAndNoNetwork(t *testing.T) {
	n := renewingNode(t)
	n.install(t, time.Now().Add(-time.Minute), time.Now().Add(time.Hour))
	n.run(t) // makes the note
	trace := filepath.Join(t.TempDir(), "trace")
	args := append([]string{"-f", "-o", trace, "-e", "trace=%network,%file,flock,fcntl,clone,clone3,fork,vfork,execve", n.plugin}, n.flags()...)
	cmd := exec.CommandContext(t.Context(), "strace", args...)
	cmd.Env = append(os.Environ(), n.ask())
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("strace: %v: %s", err, out)
	}
	data, err := os.ReadFile(trace)
	if err != nil {
		t.Fatal(err)
	}
	opened := map[string]bool{}
	for line := range strings.Lines(string(data)) {
		if regexp.MustCompile(`socket\(|connect\(|flock\(|fork\(|clone.*SIGCHLD`).MatchString(line) {
			t.Errorf("on the valid path: %s", line)
		}
		if m := regexp.MustCompile(`open(?:at)?\((?:AT_FDCWD, )?"(` + regexp.QuoteMeta(filepath.Dir(n.dir.Path())) + `[^"]*)"`).FindStringSubmatch(line); m != nil {
			opened[m[1]] = true
		}
	}
	if !opened[n.dir.File(cache.CurrentFile)] {
		t.Errorf("the certificate was not opened: the trace shows nothing: %v", opened)
	}
	for path := range opened {
		if path != n.dir.File(cache.CurrentFile) && path != n.dir.File(cache.StateFile) && path != n.runtime && filepath.Dir(path) != n.runtime {
			t.Errorf("%s was opened, too", path)
		}
	}
}

// Standard output has only the one document, even if a dependency prints something.
func TestNoiseDoesNotReachStandardOutput(t *testing.T) {
	n := renewingNode(t)
	n.provider = "noisy"
	n.install(t, time.Now().Add(-time.Minute), time.Now().Add(time.Hour))
	r := n.run(t) // checks standard output
	if !strings.Contains(r.Stderr, "noise\n") || !strings.Contains(r.Stderr, "raw noise\n") {
		t.Errorf("the provider made no noise: %q", r.Stderr)
	}
}
