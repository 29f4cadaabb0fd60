// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Names of processes, as far as the kernel keeps them: 15 bytes.
const (
	etcdProcess      = "etcd"
	apiServerProcess = "kube-apiserver"
	managerProcess   = "kube-controller"
	ourProcess       = "node-attestatio"
	// clients is this program, which is all machines and nodes.
	clients = "clients"
)

// usage is the processor time that processes have used, by name.
type usage map[string]time.Duration

// readUsage adds up this program's children that live, by name. Nobody may come or go between two
// readings that are compared.
func readUsage() (usage, error) {
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return nil, err
	}
	used, self := usage{}, os.Getpid()
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil { // it has ended since
			continue
		}
		p, err := parseStat(string(content))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		switch self {
		case p.pid:
			used[clients] += p.used
		case p.parent:
			used[p.name] += p.used
		}
	}
	return used, nil
}

type processStat struct {
	name        string
	pid, parent int
	used        time.Duration
}

// tick is what the kernel counts in here, on all architectures that Go runs on.
const tick = time.Second / 100

// parseStat reads a line of proc_pid_stat(5). The name is in parentheses, and may have some in it.
func parseStat(line string) (p processStat, err error) {
	before, rest, ok := strings.Cut(line, " (")
	end := strings.LastIndex(rest, ") ")
	if !ok || end < 0 {
		return p, fmt.Errorf("%q has no name", line)
	}
	p.name = rest[:end]
	fields := strings.Fields(rest[end+2:]) // from state, the third, on
	const parent, user, system = 4 - 3, 14 - 3, 15 - 3
	if len(fields) <= system {
		return p, fmt.Errorf("%q is too short", line)
	}
	var ticks int64
	for _, f := range []struct {
		text string
		add  func(int64)
	}{
		{before, func(n int64) { p.pid = int(n) }},
		{fields[parent], func(n int64) { p.parent = int(n) }},
		{fields[user], func(n int64) { ticks += n }},
		{fields[system], func(n int64) { ticks += n }},
	} {
		n, err := strconv.ParseInt(f.text, 10, 64)
		if err != nil {
			return p, err
		}
		f.add(n)
	}
	p.used = time.Duration(ticks) * tick
	return p, nil
}

// since returns what was used since an earlier reading.
func (u usage) since(earlier usage) usage {
	used := usage{}
	for name, now := range u {
		used[name] = now - earlier[name]
	}
	return used
}
