// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
)

// isolatedVariable is set for a program that Isolate has started.
const isolatedVariable = "KUBELET_AUTHENTICATOR_TEST_ISOLATED"

// Isolated reports whether this program was started by Isolate.
func Isolated() bool { return os.Getenv(isolatedVariable) != "" }

// Isolate runs this program once more, with the same arguments, in network, mount and PID
// namespaces of its own, and returns its exit code. It needs root. All processes and mounts in
// there end with the program. It is the first process of its PID namespace, and is killed when this
// one dies. Use the network before calling Isolate.
//
// In there, call EnterIsolation first.
func Isolate() (code int, err error) {
	raiseInotify()
	// Pdeathsig watches the thread that forked, not the process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...) //nolint:gosec // G204: this very program
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), isolatedVariable+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID,
		Pdeathsig:  syscall.SIGKILL,
	}
	err = cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Exited() {
		return exit.ExitCode(), nil
	}
	if err != nil {
		return 0, fmt.Errorf("run in namespaces of its own: %w", err)
	}
	return 0, nil
}

const (
	inotifyFile = "/proc/sys/fs/inotify/max_user_instances"
	// inotifyInstances suffices for a dozen machines with systemd and kubelets. The kernel's
	// default for all of root's processes is 128, and a kubelet without an instance ends.
	inotifyInstances = 1024
)

// raiseInotify lets more files be watched at once, until the next boot: no namespace has this for
// itself. This is the only change outside of the namespaces. It is not undone, since other tests
// may be running.
func raiseInotify() {
	content, err := os.ReadFile(inotifyFile)
	if err != nil {
		return
	}
	if limit, err := strconv.Atoi(strings.TrimSpace(string(content))); err != nil || limit >= inotifyInstances {
		return
	}
	if err := os.WriteFile(inotifyFile, []byte(strconv.Itoa(inotifyInstances)), 0); err != nil {
		fmt.Fprintf(os.Stderr, "testbed: %s stays at %s, which may be too few for kubelets: %v\n", inotifyFile, strings.TrimSpace(string(content)), err)
		return
	}
	fmt.Fprintf(os.Stderr, "testbed: raised fs.inotify.max_user_instances to %d until the next boot\n", inotifyInstances)
}

// EnterIsolation makes the namespaces usable: loopback, /proc, and what a kubelet would change of
// the whole machine.
func EnterIsolation() error {
	// Without this, mounts would reach the machine's own mount namespace.
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := syscall.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	// kubelet and systemd-nspawn make folders there
	for _, dir := range []string{"/var/log", "/run"} {
		if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "mode=0755"); err != nil {
			return fmt.Errorf("mount %s: %w", dir, err)
		}
	}
	if err := shieldSysctls(); err != nil {
		return err
	}
	return ip("link", "set", "lo", "up")
}

// kubeletSysctls are what the kubelet wants (setupKernelTunables in pkg/kubelet/cm).
var kubeletSysctls = map[string]string{
	"vm/overcommit_memory":     "1",
	"vm/panic_on_oom":          "0",
	"kernel/panic":             "10",
	"kernel/panic_on_oops":     "1",
	"kernel/keys/root_maxkeys": "1000000", "kernel/keys/root_maxbytes": "25000000",
}

// shieldSysctls lets the kubelet find what it wants, in files of our own, so that it sets nothing:
// these are the whole machine's.
func shieldSysctls() error {
	dir, err := os.MkdirTemp("", "sysctl-")
	if err != nil {
		return fmt.Errorf("shield sysctls: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }() // a file that is mounted elsewhere lives on
	for name, value := range kubeletSysctls {
		file := filepath.Join(dir, strings.ReplaceAll(name, "/", "."))
		if err := os.WriteFile(file, []byte(value+"\n"), 0o600); err != nil {
			return fmt.Errorf("shield sysctl %s: %w", name, err)
		}
		if err := syscall.Mount(file, "/proc/sys/"+name, "", syscall.MS_BIND, ""); err != nil {
			return fmt.Errorf("shield sysctl %s: %w", name, err)
		}
	}
	return nil
}

// ip runs ip(8).
func ip(args ...string) error {
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil { //nolint:gosec // G204: the arguments are this package's own
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}
