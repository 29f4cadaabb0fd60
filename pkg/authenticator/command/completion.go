// SPDX-License-Identifier: Apache-2.0

package command

import (
	"github.com/spf13/cobra"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/outputformat"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// completeValues registers shell completion for the values of flags. It switches off the completion
// of file names, since no command takes a file as an argument.
func (i *invocation) completeValues() {
	for _, name := range []string{"provider", "ek-template", "system-uuid-from"} {
		if values := i.flagValues(name); len(values) > 0 {
			cli.CompleteFlag(i.root, name, values)
		}
	}
	cli.CompleteFlag(i.root, "output", []string{outputformat.JSON, outputformat.YAML})
	for _, c := range append(i.root.Commands(), i.root) {
		c.ValidArgsFunction = cobra.NoFileCompletions
		for _, below := range c.Commands() {
			below.ValidArgsFunction = cobra.NoFileCompletions
		}
	}
}

// flagValues returns the values that a setting can have, nil if they are not known.
func (i *invocation) flagValues(flag string) []string {
	if flag == "provider" {
		names := make([]string, 0, len(i.Providers))
		for _, p := range i.Providers {
			names = append(names, p.Name)
		}
		if i.Choose != nil {
			names = append(names, provider.Auto)
		}
		return names
	}
	if i.FlagValues == nil {
		return nil
	}
	return i.FlagValues(flag)
}
