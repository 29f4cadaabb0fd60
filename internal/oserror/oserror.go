// SPDX-License-Identifier: Apache-2.0

// Package oserror says what an operator can do about an error number of the kernel. All such hints
// are here: for files and locks, for a TPM device, and for a process that cannot be started.
//
// The response codes of a TPM have a table of their own in pkg/provider/tpm. They are a type of
// go-tpm, and a plugin without that provider does not carry go-tpm.
package oserror

import (
	"errors"
	"slices"
	"syscall"
)

// row has the hints for some error numbers. A hint is empty if such a thing cannot fail with these
// numbers, or nothing can be said.
type row struct {
	numbers []syscall.Errno
	// directory is for a file or a lock in a directory.
	directory string
	// elsewhere is set if another directory may help.
	elsewhere bool
	// device is for a character device, or the socket of a software device.
	device string
	// absent is set if the number means that there is no device.
	absent bool
	// process is for a program that is to be started.
	process string
}

// rows returns the table. If several devices were tried, the first row with one of their errors
// counts. So the numbers of an absent device come last.
func rows() []row {
	const files = "close open files or raise their limit: LimitNOFILE= of the unit that runs this, fs.file-max of the machine"
	const memory = "free memory, or raise MemoryMax= of the unit that runs this"
	const silent = "the TPM does not answer its driver: see the kernel's log, switch the machine off and on, and look for an update of the firmware"
	return []row{
		{numbers: []syscall.Errno{syscall.EMFILE, syscall.ENFILE}, directory: files, device: files, process: files},
		{numbers: []syscall.Errno{syscall.ENOMEM}, directory: memory, device: memory, process: memory},
		{
			numbers: []syscall.Errno{syscall.EACCES, syscall.EPERM}, elsewhere: true,
			directory: "run this as root, and see the owner, the mode and the SELinux or AppArmor rules of the directory",
			device:    "run this as root, and see the mode and the SELinux or AppArmor rules of the TPM device",
			process:   "see the mode of this program, and the SELinux or AppArmor rules and the mount options (noexec) for it",
		},
		{
			numbers: []syscall.Errno{syscall.EAGAIN},
			device:  "too many programs wait for the software TPM: try again, and list them with: ss -xp",
			process: "end some processes or raise their limit: TasksMax= of the unit that runs this, kernel.pid_max of the machine",
		},
		{
			numbers: []syscall.Errno{syscall.EBUSY},
			device:  "another program has /dev/tpm0 open, which serves one at a time: use /dev/tpmrm0, or find that program with: fuser -v /dev/tpm0",
		},
		{
			numbers: []syscall.Errno{syscall.EIO}, elsewhere: true,
			directory: "the disk or the file system has errors: see the kernel's log",
			device:    silent,
		},
		{
			numbers: []syscall.Errno{syscall.ETIME, syscall.ETIMEDOUT},
			device:  silent,
		},
		{
			numbers: []syscall.Errno{syscall.EPIPE, syscall.ECONNRESET},
			device:  "the software TPM ended during a command: see its log, and start it again",
		},
		{
			numbers: []syscall.Errno{syscall.ENOSPC, syscall.EDQUOT}, elsewhere: true,
			directory: "free space, inodes or quota on its file system (df -h, df -i)",
		},
		{numbers: []syscall.Errno{syscall.EROFS}, elsewhere: true, directory: "mount its file system read-write"},
		{
			numbers: []syscall.Errno{syscall.ENOLCK, syscall.ENOSYS, syscall.EOPNOTSUPP}, elsewhere: true,
			directory: "its file system has no locks (flock), or lacks another call that is needed: use a local one such as ext4, xfs or tmpfs",
		},
		{numbers: []syscall.Errno{syscall.ESTALE}, elsewhere: true, directory: "mount its file system anew: the file server no longer knows it"},
		{numbers: []syscall.Errno{syscall.ELOOP}, elsewhere: true, directory: "remove the symbolic link that is there"},
		{
			numbers: []syscall.Errno{syscall.ECONNREFUSED}, absent: true,
			device: "start the software TPM: its socket is there, and no program listens at it",
		},
		{
			numbers: []syscall.Errno{syscall.ENOENT, syscall.ENXIO, syscall.ENODEV, syscall.ENOTDIR}, absent: true, elsewhere: true,
			directory: "a part of its path is missing, or is not a directory",
			device:    "switch the TPM on in the firmware's settings, load its driver, or name its device with --tpm-device",
			process:   "install this program again: its file is gone",
		},
	}
}

// find returns the first row with a number that err wraps.
func find(err error) (row, bool) {
	for _, r := range rows() {
		if slices.ContainsFunc(r.numbers, func(n syscall.Errno) bool { return errors.Is(err, n) }) {
			return r, true
		}
	}
	return row{}, false
}

// Directory returns what can be done about an error of a file or a lock in a directory, empty if
// err has no row. flag is the flag that names the directory. It is empty if there is none.
func Directory(err error, flag string) string {
	r, ok := find(err)
	if !ok || r.directory == "" {
		return ""
	}
	if r.elsewhere && flag != "" {
		return r.directory + "; or name another directory with " + flag
	}
	return r.directory
}

// Device returns what can be done about an error of a TPM device, and whether it means that there
// is none. The hint is empty if err has no row.
func Device(err error) (hint string, absent bool) {
	r, _ := find(err)
	return r.device, r.absent
}

// Process returns what can be done about a program that did not start, empty if err has no row.
func Process(err error) string {
	r, _ := find(err)
	return r.process
}
