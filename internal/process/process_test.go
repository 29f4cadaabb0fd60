// SPDX-License-Identifier: Apache-2.0

package process

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

func TestAliveSeesTheEndOfAProcess(t *testing.T) {
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	id, err := Of(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	if !id.Alive() || Parse(id.String()) != id {
		t.Fatalf("%v: not alive, or not read back", id)
	}
	if (ID{PID: id.PID, Start: id.Start + 1}).Alive() {
		t.Error("another process under the same pid counts as this one")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	// Nobody has waited for it yet: a zombie is not alive.
	for deadline := time.Now().Add(5 * time.Second); id.Alive(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("a zombie counts as alive")
		}
	}
	_ = cmd.Wait()
	if id.Alive() {
		t.Error("a process that was waited for counts as alive")
	}
}

func TestParseRefuses(t *testing.T) {
	for _, s := range []string{"", "12", "0 5", "-1 5", "a b", "12 -5", "1 2 3"} {
		if got := Parse(s); got != (ID{}) {
			t.Errorf("Parse(%q) = %v, want nobody", s, got)
		}
	}
	self, err := Of(os.Getpid())
	if err != nil || !self.Alive() {
		t.Errorf("self: %v, %v", self, err)
	}
}

func TestAgeIsByNoClockThatSomebodySets(t *testing.T) {
	self, err := Of(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if age := self.Age(); age < 0 || age > time.Hour {
		t.Errorf("this test has run for %s", age)
	}
	if age := (ID{PID: 1, Start: 0}).Age(); age < self.Age() {
		t.Errorf("the boot is younger than this test: %s", age)
	}
	if again := BootID(); again == "" || again != BootID() {
		t.Errorf("boot %q", BootID())
	}
}

// lxcfs shows the uptime of a container in /proc/uptime. A worker's age must not become negative.
func TestAgeDoesNotNeedTheUptimeFile(t *testing.T) {
	const inside = "PROCESS_TEST_INSIDE"
	if os.Getenv(inside) != "" {
		up, err := os.ReadFile("/proc/uptime")
		if err != nil || string(up) != "1.00 1.00\n" {
			t.Fatalf("/proc/uptime: %q, %v", up, err)
		}
		parent, err := Of(os.Getppid())
		if err != nil {
			t.Fatal(err)
		}
		if age := parent.Age(); age < time.Second {
			t.Errorf("a process that has run for a second is %v old", age)
		}
		return
	}
	fake := filepath.Join(t.TempDir(), "uptime")
	if err := os.WriteFile(fake, []byte("1.00 1.00\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("unshare", "--map-root-user", "--mount", "sh", "-c", `mount --bind "$1" /proc/uptime && sleep 1.1 && "$2" -test.run='^'"$3"'$' -test.v`, "-", fake, os.Args[0], t.Name())
	cmd.Env = append(os.Environ(), inside+"=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
