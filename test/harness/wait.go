// SPDX-License-Identifier: Apache-2.0

// Package harness has helpers that the suites of test/ share beside the test bed. They wait for
// conditions, call the plugin as client-go does, make machines with a software TPM, and file their
// requests. A suite adds what only it needs.
package harness

import (
	"context"
	"io"
	"os"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/watch"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// pollInterval is how often a condition is looked at.
const pollInterval = 20 * time.Millisecond

// Soon is an expected time for Eventually. It is for what an idle machine does within a second or
// two.
const Soon = time.Minute

// slack is how many times the expected time Eventually waits: a test on a busy machine is slow, and
// not red. A test whose point is a time measures that time.
const slack = 5

// Eventually waits until a condition holds. expected is the time that it takes at most on a machine
// which runs three suites on two processors. A test that passes does not wait for it.
func Eventually(t testing.TB, expected time.Duration, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(slack * expected); !condition(); time.Sleep(pollInterval) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %s: %s", slack*expected, what)
		}
	}
}

// EventuallyOf is Eventually for a condition that needs a running process. The test fails at once
// if the process has ended.
func EventuallyOf(t testing.TB, process *testbed.Process, expected time.Duration, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(slack * expected); !condition(); {
		select {
		case <-process.Done():
			t.Fatalf("the process has ended before %s: %v\n%s", what, process.Err(), process.LogTail())
		case <-time.After(pollInterval):
		}
		if time.Now().After(deadline) {
			t.Fatalf("not within %s: %s\n%s", slack*expected, what, process.LogTail())
		}
	}
}

// Never checks for a while that a condition does not hold. It always takes the whole duration. Use
// it only where no event shows that the decision has been made.
func Never(t testing.TB, duration time.Duration, what string, condition func() bool) {
	t.Helper()
	for end := time.Now().Add(duration); ; time.Sleep(pollInterval) {
		if condition() {
			t.Fatalf("within %s: %s", duration, what)
		}
		if time.Now().After(end) {
			return
		}
	}
}

// AwaitEvent waits for an event of a watch that is wanted. It returns io.EOF if the watch ends
// before.
func AwaitEvent(w watch.Interface, wanted func(watch.Event) bool) error {
	for timeout := time.After(slack * 2 * time.Second); ; {
		select {
		case e, open := <-w.ResultChan():
			if !open {
				return io.EOF
			}
			if e.Type != watch.Error && wanted(e) {
				return nil
			}
		case <-timeout:
			return context.DeadlineExceeded
		}
	}
}

// Must ends the test on an error.
func Must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// WriteFile writes a file that only its owner may read.
func WriteFile(t testing.TB, path string, data []byte) {
	t.Helper()
	Must(t, os.WriteFile(path, data, 0o600))
}
