// SPDX-License-Identifier: Apache-2.0

package decisionlog

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

// registered returns the counters, and a function that reads them.
func registered(t *testing.T) (*telemetry.DecisionLogMetrics, func(*testing.T) map[string]float64) {
	t.Helper()
	m, err := recordMetrics()
	if err != nil {
		t.Fatal(err)
	}
	return m, readCounters
}

func lines(from, to int) (all [][]byte) {
	for i := from; i < to; i++ {
		all = append(all, fmt.Appendf(nil, "{\"line\":%d}\n", i))
	}
	return all
}

func content(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func appendLines(t *testing.T, f *File, from, to int) {
	t.Helper()
	if n, err := f.Write(t.Context(), lines(from, to)); n != to-from || err != nil {
		t.Fatalf("%d lines, %v", n, err)
	}
}

// The file is opened again after it was renamed or removed, as by logrotate. It is appended to, and
// no other user can read or write it.
func TestFileIsRotated(t *testing.T) {
	path := filepath.Join(t.TempDir(), "decisions.jsonl")
	f := NewFile(path)
	appendLines(t, f, 0, 2)
	if info, err := os.Stat(path); err != nil || info.Mode().Perm()&^fileMode != 0 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	if err := os.Rename(path, path+".1"); err != nil {
		t.Fatal(err)
	}
	appendLines(t, f, 2, 3)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	appendLines(t, f, 3, 4)
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	again := NewFile(path)
	appendLines(t, again, 4, 5)
	if err := os.Truncate(path, 0); err != nil { // copytruncate
		t.Fatal(err)
	}
	appendLines(t, again, 5, 6)
	if err := again.Close(); err != nil {
		t.Fatal(err)
	}
	if got := content(t, path+".1"); got != "{\"line\":0}\n{\"line\":1}\n" {
		t.Errorf("the rotated file has %q", got)
	}
	if got := content(t, path); got != "{\"line\":5}\n" {
		t.Errorf("the file has %q", got)
	}
}

// After a process was killed in the middle of a line, the next line is complete.
func TestFileEndsWithinALine(t *testing.T) {
	path := filepath.Join(t.TempDir(), "decisions.jsonl")
	if err := os.WriteFile(path, []byte(`{"line":0`), 0o600); err != nil {
		t.Fatal(err)
	}
	f := NewFile(path)
	appendLines(t, f, 1, 3)
	if got := content(t, path); got != "{\"line\":0\n{\"line\":1}\n{\"line\":2}\n" {
		t.Errorf("%q", got)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

// A write to a full device, or to a path without a directory, is an error each time.
func TestFileCannotBeWritten(t *testing.T) {
	for _, path := range []string{"/dev/full", filepath.Join(t.TempDir(), "missing", "decisions.jsonl")} {
		f := NewFile(path)
		for range 2 {
			if n, err := f.Write(t.Context(), lines(0, 2)); n != 0 || err == nil {
				t.Errorf("%s: %d lines, %v", path, n, err)
			}
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
}

// childOfTest is set for the child process of this test, which runs under a limit.
const childOfTest = "DECISIONLOG_CHILD"

// The disk is full within a line. The lines before are complete, and the torn one is written again
// as a separate line once there is room. The limit of a process' files is that disk.
func TestDiskIsFullWithinALine(t *testing.T) {
	const name = "decisions.jsonl"
	if os.Getenv(childOfTest) != "" {
		fillUp(t, name)
		return
	}
	dir := t.TempDir()
	child := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestDiskIsFullWithinALine$")
	child.Env, child.Dir = append(os.Environ(), childOfTest+"=1"), dir
	if out, err := child.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if got, want := content(t, filepath.Join(dir, name)), "{\"line\":0}\n{\"line\":1}\n{\"li\n{\"line\":2}\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func fillUp(t *testing.T, path string) {
	signal.Ignore(syscall.SIGXFSZ)
	var unlimited syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &unlimited); err != nil {
		t.Fatal(err)
	}
	limit := unlimited
	limit.Cur = uint64(len("{\"line\":0}\n{\"line\":1}\n{\"li"))
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &limit); err != nil {
		t.Fatal(err)
	}
	f := NewFile(path)
	if n, err := f.Write(t.Context(), lines(0, 3)); n != 2 || !errors.Is(err, syscall.EFBIG) {
		t.Errorf("%d lines, %v", n, err)
	}
	if n, err := f.Write(t.Context(), lines(2, 3)); n != 0 || err == nil {
		t.Errorf("%d lines, %v", n, err)
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &unlimited); err != nil {
		t.Fatal(err)
	}
	appendLines(t, f, 2, 3)
}

// readCounters returns written/SINK and lost/SINK.
func readCounters(t *testing.T) map[string]float64 {
	t.Helper()
	families, err := metrics.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]float64{}
	for _, family := range families {
		name, ours := strings.CutPrefix(family.GetName(), "node_attestation_decision_records_")
		if !ours {
			continue
		}
		for _, m := range family.GetMetric() {
			values[strings.TrimSuffix(name, "_total")+"/"+m.GetLabel()[0].GetValue()] = m.GetCounter().GetValue()
		}
	}
	return values
}
