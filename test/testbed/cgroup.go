// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// MemoryGroup is a control group whose processes share a limit on memory, as the container of a pod
// does. The kernel kills a process of it where nothing can be freed any more.
type MemoryGroup struct {
	dir string
	// v1 says that its files are those of cgroup v1.
	v1 bool
}

// The folders of the memory controller: that of cgroup v1, and the one tree of cgroup v2.
const (
	cgroupV1 = "/sys/fs/cgroup/memory"
	cgroupV2 = "/sys/fs/cgroup"
)

// NewMemoryGroup makes a control group with a limit in bytes, and no swap beside it. It needs root,
// and the memory controller at the path where systemd mounts it.
func NewMemoryGroup(limit int64) (_ *MemoryGroup, err error) {
	g := &MemoryGroup{}
	root := cgroupV2
	controllers, err := os.ReadFile(filepath.Join(cgroupV2, "cgroup.controllers"))
	switch {
	case err == nil && !strings.Contains(" "+strings.TrimSpace(string(controllers))+" ", " memory "):
		return nil, fmt.Errorf("limit memory: the kernel gives %s no memory controller, but %q", cgroupV2, controllers)
	case err == nil:
		// It is there already under systemd. In a container the parent's processes may forbid it.
		if err := os.WriteFile(filepath.Join(cgroupV2, "cgroup.subtree_control"), []byte("+memory"), 0); err != nil {
			return nil, fmt.Errorf("limit memory: the memory controller cannot be passed on to a group below %s: %w", cgroupV2, err)
		}
	default:
		g.v1, root = true, cgroupV1
		if _, err := os.Stat(filepath.Join(root, "memory.limit_in_bytes")); err != nil {
			return nil, fmt.Errorf("limit memory: neither %s is cgroup v2, nor %s the memory controller of cgroup v1: %w", cgroupV2, cgroupV1, err)
		}
	}
	g.dir = filepath.Join(root, "testbed-"+rand.Text())
	if err := os.Mkdir(g.dir, 0o755); err != nil { //nolint:gosec // G301: as systemd does
		return nil, fmt.Errorf("limit memory: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, g.Remove())
		}
	}()
	if g.v1 {
		// The second needs swap accounting: without it there may be swap beside the limit.
		return g, errors.Join(g.Limit(limit), ignoreAbsent(g.write("memory.memsw.limit_in_bytes", strconv.FormatInt(limit, 10))))
	}
	return g, errors.Join(g.Limit(limit), ignoreAbsent(g.write("memory.swap.max", "0")))
}

// Limit lowers or raises the limit to so many bytes.
func (g *MemoryGroup) Limit(limit int64) error {
	name := "memory.max"
	if g.v1 {
		name = "memory.limit_in_bytes"
	}
	return g.write(name, strconv.FormatInt(limit, 10))
}

// Anonymous returns how many bytes of the group's memory can only be freed by its processes.
func (g *MemoryGroup) Anonymous() (int64, error) {
	name := "anon "
	if g.v1 {
		name = "rss "
	}
	content, err := os.ReadFile(filepath.Join(g.dir, "memory.stat"))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(content)) {
		if count, ok := strings.CutPrefix(strings.TrimSpace(line), name); ok {
			return strconv.ParseInt(count, 10, 64)
		}
	}
	return 0, fmt.Errorf("memory.stat has no line %s: %s", name, content)
}

func ignoreAbsent(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Within returns a command that runs in the group from its first instruction on.
func (g *MemoryGroup) Within(c Command) Command {
	c.Args = append([]string{"-c", `echo $$ >"$0"/cgroup.procs && exec "$@"`, g.dir, c.Path}, c.Args...)
	c.Path = "/bin/sh"
	return c
}

// Peak returns the most that the group has used, in bytes, with the page cache of what it has read.
func (g *MemoryGroup) Peak() (int64, error) {
	name := "memory.peak" // since Linux 5.19
	if g.v1 {
		name = "memory.max_usage_in_bytes"
	}
	content, err := os.ReadFile(filepath.Join(g.dir, name))
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(content)), 10, 64)
}

// Killed returns how many processes the kernel has killed for want of memory.
func (g *MemoryGroup) Killed() (int, error) {
	name := "memory.events"
	if g.v1 {
		name = "memory.oom_control"
	}
	content, err := os.ReadFile(filepath.Join(g.dir, name))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(content)) {
		if count, ok := strings.CutPrefix(strings.TrimSpace(line), "oom_kill "); ok {
			return strconv.Atoi(count)
		}
	}
	return 0, fmt.Errorf("%s has no line oom_kill: %s", name, content)
}

// Remove removes the group, whose processes have ended, or end now.
func (g *MemoryGroup) Remove() error { return removeCgroup(g.dir) }

func (g *MemoryGroup) write(name, value string) error {
	return os.WriteFile(filepath.Join(g.dir, name), []byte(value), 0)
}

// TaskGroup is a control group whose processes can be limited in number, frozen, and killed, all at
// once, as those of a unit of systemd. Threads count, as for TasksMax.
type TaskGroup struct {
	// pids and freezer are its folders of cgroup v1, and one and the same folder of cgroup v2.
	pids, freezer string
}

