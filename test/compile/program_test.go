// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// What is built again is what the sources say now, although it is kept.
func TestProgramFollowsItsSources(t *testing.T) {
	t.Setenv(CacheVariable, t.TempDir())
	module, output := t.TempDir(), filepath.Join(t.TempDir(), "program")
	write := func(name, content string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(module, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("go.mod", "module example.com/a\n\ngo 1.26\n")
	for _, says := range []string{"one", "two", "one"} {
		write("main.go", "package main\n\nfunc main() { println(\""+says+"\") }\n")
		if err := Program(t.Context(), module, output, "./."); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.CommandContext(t.Context(), output).CombinedOutput(); err != nil || string(out) != says+"\n" {
			t.Errorf("%v: %q, want %q", err, out, says)
		}
	}
}

// The clock of a program is what SetClock says, at once. The time that passes is not.
func TestProgramWithClock(t *testing.T) {
	t.Setenv(CacheVariable, t.TempDir())
	module, output, clock := t.TempDir(), filepath.Join(t.TempDir(), "program"), filepath.Join(t.TempDir(), "clock")
	for name, content := range map[string]string{
		"go.mod": "module example.com/a\n\ngo 1.26\n",
		"main.go": `package main

import (
	"bufio"
	"fmt"
	"os"
	"time"
)

func main() {
	began := time.Now()
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		fmt.Println(time.Now().Unix(), time.Since(began) < time.Hour && time.Now().Sub(began) < time.Hour)
	}
}
`,
	} {
		if err := os.WriteFile(filepath.Join(module, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := ProgramWithClock(t.Context(), module, output, "./."); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), output)
	cmd.Env = append(os.Environ(), ClockVariable+"="+clock)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := SetClock(clock, 0); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Wait() }()
	defer func() { _ = in.Close() }()
	for _, by := range []time.Duration{0, -50 * 365 * 24 * time.Hour, 10 * 365 * 24 * time.Hour, -time.Hour} {
		if err := SetClock(clock, by); err != nil {
			t.Fatal(err)
		}
		if _, err := in.Write([]byte("\n")); err != nil {
			t.Fatal(err)
		}
		var seconds int64
		var steady bool
		if _, err := fmt.Fscan(out, &seconds, &steady); err != nil {
			t.Fatal(err)
		}
		if off := time.Unix(seconds, 0).Sub(time.Now().Add(by)).Abs(); off > time.Minute || !steady {
			t.Errorf("moved by %s: the clock is off by %s, durations are right: %v", by, off, steady)
		}
	}
}
