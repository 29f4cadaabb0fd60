// SPDX-License-Identifier: Apache-2.0

package command

import (
	"github.com/spf13/cobra"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
)

func (i *invocation) resetCommand() *cobra.Command {
	var envFile string
	var kubeconfig bool
	c := &cobra.Command{
		Use:   "reset",
		Short: "Remove what this program keeps: certificate, key, state, copy of the bootstrap kubeconfig, environment file",
		Long: `Remove what this program keeps on the machine, and list what was removed. Stop the kubelet first: it would start this program again. Links,
other programs' files and the configuration file stay.`,
		Example: example(i.Name, `
systemctl stop kubelet
{} reset --kubeconfig`),
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			config, err := i.settings()
			if err != nil {
				return err // a valid file might name another directory
			}
			a, _ := i.newAuthenticator(config, nil, "") // a reset needs no other valid settings
			removed, left, err := a.Reset(cmd.Context(), envFile)
			if kubeconfig && err == nil {
				gone, problem := removeKubeconfig(config.KubeletKubeconfig)
				if problem != nil {
					left = append(left, problem)
				}
				if gone {
					removed = append(removed, config.KubeletKubeconfig)
				}
			}
			for _, path := range removed {
				i.tell("removed %s", path)
			}
			for _, problem := range left {
				i.tell("kept: %s", problem)
			}
			if err == nil && len(removed)+len(left) == 0 {
				i.tell("there is nothing to remove")
			}
			return err
		},
	}
	c.Flags().StringVar(&envFile, "env-file", kubelet.EnvFile, "environment file of the kubelet's unit")
	c.Flags().BoolVar(&kubeconfig, "kubeconfig", false, "remove the kubelet's kubeconfig, too, if its user is this program")
	return c
}

// removeKubeconfig removes the kubelet's kubeconfig if it is ours.
func removeKubeconfig(path string) (bool, error) {
	k := kubelet.ReadKubeconfig(path, "")
	if k.Kind == kubelet.Missing {
		return false, nil
	}
	if k.Kind != kubelet.Ours || !k.Alone {
		return false, &kubelet.ForeignError{Kubeconfig: k}
	}
	return cache.Remove(path)
}
