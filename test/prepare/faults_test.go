// SPDX-License-Identifier: Apache-2.0

package prepare

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// System calls of prepare fail, or it is killed at them, one after the other. The kubelet is never
// let start without its environment file, no file is ever half written, and the next prepare sets
// all right. strace counts calls by thread and Go moves between threads: this is a dense sample.
func TestPrepareWhileSystemCallsFail(t *testing.T) {
	if _, err := exec.LookPath("strace"); err != nil {
		t.Fatal("strace is needed: apt-get install strace")
	}
	for call, faults := range map[string][]string{
		"fsync":    {"error=EIO", "signal=SIGKILL"},
		"renameat": {"error=EROFS", "signal=SIGKILL"},
		"mkdirat":  {"error=ENOSPC", "signal=SIGKILL"},
		"openat":   {"error=EIO", "signal=SIGKILL"},
		"write":    {"error=ENOSPC", "signal=SIGKILL"},
		"read":     {"error=EIO"},
	} {
		for _, fault := range faults {
			t.Run(call+"/"+strings.ReplaceAll(fault, "=", "-"), func(t *testing.T) {
				hits := 0
				for when := 1; when <= 40; when++ {
					m := newMachine(t)
					m.write(filepath.Join(m.manifests, kubelet.ServerManifest), nil) // nobody signs
					r, met := m.faultyPrepare(call, fault, when)
					if !met {
						break
					}
					hits++
					m.noHalfFiles()
					if r.Code == 0 {
						m.wantPrepared(fmt.Sprintf("call %d has failed, exit code 0: %s", when, r.Stderr))
					}
					m.ageHalfFiles()
					m.prepare().Want(t, 0)
					m.wantPrepared(fmt.Sprintf("call %d had failed", when))
					if left, err := filepath.Glob(m.root + "/*/.*"); err != nil || len(left) > 0 {
						t.Errorf("call %d had failed: left behind: %s, %v", when, left, err)
					}
					if !m.copied() {
						t.Errorf("call %d had failed: there is no copy", when)
					}
				}
				if hits == 0 {
					t.Error("it makes no such call")
				}
				t.Logf("%d calls failed", hits)
			})
		}
	}
}

func (m *machine) wantPrepared(when string) {
	m.t.Helper()
	if env, err := os.ReadFile(m.envFile); err != nil || !bytes.Equal(env, kubelet.Environment(m.kubeconfig)) {
		m.t.Errorf("%s: environment %q, %v", when, env, err)
	}
}

// noHalfFiles checks that what is there is whole.
func (m *machine) noHalfFiles() {
	m.t.Helper()
	if k := kubelet.ReadKubeconfig(m.kubeconfig, ""); k.Kind != kubelet.Missing && k.Kind != kubelet.Ours {
		m.t.Errorf("kubelet.conf: %v", k.Problem)
	}
	if k := kubelet.ReadKubeconfig(m.certs.File(cache.BootstrapFile), ""); k.Kind != kubelet.Missing && k.Kind != kubelet.OtherUser {
		m.t.Errorf("copy: %v", k.Problem)
	}
	if env, err := os.ReadFile(m.envFile); err == nil && !bytes.Equal(env, kubelet.Environment(m.kubeconfig)) {
		m.t.Errorf("environment: %q", env)
	}
}

// ageHalfFiles makes what was left behind as old as it has to be for the next prepare not to take
// it for another's at work.
func (m *machine) ageHalfFiles() {
	m.t.Helper()
	left, err := filepath.Glob(m.root + "/*/.*")
	m.must(err)
	for _, path := range left {
		m.must(os.Chtimes(path, time.Time{}, time.Now().Add(-time.Hour)))
	}
}

// faultyPrepare runs prepare under strace and reports whether the fault was met.
func (m *machine) faultyPrepare(call, fault string, when int) (harness.Result, bool) {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(m.t.Context(), time.Minute)
	defer cancel()
	trace := filepath.Join(m.root, "trace")
	r := harness.Run(m.t, exec.CommandContext(ctx, "strace", "-f", "-qq", "-o", trace, "-e", "trace="+call, "-e", fmt.Sprintf("inject=%s:%s:when=%d", call, fault, when),
		shared.plugin, "prepare", "--config="+m.config, "--env-file="+m.envFile, "--manifests="+m.manifests))
	data, err := os.ReadFile(trace)
	m.must(err)
	return r, bytes.Contains(data, []byte("INJECTED")) || bytes.Contains(data, []byte("killed by SIGKILL"))
}
