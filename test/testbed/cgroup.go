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
// and a kernel whose memory controller is mounted where systemd mounts it.
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
	most := strconv.FormatInt(limit, 10)
	if g.v1 {
		// The second needs swap accounting: without it there may be swap beside the limit.
		return g, errors.Join(g.write("memory.limit_in_bytes", most), ignoreAbsent(g.write("memory.memsw.limit_in_bytes", most)))
	}
	return g, errors.Join(g.write("memory.max", most), ignoreAbsent(g.write("memory.swap.max", "0")))
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

// Remove removes the group, whose processes have ended.
func (g *MemoryGroup) Remove() error { return os.Remove(g.dir) }

func (g *MemoryGroup) write(name, value string) error {
	return os.WriteFile(filepath.Join(g.dir, name), []byte(value), 0)
}
