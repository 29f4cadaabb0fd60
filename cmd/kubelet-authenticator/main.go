// SPDX-License-Identifier: Apache-2.0

// A run ends within milliseconds and needs one thread. So the Go runtime need not read the CPU
// limit of the cgroup.
//
//go:debug containermaxprocs=0
//go:debug updatemaxprocs=0

// kubelet-authenticator is a client-go exec credential plugin for kubelets that attest which
// machine they run on.
package main

import (
	"os"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/command"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/auto"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
)

// version, commit and commitTime are set by the linker.
var version, commit, commitTime = "devel", "unknown", ""

func main() {
	os.Exit(command.Program{
		Name:            "kubelet-authenticator",
		Version:         version,
		Commit:          commit,
		CommitTime:      commitTime,
		Providers:       providers(),
		DefaultProvider: tpm.Name,
		Choose:          auto.Chooser{}.Choose,
		FlagValues:      flagValues,
	}.Main())
}
