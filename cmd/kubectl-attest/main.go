// SPDX-License-Identifier: Apache-2.0

// kubectl-attest is a plugin of kubectl for operators: who has attested, who waits and why, and
// what keeps a cluster from attesting its nodes.
package main

import (
	"os"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/attestctl"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
)

// version and commit are set by the linker.
var version, commit = "devel", "unknown"

func main() {
	ctx, _ := cli.Signalled() // until the process ends
	os.Exit(attestctl.Program{Version: version, Commit: commit}.Run(ctx, cli.Process{
		Args: os.Args[1:], Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Getenv: os.Getenv,
	}))
}
