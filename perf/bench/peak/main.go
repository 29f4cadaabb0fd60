// SPDX-License-Identifier: Apache-2.0

// peak runs a command and prints its peak memory in KiB. It is small, as the kernel counts in a
// child what its parent used before the child's exec.
package main

import (
	"os"
	"os/exec"
	"strconv"
	"syscall"
)

func main() {
	cmd := exec.Command(os.Args[1], os.Args[2:]...) //nolint:gosec // G204: its purpose
	if err := cmd.Run(); err != nil {
		os.Exit(1)
	}
	usage, ok := cmd.ProcessState.SysUsage().(*syscall.Rusage)
	if !ok {
		os.Exit(1)
	}
	_, _ = os.Stdout.WriteString(strconv.FormatInt(usage.Maxrss, 10))
}
