// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package command

import "golang.org/x/sys/unix"

// forbidDumps makes the process leave no core dump. Elsewhere than on Linux, operators run the
// offline commands only.
func forbidDumps() error { return unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}) }
