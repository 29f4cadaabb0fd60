// SPDX-License-Identifier: Apache-2.0

package command

import (
	"fmt"
	"os"
	"syscall"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller"
)

// Main runs the command line of the process and returns its exit code. A main function calls
// nothing else.
func (p Program) Main() int {
	// The process has the CA's key and the challenge keys in memory.
	syscall.Umask(0o077)
	if err := forbidDumps(); err != nil {
		_, _ = fmt.Fprintf(os.Stderr, "%s: %v\n", controller.Name, err)
		return cli.CodeUnexpected
	}
	ctx, cancel := cli.Signalled()
	defer cancel()
	return p.Run(ctx, Process{Args: os.Args[1:], Stdout: os.Stdout, Stderr: os.Stderr})
}
