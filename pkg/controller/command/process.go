// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller"
)

// Main runs the command line of the process and returns its exit code. A main function calls
// nothing else.
func (p Program) Main() int {
	// The process has the CA's key and the challenge keys in memory.
	syscall.Umask(0o077)
	if err := forbidDumps(); err != nil {
		_, _ = fmt.Fprintf(os.Stderr, "%s: %v\n", controller.Name, err)
		return codeUnexpected
	}
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer cancel()
	// A second signal ends the process at once.
	context.AfterFunc(ctx, cancel)
	return p.Run(ctx, Process{Args: os.Args[1:], Stdout: os.Stdout, Stderr: os.Stderr})
}
