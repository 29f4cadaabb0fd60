// SPDX-License-Identifier: Apache-2.0

// Package process identifies processes even if a pid is reused, by /proc/<pid>/stat
// (proc_pid_stat(5)).
package process

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ID identifies one process of this boot. A pid alone is reused; a pid with its start time is not.
// The zero ID is no process.
type ID struct {
	PID int `json:"pid"`
	// Start is when the process started, in clock ticks since boot.
	Start uint64 `json:"start"`
}

// Of returns the identity of the live process pid. It fails if there is none. A zombie counts as
// none.
func Of(pid int) (ID, error) {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return ID{}, fmt.Errorf("process %d: %w", pid, err)
	}
	// The second field, the command in parentheses, may hold anything: count from the last
	// parenthesis.
	end := bytes.LastIndexByte(data, ')')
	fields := strings.Fields(string(data[end+1:]))
	const state, startTime = 0, 19 // fields 3 and 22
	if end < 0 || len(fields) <= startTime {
		return ID{}, fmt.Errorf("process %d: cannot read its stat", pid)
	}
	if fields[state] == "Z" || fields[state] == "X" {
		return ID{}, fmt.Errorf("process %d: %w", pid, os.ErrProcessDone)
	}
	start, err := strconv.ParseUint(fields[startTime], 10, 64)
	if err != nil {
		return ID{}, fmt.Errorf("process %d: start time: %w", pid, err)
	}
	return ID{PID: pid, Start: start}, nil
}

// BootID identifies this boot: process IDs of another boot mean nothing. It is "" if the kernel
// does not report it.
func BootID() string {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

// ticksPerSecond is USER_HZ, which is 100 on all of Go's Linux platforms.
const ticksPerSecond = 100

// Age returns the time since the process started, by a clock that cannot be set. It is 0 if the
// kernel does not report it. CLOCK_BOOTTIME is the clock of Start, also in a time namespace.
// /proc/uptime may differ: in a container, lxcfs shows the container's uptime there.
func (id ID) Age() time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		return 0
	}
	return max(time.Duration(now.Nano())-time.Duration(id.Start)*(time.Second/ticksPerSecond), 0) //nolint:gosec // G115: centuries fit
}

// Alive reports whether this very process still runs.
func (id ID) Alive() bool {
	if id.PID <= 0 {
		return false
	}
	now, err := Of(id.PID)
	return err == nil && now == id
}

// String returns "pid start", the form that Parse reads.
func (id ID) String() string { return fmt.Sprintf("%d %d", id.PID, id.Start) }

// Parse reads what String wrote. Anything else gives the zero ID.
func Parse(s string) ID {
	pid, start, ok := strings.Cut(strings.TrimSuffix(s, "\n"), " ")
	if !ok {
		return ID{}
	}
	p, err1 := strconv.Atoi(pid)
	t, err2 := strconv.ParseUint(start, 10, 64)
	if err1 != nil || err2 != nil || p <= 0 {
		return ID{}
	}
	return ID{PID: p, Start: t}
}
