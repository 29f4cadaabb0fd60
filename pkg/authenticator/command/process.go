// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
)

// Main executes the process's command line and returns its exit code. A main function has to call
// nothing else.
func (p Program) Main() int {
	stdout, err := protect()
	if err != nil {
		_, _ = fmt.Fprintf(os.Stderr, "%s: %v\n", p.Name, err)
		return reason.Unexpected.Code()
	}
	return p.Run(context.Background(), Process{Args: os.Args[1:], Stdin: os.Stdin, Stdout: stdout, Stderr: os.Stderr, Getenv: os.Getenv})
}

// protect prepares the process for a key: nobody else can read its files, and it leaves no core
// dump. It returns standard output for the one answer. Descriptor 1 becomes standard error, so that
// nothing a dependency prints can garble the answer.
func protect() (*os.File, error) {
	syscall.Umask(0o077)
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("prctl PR_SET_DUMPABLE: %w", err)
	}
	stdout, err := unix.FcntlInt(1, unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, fmt.Errorf("standard output: %w", err)
	}
	if err := unix.Dup3(2, 1, 0); err != nil {
		return nil, fmt.Errorf("standard error: %w", err)
	}
	return os.NewFile(uintptr(stdout), "stdout"), nil
}

// logInto redirects standard error into a file. So the file also gets the stack trace of a crash.
func logInto(file *os.File) error {
	return unix.Dup3(int(file.Fd()), 2, 0)
}
