// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
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
	restore := raiseOOMScore(ownOOMScore)
	err := cmd.Start()
	restore()
	if err != nil {
		return process.ID{}, err
	}
	// if the worker has already ended, this ID matches no live process
	id := process.ID{PID: cmd.Process.Pid}
	if found, err := process.Of(id.PID); err == nil {
		id = found
	}
	// Reap the worker if it ends before this run.
	go func() { _ = cmd.Wait() }()
	return id, nil
}

// ownOOMScore has the OOM score of this process (proc_pid_oom_score_adj(5)). Children inherit it.
const ownOOMScore = "/proc/self/oom_score_adj"

// raiseOOMScore raises the score in a file to the highest, until restore is called. A worker that
// starts meanwhile has it from its first page of memory on: if the kubelet's unit has too little,
// the kernel kills the worker, and not the kubelet, which is larger and has the score that this
// run inherited. When a worker dies, nothing is lost. In this moment it may kill the run instead,
// and the kubelet calls again. It is a best effort. Without CAP_SYS_RESOURCE the run keeps the
// score, and it is about to end.
func raiseOOMScore(file string) (restore func()) {
	before, err := os.ReadFile(file)
	if err != nil || os.WriteFile(file, []byte("1000"), 0) != nil {
		return func() {}
	}
	return func() { _ = os.WriteFile(file, before, 0) } //nolint:gosec // G703: ownOOMScore
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
