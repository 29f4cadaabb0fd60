// SPDX-License-Identifier: Apache-2.0

package command

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestatus"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
)

func (i *invocation) renewCommand() *cobra.Command {
	var timeout time.Duration
	c := &cobra.Command{
		Use:   "renew",
		Short: "Replace the certificate now, and end the pause after a denial or failure",
		Long: `Replace the node's certificate now, although it is not due, or get the first one. It ends the pause after a denial or a failure, says
what the request waits for, and fails as the request does. The certificate in use stays until there is a new one. The kubelet uses the
new one from its next call of this program on: within checkInterval, 15 minutes by default, or when it is restarted. It takes the flags that the kubelet's kubeconfig gives the plugin, unless --config is given. A flag on the
command line wins.`,
		Example: example(i.Name, `
# after the cause of a denial is gone
{} renew`),
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			a, _, err := i.authenticatorToWait(timeout)
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
	c.Flags().DurationVar(&timeout, "timeout", authenticator.DefaultConfig().PrepareWait.Duration, "longest wait; after it the worker continues")
	return c
}

// authenticatorToWait returns the Authenticator that a run of the kubelet would have, and the
// kubelet's kubeconfig, for a command that waits for an answer to a request.
func (i *invocation) authenticatorToWait(timeout time.Duration) (*authenticator.Authenticator, kubelet.Kubeconfig, error) {
	if timeout <= 0 {
		return nil, kubelet.Kubeconfig{}, cli.Usage(fmt.Errorf("--timeout %s: must be more than 0", timeout))
	}
	a, kubeconfig, taken, err := i.asKubelet()
	if unknown := i.checkExecFlags(kubeconfig, taken); unknown != nil {
		return nil, kubeconfig, unknown
	}
	return a, kubeconfig, err
}

// checkExecFlags returns a Failure if the kubelet runs this program with flags that cannot be
// taken, or runs another program: with other settings a request would disturb the kubelet's own.
func (i *invocation) checkExecFlags(k kubelet.Kubeconfig, taken *nodestatus.ExecFlags) error {
	problem := ""
	switch {
	case i.root.PersistentFlags().Changed("config"):
		return nil
	case taken != nil:
		problem = taken.Problem
	case k.Kind == kubelet.Ours:
		problem = "its user is another program, " + k.Command
	}
	if problem == "" {
		return nil
	}
	return &reason.Failure{Reason: reason.Configuration, Hint: "run the program that the kubeconfig names, as root; or name the configuration with --config",
		Err: fmt.Errorf("%s: the flags that the kubelet uses are not known: %.256s", k.Path, problem)}
}
