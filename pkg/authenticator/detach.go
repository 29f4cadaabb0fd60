// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"syscall"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
)

// self is the running program, even after an upgrade has replaced its file.
const self = "/proc/self/exe"

// StartDetached starts this program again with args, in a session of its own. Its three descriptors
// are /dev/null, and it inherits no others: the kubelet waits until no process holds the plugin's
// standard output. It inherits the environment, with env added.
func StartDetached(args []string, env ...string) (process.ID, error) {
	if err := closeOnExec(); err != nil {
		return process.ID{}, err
	}
	cmd := exec.Command(self, args...) //nolint:gosec // G204: this program itself
	cmd.Env = append(os.Environ(), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return process.ID{}, err
	}
	dieFirst(fmt.Sprintf("/proc/%d/oom_score_adj", cmd.Process.Pid))
	// if the worker has already ended, this ID matches no live process
	id := process.ID{PID: cmd.Process.Pid}
	if found, err := process.Of(id.PID); err == nil {
		id = found
	}
	// Reap the worker if it ends before this run.
	go func() { _ = cmd.Wait() }()
	return id, nil
}

// dieFirst raises the OOM score in a worker's file to the highest (proc_pid_oom_score_adj(5)). If
// the kubelet's unit has too little memory, the kernel then kills the worker, and not the kubelet
// or a run. The kubelet is larger, and its children inherit its score. When a worker dies, nothing
// is lost. It is a best effort.
func dieFirst(file string) {
	if f, err := os.OpenFile(file, os.O_WRONLY, 0); err == nil {
		_, _ = f.WriteString("1000")
		_ = f.Close()
	}
}

// closeOnExec marks all descriptors but the standard three. A worker that held a pipe of the caller
// would keep the caller waiting.
func closeOnExec() error {
	open, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	for _, entry := range open {
		if fd, err := strconv.Atoi(entry.Name()); err == nil && fd > 2 {
			syscall.CloseOnExec(fd)
		}
	}
	return nil
}
