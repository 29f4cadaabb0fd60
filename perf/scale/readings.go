// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// readings are what a process says of itself in Prometheus's text format, by series.
type readings map[string]float64

// parseReadings leaves out what is no series.
func parseReadings(text string) readings {
	all := readings{}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		series, value, ok := cutLast(line, " ")
		if !ok || strings.HasPrefix(line, "#") {
			continue
		}
		if number, err := strconv.ParseFloat(value, 64); err == nil {
			all[series] = number
		}
	}
	return all
}

func cutLast(s, separator string) (before, after string, found bool) {
	i := strings.LastIndex(s, separator)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(separator):], true
}

// sum adds up the series of a name that have all these labels, each written as in key="value".
func (r readings) sum(name string, labels ...string) (total float64) {
	for series, value := range r {
		own, rest, _ := strings.Cut(series, "{")
		if own != name {
			continue
		}
		matches := true
		for _, label := range labels {
			matches = matches && strings.Contains(rest, label)
		}
		if matches {
			total += value
		}
	}
	return total
}

// minus is what has been added since an earlier reading.
func (r readings) minus(earlier readings) readings {
	added := readings{}
	for series, value := range r {
		added[series] = value - earlier[series]
	}
	return added
}

// cpu is the processor time that the process has used.
func (r readings) cpu() time.Duration {
	return time.Duration(r.sum("process_cpu_seconds_total") * float64(time.Second))
}

func readController(ctx context.Context, c *controllerprocess.Controller) (readings, error) {
	text, err := c.Metrics(ctx)
	if err != nil {
		return nil, fmt.Errorf("read the controller's metrics: %w", err)
	}
	return parseReadings(text), nil
}

func readAPIServer(ctx context.Context, cp *testbed.ControlPlane) (readings, error) {
	text, err := cp.Client().CoreV1().RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	if err != nil {
		return nil, fmt.Errorf("read the API server's metrics: %w", err)
	}
	return parseReadings(string(text)), nil
}

// memory returns a field of /proc/PID/status in MiB: VmRSS is what a process has in memory, and
// VmHWM the most that it ever had.
func memory(p *testbed.Process, field string) (float64, error) {
	file, err := os.Open(fmt.Sprintf("/proc/%d/status", p.PID()))
	if err != nil {
		return 0, err
	}
	defer func() { _ = file.Close() }() // only read
	for lines := bufio.NewScanner(file); lines.Scan(); {
		key, value, _ := strings.Cut(lines.Text(), ":")
		if key != field {
			continue
		}
		kib, err := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 64)
		return kib / 1024, err
	}
	return 0, fmt.Errorf("%s has no %s", file.Name(), field)
}
