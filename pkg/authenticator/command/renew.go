// SPDX-License-Identifier: Apache-2.0

package command

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"
)

// renewTimeout is the default of --timeout. It is that of prepareWait.
const renewTimeout = 3*time.Minute + 30*time.Second

func (i *invocation) renewCommand() *cobra.Command {
	var timeout time.Duration
	c := &cobra.Command{
		Use:   "renew",
		Short: "Replace the certificate now, and end the pause after a denial or failure",
		Long: `Replace the node's certificate now, although it is not due, or get the first one. It ends the pause after a denial or a failure, says
what the request waits for, and fails as the request does. The certificate in use stays until there is a new one, and the kubelet
takes that within 30 s. It takes the flags that the kubelet's kubeconfig gives the plugin, unless --config is given. A flag on the
command line wins.`,
		Example: example(i.Name, `
# after the cause of a denial is gone
{} renew`),
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if timeout <= 0 {
				return usage(fmt.Errorf("--timeout %s: must be more than 0", timeout))
			}
			a, _, err := i.asKubelet()
			if err != nil {
				return err
			}
			leaf, err := a.Renew(cmd.Context(), timeout, i.say)
			if err != nil {
				return err
			}
			i.tellCertificate(leaf)
			return nil
		},
	}
	c.Flags().DurationVar(&timeout, "timeout", renewTimeout, "longest wait; after it the worker continues")
	return c
}
