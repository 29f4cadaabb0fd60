// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/enrol"
)

// rehearsalWait is the default longest wait for the verdict of a rehearsal. A controller that knows
// the machine takes some seconds.
const rehearsalWait = time.Minute

func (i *invocation) rehearseCommand() *cobra.Command {
	var timeout time.Duration
	c := &cobra.Command{
		Use:   "rehearse",
		Short: "Ask the controller whether this machine would get its certificate, and get none",
		Long: `Attest to node-attestation-controller as for a real certificate, and print its verdict. No certificate is issued, no record is
written, and the kubelet is not disturbed. The controller answers in audit mode, too, so this works before a cluster enforces attestation.

It asks with the node's certificate, or else with the credential in the kubelet's kubeconfig, or else with the bootstrap credential.
With a certificate it does not test the bootstrap token that the first real request needs, nor whether the old Node is deleted. In audit
mode it does not test suspensions.

It exits with 0 if the machine would get a certificate, with 21 and the reason if it would be denied, and with 23 if there is no verdict yet.`,
		Example: example(i.Name, `
# before the node is drained, with the configuration that it will get
{} rehearse --config=/usr/share/doc/kubelet-authenticator/examples/config.yaml`),
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			a, kubeconfig, err := i.authenticatorToWait(timeout)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			passed, err := a.Rehearse(ctx, kubeconfig.Path, i.say)
			if err != nil {
				return err
			}
			return i.printRehearsal(passed)
		},
	}
	c.Flags().DurationVar(&timeout, "timeout", rehearsalWait, "longest wait for the verdict")
	return c
}

func (i *invocation) printRehearsal(r *enrol.Rehearsal) error {
	_, err := fmt.Fprintf(i.Stdout, "passed: %s\n", r.Text)
	if r.OtherSigner != "" {
		i.tell("warning: this machine's settings name the signer %s, and the controller does not: a real request may be denied (signerName)", r.OtherSigner)
	}
	i.tell("asked %s with %s; kubectl attest describe %s shows the verdict for a day", r.Server, r.Credential, r.NodeName)
	return err
}
