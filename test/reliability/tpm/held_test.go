// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/reliability"
)

// The kernel refuses to open a character device that another program has open (EBUSY). The plugin
// says so, or prints the certificate that it holds. When the program lets go, the node gets its
// certificate through the same device.
func TestDeviceIsInUse(t *testing.T) {
	t.Parallel()
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			n, old := begin(t, kind)
			d := newDevice(t, n.Chip)
			n.Device, n.Plugin = d.path, unprivileged(t, n.Plugin)
			d.hold(t, true)
			if _, err := os.Stat(d.path); err != nil {
				t.Fatal(err)
			}
			r := n.Run(t, cluster)
			if old == nil {
				wantReason(t, r, 15, d.path+": device or resource busy", "another program has /dev/tpm0 open", "fuser -v")
			} else {
				harness.WorkerEnds(t, n.Certs())
				n.Run(t, cluster).Want(t, 0, "still served", d.path+": device or resource busy")
			}
			d.hold(t, false)
			t.Logf("new certificate %v after the device was free", n.settles(t, old, longestBackOff+slack))
			n.filed(t, 1, 1)
			n.nothingLeft(t)
		})
	}
}

// unprivileged returns a script that runs a program without CAP_SYS_ADMIN, with which the kernel
// opens a terminal that another program holds.
func unprivileged(t *testing.T, program string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "plugin")
	script := "#!/bin/sh\nexec setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin '" + program + "' \"$@\"\n"
	harness.Must(t, os.WriteFile(path, []byte(script), 0o700))
	return path
}

// device is a character device with a TPM behind it. It is a terminal that passes on each byte, as
// no TPM driver can be had without the hardware.
type device struct {
	path          string
	master, slave *os.File
}

func newDevice(t *testing.T, chip *swtpm.TPM) *device {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	harness.Must(t, err)
	t.Cleanup(func() { _ = master.Close() })
	number, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	harness.Must(t, err)
	harness.Must(t, unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0))
	d := &device{path: fmt.Sprintf("/dev/pts/%d", number), master: master}
	d.slave, err = os.OpenFile(d.path, os.O_RDWR|syscall.O_NOCTTY, 0)
	harness.Must(t, err)
	t.Cleanup(func() { _ = d.slave.Close() })
	raw, err := unix.IoctlGetTermios(int(d.slave.Fd()), unix.TCGETS)
	harness.Must(t, err)
	raw.Iflag, raw.Oflag, raw.Lflag = 0, 0, 0
	raw.Cflag = raw.Cflag&^(unix.CSIZE|unix.PARENB) | unix.CS8
	raw.Cc[unix.VMIN], raw.Cc[unix.VTIME] = 1, 0
	harness.Must(t, unix.IoctlSetTermios(int(d.slave.Fd()), unix.TCSETS, raw))
	// The program that holds it. The terminal is that of its session, so it becomes nobody else's.
	holder := exec.CommandContext(t.Context(), "sleep", "infinity")
	holder.Stdin = d.slave
	holder.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true, Pdeathsig: syscall.SIGKILL}
	harness.Must(t, holder.Start())
	t.Cleanup(func() { _ = holder.Process.Kill(); _ = holder.Wait() })
	go d.serve(chip)
	return d
}

// hold has the kernel refuse others the device, or not.
func (d *device) hold(t *testing.T, held bool) {
	t.Helper()
	request := uint(unix.TIOCNXCL)
	if held {
		request = unix.TIOCEXCL
	}
	harness.Must(t, unix.IoctlSetInt(int(d.slave.Fd()), request, 0))
	_, err := os.OpenFile(d.path, os.O_RDWR|syscall.O_NOCTTY, 0)
	if os.Geteuid() != 0 && held != errors.Is(err, syscall.EBUSY) {
		t.Fatalf("held: %t, and opening it says %v", held, err)
	}
}

// serve passes on commands and responses until the terminal is closed.
func (d *device) serve(chip *swtpm.TPM) {
	for {
		command := make([]byte, 10)
		if _, err := io.ReadFull(d.master, command); err != nil {
			return
		}
		size := binary.BigEndian.Uint32(command[2:])
		if size < 10 || size > 4096 {
			return
		}
		command = append(command, make([]byte, size-10)...)
		if _, err := io.ReadFull(d.master, command[10:]); err != nil {
			return
		}
		response, err := chip.Transport().Send(command)
		if err != nil {
			return
		}
		if _, err := d.master.Write(response); err != nil {
			return
		}
	}
}

// Another program keeps the only connection of a software TPM. A command waits, and is done once
// the connection is free. If it waits for longer than a worker lives, the reason says what may be
// wrong.
func TestConnectionIsTaken(t *testing.T) {
	t.Parallel()
	held := reliability.Size(t, "tpm-renewals", 2*time.Second, 130*time.Second)
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			n, old := begin(t, kind)
			n.Device = n.Chip.Socket()
			other, err := net.Dial("unix", n.Device)
			harness.Must(t, err)
			defer func() { _ = other.Close() }()
			var last harness.Result
			for released := time.Now().Add(held); time.Now().Before(released); {
				if last = n.Run(t, cluster, "--wait-timeout=1s"); (last.Code == 0) != (old != nil) {
					t.Errorf("exit code %d: %s", last.Code, last.Stderr)
				}
				time.Sleep(100 * time.Millisecond) // client-go asks for each request of the kubelet
			}
			switch {
			case held > 2*time.Minute: // how long a worker lives
				last.Want(t, last.Code, "TPM2_", "context deadline exceeded")
				if old == nil {
					wantReason(t, last, last.Code, "ss -xp")
				}
			case old == nil:
				wantReason(t, last, 13, "provider tpm has not made its evidence yet")
			}
			harness.Must(t, other.Close())
			t.Logf("held for %v: new certificate %v after the connection was free", held, n.settles(t, old, longestBackOff+slack))
			n.filed(t, 1, 1)
			n.nothingLeft(t)
		})
	}
}
