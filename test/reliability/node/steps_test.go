// SPDX-License-Identifier: Apache-2.0

package node

import (
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// systemd kills the control group of the kubelet's unit when it restarts the kubelet: kubelet,
// plugin and worker, at any step. The next kubelet takes up the same request.
func TestControlGroupIsKilledAtEachStep(t *testing.T) {
	t.Parallel()
	atEachStep(t, authenticator.DefaultWorkerDeadline, func(t *testing.T, c *call) {
		harness.Must(t, c.group.Kill())
		c.resume(t)
		<-c.ended // a run that had ended before is fine, and so is one that was killed
		c.recovers(t)
	})
}

// A worker is frozen at a step for longer than its deadline, as by a control group's freezer or
// with its virtual machine. A valid certificate is printed all the same. When the worker is thawed,
// it damages nothing, and the same request is taken up again.
func TestWorkerIsFrozenAtEachStep(t *testing.T) {
	t.Parallel()
	atEachStep(t, shortDeadline, func(t *testing.T, c *call) {
		alone, err := testbed.NewTaskGroup()
		harness.Must(t, err)
		t.Cleanup(func() { harness.Must(t, alone.Remove()) })
		harness.Must(t, alone.Add(c.held))
		c.freezes(t, alone)
	})
}

// The same for all processes of the kubelet's unit at once.
func TestUnitIsFrozenAtEachStep(t *testing.T) {
	t.Parallel()
	atEachStep(t, shortDeadline, func(t *testing.T, c *call) { c.freezes(t, c.group) })
}

// shortDeadline is that of a worker which is frozen for longer.
const shortDeadline = 3 * time.Second

func (c *call) freezes(t *testing.T, group *testbed.TaskGroup) {
	t.Helper()
	harness.Must(t, group.Freeze())
	c.resume(t)
	for end := time.Now().Add(shortDeadline + time.Second); time.Now().Before(end); { // the deadline passes meanwhile
		c.prints(t)
	}
	harness.Must(t, group.Thaw())
	c.recovers(t)
	if r := <-c.ended; c.old != nil && r.Code != 0 {
		t.Errorf("the first run: exit code %d: %s", r.Code, r.Stderr)
	}
}

// The certificate directory becomes read-only at a step, and stays so for a while. A valid
// certificate is printed throughout. When the directory can be written again, the same request is
// taken up again. The kernel refuses to remount a file system on which a file is open for writing.
// So a read-only mount covers the directory, and what is opened by its path is refused.
func TestDirectoryBecomesReadOnlyAtEachStep(t *testing.T) {
	t.Parallel()
	atEachStep(t, authenticator.DefaultWorkerDeadline, func(t *testing.T, c *call) {
		dir := c.Certs().Path()
		harness.Must(t, os.MkdirAll(dir, 0o700)) // before the first step of an enrolment there is none
		harness.Must(t, syscall.Mount(dir, dir, "", syscall.MS_BIND, ""))
		unmount := func() error { return syscall.Unmount(dir, syscall.MNT_DETACH) }
		t.Cleanup(func() { _ = unmount() }) // it is gone unless the test has failed
		harness.Must(t, syscall.Mount("", dir, "", syscall.MS_REMOUNT|syscall.MS_BIND|syscall.MS_RDONLY, ""))
		c.resume(t)
		if r := <-c.ended; c.old != nil && r.Code != 0 {
			t.Errorf("the first run: exit code %d while a certificate is valid: %s", r.Code, r.Stderr)
		} else if r.Code != 0 {
			isActionable(t, r)
		}
		harness.WorkerEnds(t, c.Certs())
		for range 3 {
			c.prints(t)
		}
		harness.Must(t, unmount())
		c.recovers(t)
	})
}
