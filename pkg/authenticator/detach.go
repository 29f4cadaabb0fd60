// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"os"
	"os/exec"
	"strconv"
	"syscall"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
)

// self is this program, even after an upgrade has replaced its file.
const self = "/proc/self/exe"

// StartDetached starts this program again with args, in a session of its own. Its three descriptors
// are /dev/null, and it inherits no other: the kubelet waits until nobody holds the plugin's
// standard output. It inherits the environment, with env added.
func StartDetached(args []string, env ...string) (process.ID, error) {
	if err := closeOnExec(); err != nil {
		return process.ID{}, err
	}
	cmd := exec.Command(self, args...) //nolint:gosec // G204: this very program
	cmd.Env = append(os.Environ(), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return process.ID{}, err
	}
	id := process.ID{PID: cmd.Process.Pid} // nobody alive, should it have ended already
	if found, err := process.Of(id.PID); err == nil {
		id = found
	}
	// Reap it should it end before this run does.
	go func() { _ = cmd.Wait() }()
	return id, nil
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
