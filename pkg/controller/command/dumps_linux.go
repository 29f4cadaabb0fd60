// SPDX-License-Identifier: Apache-2.0

package command

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// forbidDumps makes the process leave no core dump, and keeps other processes of its user out of
// its memory.
func forbidDumps() error {
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("prctl PR_SET_DUMPABLE: %w", err)
	}
	return nil
}