// NewTaskGroup makes a control group without a limit. It needs root, and a kernel whose pids and
// freezer controllers are mounted where systemd mounts them.
func NewTaskGroup() (*TaskGroup, error) {
	name := "testbed-" + rand.Text()
	g := &TaskGroup{filepath.Join(cgroupV2, name), filepath.Join(cgroupV2, name)}
	if _, err := os.Stat(filepath.Join(cgroupV2, "cgroup.controllers")); err == nil {
		if err := os.WriteFile(filepath.Join(cgroupV2, "cgroup.subtree_control"), []byte("+pids"), 0); err != nil {
			return nil, fmt.Errorf("limit processes: the pids controller cannot be passed on to a group below %s: %w", cgroupV2, err)
		}
	} else {
		g.pids, g.freezer = filepath.Join(cgroupV2, "pids", name), filepath.Join(cgroupV2, "freezer", name)
	}
	for _, dir := range g.dirs() {
		if err := os.Mkdir(dir, 0o755); err != nil { //nolint:gosec // G301: as systemd does
			return nil, errors.Join(fmt.Errorf("limit processes: %w", err), g.Remove())
		}
	}
	return g, nil
}

func (g *TaskGroup) dirs() []string {
	if g.pids == g.freezer {
		return []string{g.pids}
	}
	return []string{g.pids, g.freezer}
}

// Limit sets how many processes and threads the group may have.
func (g *TaskGroup) Limit(most int) error {
	return os.WriteFile(filepath.Join(g.pids, "pids.max"), []byte(strconv.Itoa(most)), 0)
}

// Refused returns how many processes and threads were not started for the limit.
func (g *TaskGroup) Refused() (int, error) {
	content, err := os.ReadFile(filepath.Join(g.pids, "pids.events"))
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimPrefix(strings.TrimSpace(string(content)), "max "))
}

// Within returns a command that runs in the group from its first instruction on.
func (g *TaskGroup) Within(c Command) Command {
	c.Args = append([]string{"-c", `echo $$ >"$0"/cgroup.procs && echo $$ >"$1"/cgroup.procs && shift && exec "$@"`, g.pids, g.freezer, c.Path}, c.Args...)
	c.Path = "/bin/sh"
	return c
}

// Add moves a process into the group, with all of its threads.
func (g *TaskGroup) Add(pid int) error {
	for _, dir := range g.dirs() {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0); err != nil {
			return err
		}
	}
	return nil
}

// Processes returns the processes of the group.
func (g *TaskGroup) Processes() (pids []int, err error) {
	content, err := os.ReadFile(filepath.Join(g.pids, "cgroup.procs"))
	if err != nil {
		return nil, err
	}
	for field := range strings.FieldsSeq(string(content)) {
		pid, err := strconv.Atoi(field)
		if err != nil {
			return nil, err
		}
		pids = append(pids, pid)
	}
	return pids, nil
}

// Kill kills all processes of the group, and returns when none is left. systemd does the same when
// a unit is stopped and does not end in time.
func (g *TaskGroup) Kill() error {
	for deadline := time.Now().Add(effectTimeout); ; time.Sleep(time.Millisecond) {
		pids, err := g.Processes()
		if err != nil || len(pids) == 0 {
			return err
		}
		for _, pid := range pids {
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
				return fmt.Errorf("kill process %d: %w", pid, err)
			}
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("processes %v survive", pids)
		}
	}
}

// Freeze stops all processes of the group, and returns when they have stopped.
func (g *TaskGroup) Freeze() error { return g.setFrozen("FROZEN", "1") }

// Thaw lets them go on.
func (g *TaskGroup) Thaw() error { return g.setFrozen("THAWED", "0") }

func (g *TaskGroup) setFrozen(v1, v2 string) error {
	file, value, state := "freezer.state", v1, func() (bool, error) {
		now, err := os.ReadFile(filepath.Join(g.freezer, "freezer.state"))
		return strings.TrimSpace(string(now)) == v1, err
	}
	if g.pids == g.freezer {
		file, value, state = "cgroup.freeze", v2, func() (bool, error) {
			now, err := os.ReadFile(filepath.Join(g.freezer, "cgroup.events"))
			return strings.Contains(string(now), "frozen "+v2), err
		}
	}
	if err := os.WriteFile(filepath.Join(g.freezer, file), []byte(value), 0); err != nil {
		return err
	}
	for deadline := time.Now().Add(effectTimeout); ; time.Sleep(time.Millisecond) {
		reached, err := state()
		if reached || err != nil {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s does not become %s", g.freezer, value)
		}
	}
}

// Remove kills the processes of the group, and removes it.
func (g *TaskGroup) Remove() error {
	if _, err := os.Stat(g.pids); err != nil {
		return ignoreAbsent(err)
	}
	if g.pids != g.freezer { // a process that is frozen there does not die
		if _, err := os.Stat(g.freezer); err != nil {
			return errors.Join(ignoreAbsent(err), os.Remove(g.pids))
		}
	}
	errs := []error{g.Thaw(), g.Kill()}
	for _, dir := range g.dirs() {
		errs = append(errs, removeCgroup(dir))
	}
	return errors.Join(errs...)
}
