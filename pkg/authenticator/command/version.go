// SPDX-License-Identifier: Apache-2.0

package command

import (
	"github.com/spf13/cobra"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
)

func (i *invocation) versionCommand() *cobra.Command {
	c := i.VersionCommand(i.Name, i.buildInfo())
	c.Example = example(i.Name, "{} version --output=json")
	return c
}

// buildInfo describes this binary.
func (i *invocation) buildInfo() cli.BuildInfo {
	info := cli.BuildInfo{Version: i.Version, Commit: i.Commit, ExecAPI: authenticator.ExecAPIVersions(), Protocols: map[string][]string{}}
	for _, p := range i.Providers {
		info.Protocols[p.Name] = p.Versions
	}
	return info
}
