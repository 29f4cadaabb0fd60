// SPDX-License-Identifier: Apache-2.0

package oserror

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
)

// Each number has one row, and is found in it however deep it is wrapped.
func TestEachNumberHasARow(t *testing.T) {
	for number, want := range map[syscall.Errno]struct {
		directory, device, process string // what the hint says
		absent                     bool
	}{
		syscall.EMFILE:       {"LimitNOFILE=", "LimitNOFILE=", "LimitNOFILE=", false},
		syscall.ENFILE:       {"fs.file-max", "fs.file-max", "fs.file-max", false},
		syscall.ENOMEM:       {"free memory", "free memory", "free memory", false},
		syscall.EACCES:       {"run this as root", "TPM device", "mode of this program", false},
		syscall.EPERM:        {"run this as root", "TPM device", "mode of this program", false},
		syscall.EAGAIN:       {"", "ss -xp", "TasksMax=", false},
		syscall.EBUSY:        {"", "fuser -v /dev/tpm0", "", false},
		syscall.EIO:          {"the kernel's log", "the kernel's log", "", false},
		syscall.ETIME:        {"", "does not answer its driver", "", false},
		syscall.ETIMEDOUT:    {"", "does not answer its driver", "", false},
		syscall.EPIPE:        {"", "ended during a command", "", false},
		syscall.ECONNRESET:   {"", "ended during a command", "", false},
		syscall.ENOSPC:       {"free space, inodes", "", "", false},
		syscall.EDQUOT:       {"quota", "", "", false},
		syscall.EROFS:        {"read-write", "", "", false},
		syscall.ENOLCK:       {"no locks", "", "", false},
		syscall.ENOSYS:       {"no locks", "", "", false},
		syscall.EOPNOTSUPP:   {"no locks", "", "", false},
		syscall.ESTALE:       {"mount its file system anew", "", "", false},
		syscall.ELOOP:        {"symbolic link", "", "", false},
		syscall.ECONNREFUSED: {"", "start the software TPM", "", true},
		syscall.ENOENT:       {"missing", "switch the TPM on", "install this program again", true},
		syscall.ENXIO:        {"missing", "switch the TPM on", "install", true},
		syscall.ENODEV:       {"missing", "switch the TPM on", "install", true},
		syscall.ENOTDIR:      {"not a directory", "switch the TPM on", "install", true},
		syscall.EDOM:         {"", "", "", false},
	} {
		says := func(what, hint, want string) {
			t.Helper()
			if (hint == "") != (want == "") || !strings.Contains(hint, want) {
				t.Errorf("%v, %s: %q, want %q", number, what, hint, want)
			}
		}
		for _, err := range []error{
			number,
			fmt.Errorf("x: %w", &fs.PathError{Op: "open", Path: "/x", Err: number}),
			&net.OpError{Op: "dial", Err: os.NewSyscallError("connect", number)},
			errors.Join(errors.New("other"), number),
		} {
			says("directory", Directory(err, "--cert-dir"), want.directory)
			device, absent := Device(err)
			if says("device", device, want.device); absent != want.absent {
				t.Errorf("%v: absent %v", number, absent)
			}
			says("process", Process(err), want.process)
		}
	}
	found := map[syscall.Errno]bool{}
	for _, r := range rows() {
		for _, n := range r.numbers {
			if found[n] {
				t.Errorf("%v has two rows", n)
			}
			found[n] = true
		}
	}
	if len(found) != 25 {
		t.Errorf("%d numbers have a row: the table of this test lacks some", len(found))
	}
}

// Of several devices, the one that is there decides.
func TestDeviceThatIsThereDecides(t *testing.T) {
	hint, absent := Device(errors.Join(&fs.PathError{Op: "open", Path: "/dev/tpmrm0", Err: syscall.ENOENT},
		&fs.PathError{Op: "open", Path: "/dev/tpm0", Err: syscall.EBUSY}))
	if absent || !strings.Contains(hint, "fuser") {
		t.Errorf("%q, absent %v", hint, absent)
	}
}

// The setting is named where another directory helps, and only there.
func TestOtherDirectory(t *testing.T) {
	for number, elsewhere := range map[syscall.Errno]bool{syscall.ENOSPC: true, syscall.ENOLCK: true, syscall.EMFILE: false, syscall.ENOMEM: false} {
		if hint := Directory(number, "--runtime-dir"); strings.Contains(hint, "--runtime-dir") != elsewhere {
			t.Errorf("%v: %q", number, hint)
		}
		if hint := Directory(number, ""); hint == "" || strings.Contains(hint, "name another directory") {
			t.Errorf("%v, without a setting: %q", number, hint)
		}
	}
}
