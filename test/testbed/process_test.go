// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"
)

const helperVariable = "TESTBED_TEST_HELPER"

// TestNoOrphans: however this process dies, what it started dies with it. A
// second copy of the test binary does the dying.
func TestNoOrphans(t *testing.T) {
	if way := os.Getenv(helperVariable); way != "" {
		orphanHelper(way)
	}
	for _, way := range []string{"panic", "panic elsewhere", "exit", "killed"} {
		t.Run(way, func(t *testing.T) {
			pidFile := filepath.Join(t.TempDir(), "pid")
			helper := exec.Command(os.Args[0], "-test.run=^TestNoOrphans$")
			helper.Env = append(os.Environ(), helperVariable+"="+way, "TESTBED_TEST_PIDFILE="+pidFile)
			var output bytes.Buffer
			helper.Stdout, helper.Stderr = &output, &output
			if err := helper.Start(); err != nil {
				t.Fatal(err)
			}
			pid := awaitPID(t, pidFile)
			if way == "killed" {
				if !running(pid) {
					t.Fatal("the child does not run while its parent does: nothing would be proved")
				}
				if err := helper.Process.Kill(); err != nil {
					t.Fatal(err)
				}
			}
			if err := helper.Wait(); err == nil {
				t.Fatalf("the helper ended well:\n%s", output.String())
			}
			if !ends(pid) {
				t.Fatalf("child %d outlives its parent", pid)
			}
		})
	}
}

// orphanHelper starts a child, prints its PID and exits.
func orphanHelper(way string) {
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		panic(err)
	}
	p, err := StartProcess(Command{Path: sleep, Args: []string{"1000"}, LogFile: os.DevNull})
	if err != nil {
		panic(err)
	}
	pidFile := os.Getenv("TESTBED_TEST_PIDFILE")
	if err := os.WriteFile(pidFile+".new", []byte(strconv.Itoa(p.PID())), 0o600); err != nil {
		panic(err)
	}
	if err := os.Rename(pidFile+".new", pidFile); err != nil {
		panic(err)
	}
	switch way {
	case "panic":
		panic("as wanted")
	case "panic elsewhere":
		go panic("as wanted")
	case "exit":
		os.Exit(3)
	}
	time.Sleep(time.Minute) // to be killed
	os.Exit(4)
}

func awaitPID(t *testing.T, path string) int {
	t.Helper()
	for range 400 {
		if data, err := os.ReadFile(path); err == nil {
			pid, err := strconv.Atoi(string(data))
			if err != nil {
				t.Fatal(err)
			}
			return pid
		}
		time.Sleep(pollInterval)
	}
	t.Fatal("the helper started nothing")
	return 0
}

// TestChildOutlivesThread: the thread whose death would kill the child must not
// be one that the Go runtime may end.
func TestChildOutlivesThread(t *testing.T) {
	var child *Process
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread() // and not unlocked: the runtime ends the thread
		child = start(t, "sleep", "1000")
	}()
	<-ended
	select {
	case <-child.Done():
		t.Fatal("the child died with the thread that asked for it")
	case <-time.After(300 * time.Millisecond):
	}
	if err := child.Stop(time.Second); err != nil {
		t.Error(err)
	}
	if running(child.PID()) {
		t.Error("still running after Stop")
	}
}

func TestStopReachesTheGroup(t *testing.T) {
	// Neither the shell nor its child ends on SIGTERM.
	child := start(t, "sh", "-c", `trap "" TERM; sleep 1000 & echo $!; while :; do wait; done`)
	var grandchild int
	for range 200 {
		data, err := os.ReadFile(child.logFile)
		if err != nil {
			t.Fatal(err)
		}
		if pid, err := strconv.Atoi(strings.TrimSpace(string(data))); err == nil {
			grandchild = pid
			break
		}
		time.Sleep(pollInterval)
	}
	if !running(grandchild) {
		t.Fatal("the grandchild does not run: nothing would be proved")
	}
	if err := child.Stop(100 * time.Millisecond); err != nil {
		t.Error(err)
	}
	if running(child.PID()) {
		t.Error("still running after Stop")
	}
	// Stop waits for the child alone.
	if !ends(grandchild) {
		t.Error("the grandchild still runs after Stop")
	}
}

func TestErrQuotesTheLog(t *testing.T) {
	child := start(t, "sh", "-c", "echo the reason; exit 7")
	<-child.Done()
	err := child.Err()
	if err == nil || !strings.Contains(err.Error(), "the reason") || !strings.Contains(err.Error(), "exit status 7") {
		t.Errorf("Err: %v", err)
	}
	if stop := child.Stop(time.Second); stop == nil {
		t.Error("Stop does not tell that the process had failed before")
	}
}

func start(t *testing.T, name string, args ...string) *Process {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		panic(err)
	}
	p, err := StartProcess(Command{Path: path, Args: args, LogFile: filepath.Join(t.TempDir(), name+".log")})
	if err != nil {
		panic(err)
	}
	t.Cleanup(func() { _ = p.Kill() }) // its error is a matter of the test
	return p
}

// ends waits a while for a process to end, and reports whether it did.
func ends(pid int) bool {
	for deadline := time.Now().Add(5 * time.Second); running(pid); time.Sleep(pollInterval) {
		if time.Now().After(deadline) {
			return false
		}
	}
	return true
}

// running reports whether a process exists and is not a zombie. An orphan stays a zombie until its
// new parent waits for it.
func running(pid int) bool {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	// "pid (name) state ...": the name may hold spaces and brackets.
	_, rest, _ := strings.Cut(string(data[bytes.LastIndexByte(data, ')'):]), " ")
	return !strings.HasPrefix(rest, "Z") && !strings.HasPrefix(rest, "X")
}
