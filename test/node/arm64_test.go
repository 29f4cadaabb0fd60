// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"debug/elf"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// emulated starts a program for arm64. binfmt_misc belongs to the user namespace that is made here,
// so the machine's own is left alone. Within it the plugin starts itself as a worker, too.
const emulated = `#!/bin/sh
exec unshare --user --map-root-user --mount sh -c '
mount -t binfmt_misc none /proc/sys/fs/binfmt_misc || exit 125
printf "%s" ":arm64:M::\x7f\x45\x4c\x46\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00:\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:QEMU:F" >/proc/sys/fs/binfmt_misc/register || exit 125
exec "$@"' sh PROGRAM "$@"
`

func buildARM64(ctx context.Context, dir string) error {
	folder := programsIn(dir).arm64
	return errors.Join(
		os.MkdirAll(folder, 0o755),
		compile.ProgramFor(ctx, "arm64", module, filepath.Join(folder, "plugin"), "./cmd/kubelet-authenticator"),
		compile.ProgramFor(ctx, "arm64", module, filepath.Join(folder, "controller"), "./cmd/node-attestation-controller"),
	)
}

// forARM64 returns the path of what runs a program of buildARM64 here.
func forARM64(t *testing.T, name string) string {
	t.Helper()
	program := filepath.Join(built.arm64, name)
	file, err := elf.Open(program)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	if file.Machine != elf.EM_AARCH64 {
		t.Fatalf("%s is for %s", program, file.Machine)
	}
	if runtime.GOARCH == "arm64" {
		return program
	}
	qemu, err := exec.LookPath("qemu-aarch64-static")
	if err != nil {
		t.Fatal(err)
	}
	script := filepath.Join(t.TempDir(), name)
	harness.WriteFile(t, script, []byte(strings.NewReplacer("QEMU", qemu, "PROGRAM", program).Replace(emulated)))
	if err := os.Chmod(script, 0o700); err != nil {
		t.Fatal(err)
	}
	return script
}

// Plugin and controller for arm64 have a machine become a node, with a software TPM and a real
// kubelet. Elsewhere than on arm64 they run in an emulator of the processor.
func TestARM64(t *testing.T) {
	if os.Getenv(arm64Variable) == "" {
		t.Skipf("SKIPPED: make test-arm64 runs it (%s)", arm64Variable)
	}
	t.Parallel()
	plugin, controller := forARM64(t, "plugin"), forARM64(t, "controller")
	for _, program := range []string{plugin, controller} {
		out, err := exec.CommandContext(t.Context(), program, "version").CombinedOutput()
		if err != nil {
			t.Fatalf("version: %v: %s", err, out)
		}
		t.Logf("%s", out)
	}
	c := newClusterWith(t, testbed.Options{}, controller, nil)
	m := c.newTokenMachine(t, "arm64")
	m.program = plugin
	c.admit(t, m.identity(t))
	dryRun := exec.CommandContext(t.Context(), plugin, append([]string{"--dry-run", "--output=json"}, m.args...)...)
	dryRun.Env = harness.ExecEnv(c.ControlPlane)
	if r := harness.Run(t, dryRun); r.Code != 0 || !json.Valid([]byte(r.Stdout)) {
		t.Errorf("--dry-run: exit code %d: %s%s", r.Code, r.Stdout, r.Stderr)
	}
	began := time.Now()
	m.startKubelet(t, "")
	harness.Eventually(t, 2*time.Minute, "the node is ready", func() bool { return m.ready(t.Context()) == "" })
	t.Logf("ready after %s", time.Since(began).Round(10*time.Millisecond))
	if hellos, proofs := m.requests(t); len(hellos) != 1 || len(proofs) != 1 {
		t.Errorf("%d hellos and %d proofs", len(hellos), len(proofs))
	}
	if record := m.record(t); record.Spec.NodeName != m.name || len(record.Status.Certificates) != 1 {
		t.Errorf("%+v", record)
	}
}
