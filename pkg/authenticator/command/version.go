// SPDX-License-Identifier: Apache-2.0

package command

import (
	"github.com/spf13/cobra"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/buildinfo"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/outputformat"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
)

func (i *invocation) versionCommand() *cobra.Command {
	c := buildinfo.Command(i.Name, i.buildInfo(), i.Stdout, noArgs, usage)
	c.Example = example(i.Name, "{} version --output=json")
	completeFlag(c, "output", []string{outputformat.JSON, outputformat.YAML})
	return c
}

// buildInfo describes this binary.
func (i *invocation) buildInfo() buildinfo.Info {
	info := buildinfo.Info{Version: i.Version, Commit: i.Commit, ExecAPI: authenticator.ExecAPIVersions(), Protocols: map[string][]string{}}
	for _, p := range i.Providers {
		info.Protocols[p.Name] = p.Versions
	}
	return info
}
