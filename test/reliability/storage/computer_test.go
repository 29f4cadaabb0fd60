// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"bufio"
	"crypto/rand"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// boot is a computer between power-on and power-off. Its processes see no others, and have a boot
// ID, a /run and a disk of their own.
type boot struct {
	disk *disk
	init *exec.Cmd
	// runtime is its /run.
	runtime string
}

// bootScript makes the namespace that it runs in usable. It is given a file with a boot ID, and the
// folder for /run.
const bootScript = `mount --make-rprivate / && mount -t proc proc /proc && mount --bind "$0" /proc/sys/kernel/random/boot_id &&
mount -t tmpfs -o mode=0700 tmpfs "$1" && echo on && exec sleep infinity`

// powerOn boots a computer that has its files below a folder. The disk is mounted at "disk" there.
func powerOn(t testing.TB, home string, holds image) *boot {
	t.Helper()
	b := &boot{runtime: filepath.Join(home, "run")}
	mountpoint, bootID := filepath.Join(home, "disk"), filepath.Join(home, "boot_id")
	for _, dir := range []string{b.runtime, mountpoint} {
		harness.Must(t, os.MkdirAll(dir, 0o700))
	}
	harness.WriteFile(t, bootID, []byte(rand.Text()+"\n"))
	b.disk = mount(t, mountpoint, holds)
	b.init = exec.Command("sh", "-c", bootScript, bootID, b.runtime)
	b.init.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS}
	b.init.Stderr = os.Stderr
	output, err := b.init.StdoutPipe()
	harness.Must(t, err)
	harness.Must(t, b.init.Start())
	t.Cleanup(func() { _ = b.init.Process.Kill() })
	if line, err := bufio.NewReader(output).ReadString('\n'); line != "on\n" {
		t.Fatalf("the computer does not boot: %q, %v", line, err)
	}
	return b
}

// command returns a command that runs on the computer.
func (b *boot) command(env []string, name string, args ...string) *exec.Cmd {
	cmd := exec.Command("nsenter", append([]string{"--target=" + strconv.Itoa(b.init.Process.Pid), "--mount", "--pid", "--", name}, args...)...)
	cmd.Env = env
	return cmd
}

// busy reports whether a process is left running on the computer, such as the plugin's worker.
func (b *boot) busy(t testing.TB) bool {
	t.Helper()
	pid := b.init.Process.Pid
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	harness.Must(t, err)
	for _, child := range strings.Fields(string(children)) {
		// init reaps nobody. What has ended is a zombie.
		if status, err := os.ReadFile("/proc/" + child + "/status"); err == nil && !strings.Contains(string(status), "\nState:\tZ") {
			return true
		}
	}
	return false
}

// powerOff cuts the power, unless the disk has, and returns what may be left on the disk. When it
// returns no process of the computer is left. None of them has done anything since.
func (b *boot) powerOff(t testing.TB) []loss {
	t.Helper()
	b.disk.powerOff()
	left := b.disk.losses()
	harness.Must(t, b.init.Process.Kill()) // the kernel kills what else is in its PID namespace
	harness.Eventually(t, harness.Soon, "who uses the disk is killed", b.disk.usersAreKilled)
	b.disk.restore()
	_ = b.init.Wait() // it returns when all of them have ended
	b.disk.unmount(t)
	return left
}

// usersAreKilled reports whether each thread that waits for the disk has ended, or ends when it
// waits no longer.
func (d *disk) usersAreKilled() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	for thread := range d.callers {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", thread))
		if err == nil && !isKilled(string(status)) {
			return false
		}
	}
	return true
}

// isKilled reads /proc/PID/status: SIGKILL is pending.
func isKilled(status string) bool {
	for line := range strings.Lines(status) {
		if name, mask, _ := strings.Cut(strings.TrimSpace(line), ":\t"); name == "SigPnd" || name == "ShdPnd" {
			if bits, err := strconv.ParseUint(mask, 16, 64); err == nil && bits&(1<<(syscall.SIGKILL-1)) != 0 {
				return true
			}
		}
	}
	return false
}
