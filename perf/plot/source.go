// SPDX-License-Identifier: Apache-2.0

package plot

import (
	"bufio"
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"
)

// Source says where figures are from: the command, the day, the machine and how busy it is.
func Source(command string) string {
	return fmt.Sprintf("%s, %s, %d CPUs (%s), load %s", command, time.Now().Format(time.DateOnly), runtime.NumCPU(), CPUModel(), Load())
}

// Load is how many processes ran or waited to run, on average over the last minute.
func Load() string {
	content, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	load, _, _ := strings.Cut(string(content), " ")
	return load
}

// CPUModel is the processor's name.
func CPUModel() string {
	file, err := os.Open("/proc/cpuinfo")
	if err != nil {
		return "unknown"
	}
	defer func() { _ = file.Close() }() // only read
	for lines := bufio.NewScanner(file); lines.Scan(); {
		if key, value, ok := strings.Cut(lines.Text(), ":"); ok && strings.TrimSpace(key) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return "unknown"
}
