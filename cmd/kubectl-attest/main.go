// SPDX-License-Identifier: Apache-2.0

// kubectl-attest is a plugin of kubectl for operators: who has attested, who waits and why, and
// what keeps a cluster from attesting its nodes.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/attestctl"
)

// version and commit are set by the linker.
var version, commit = "devel", "unknown"

func main() {
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	context.AfterFunc(ctx, cancel) // a second signal ends it at once
	os.Exit(attestctl.Program{Version: version, Commit: commit}.Run(ctx, attestctl.Process{
		Args: os.Args[1:], Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Getenv: os.Getenv,
	}))
}
