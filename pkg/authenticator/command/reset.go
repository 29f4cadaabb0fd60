// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/terminal"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/doctor"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
)

// resetFlags are the flags of reset.
type resetFlags struct {
	envFile                        string
	kubeconfig, yes, dryRun, force bool
}

func (i *invocation) resetCommand() *cobra.Command {
	var flags resetFlags
	c := &cobra.Command{
		Use:   "reset",
		Short: "Remove what this program keeps: certificate, key, state, copy of the bootstrap kubeconfig, environment file",
		Long: `Remove what this program keeps on the machine. It lists the files, asks, and lists what was removed. In a script, give --yes. These stay: the
configuration file, links, files of other users, and a bootstrap kubeconfig that prepare did not copy.

The next certificate then needs a bootstrap credential. Stop the kubelet first: it would start this program again. While a kubelet runs
with the kubeconfig, nothing is removed, unless --force is given.`,
		Example: example(i.Name, `
systemctl stop kubelet
{} reset --kubeconfig

# what it would remove
{} reset --kubeconfig --dry-run`),
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			config, err := i.settings()
			if err != nil {
				return err // a valid file might name another directory
			}
			a, _ := i.newAuthenticator(config, nil, "") // a reset needs no other valid settings
			return i.reset(cmd.Context(), a, config.KubeletKubeconfig, flags)
		},
	}
	c.Flags().StringVar(&flags.envFile, "env-file", kubelet.EnvFile, "environment file of the kubelet's unit")
	c.Flags().BoolVar(&flags.kubeconfig, "kubeconfig", false, "remove the kubelet's kubeconfig, too, if its user is this program")
	c.Flags().BoolVarP(&flags.yes, "yes", "y", false, "do not ask")
	c.Flags().BoolVar(&flags.dryRun, "dry-run", false, "list what would be removed, and remove nothing")
	c.Flags().BoolVar(&flags.force, "force", false, "remove the files although a kubelet runs with the kubelet's kubeconfig")
	return c
}

// reset plans, shows the plan, asks, and removes.
func (i *invocation) reset(ctx context.Context, a *authenticator.Authenticator, kubeconfig string, flags resetFlags) error {
	// 1. Plan.
	own, left, err := a.PlanReset(flags.envFile)
	if err != nil && len(own) == 0 {
		return err
	}
	if err != nil { // Reset removes what is outside the directory, and then returns it
		left = append(left, err)
	}
	if flags.kubeconfig {
		ours, err := isOurKubeconfig(kubeconfig)
		if err != nil {
			left = append(left, err)
		}
		if ours {
			own = append(own, kubeconfig)
		}
	}
	running, err := doctor.KubeletsOf(kubeconfig)
	if err != nil && !flags.force && !flags.dryRun {
		return &reason.Failure{Reason: reason.NotConfirmed, Hint: "--force removes the files although it is not known whether a kubelet runs", Err: fmt.Errorf("nothing was removed: find kubelets: %w", err)}
	}

	// 2. Show the plan.
	for _, path := range own {
		i.tell("to be removed: %s", path)
	}
	for _, pid := range running {
		i.tell("a kubelet runs with %s, process %d", kubeconfig, pid)
	}
	switch {
	case len(own) == 0 && len(left) == 0:
		i.tell("there is nothing to remove")
		return nil
	case len(own) == 0 || flags.dryRun:
		i.tellKept(left)
		return nil
	case len(running) > 0 && !flags.force:
		return kubeletRuns(kubeconfig)
	}

	// 3. Ask.
	if err := i.confirm(ctx, "Remove these files, the node's key among them?", flags.yes); err != nil {
		return err
	}

	if running, _ = doctor.KubeletsOf(kubeconfig); len(running) > 0 && !flags.force {
		return kubeletRuns(kubeconfig) // it was started meanwhile
	}

	// 4. Remove. A worker may have written files since, so it may be more than the plan has.
	removed, left, err := a.Reset(ctx, flags.envFile)
	if flags.kubeconfig && err == nil {
		gone, problem := removeKubeconfig(kubeconfig)
		if problem != nil {
			left = append(left, problem)
		}
		if gone {
			removed = append(removed, kubeconfig)
		}
	}
	for _, path := range removed {
		i.tell("removed %s", path)
	}
	i.tellKept(left)
	return err
}

func kubeletRuns(kubeconfig string) error {
	return &reason.Failure{
		Reason: reason.NotConfirmed, Hint: "systemctl stop kubelet; with --force the node becomes NotReady, unless it has a bootstrap credential",
		Err: fmt.Errorf("a kubelet runs with %s: nothing was removed", kubeconfig),
	}
}

func (i *invocation) tellKept(left []error) {
	for _, problem := range left {
		i.tell("kept: %s", problem)
	}
}

// confirm asks on a terminal. In a script --yes confirms.
func (i *invocation) confirm(ctx context.Context, question string, yes bool) error {
	if yes {
		return nil
	}
	err := terminal.Confirm(ctx, i.Stdin, i.Stderr, question)
	switch {
	case errors.Is(err, terminal.ErrNobody):
		return &reason.Failure{Reason: reason.NotConfirmed, Hint: "--yes confirms it in a script", Err: fmt.Errorf("nothing was removed: %w", err)}
	case errors.Is(err, terminal.ErrDeclined):
		return &reason.Failure{Reason: reason.NotConfirmed, Err: errors.New("nothing was removed")}
	}
	return err
}

// isOurKubeconfig reports whether the kubelet's kubeconfig exists and is ours.
func isOurKubeconfig(path string) (bool, error) {
	k := kubelet.ReadKubeconfig(path, "")
	if k.Kind == kubelet.Missing {
		return false, nil
	}
	if k.Kind != kubelet.Ours || !k.Alone {
		return false, &kubelet.ForeignError{Kubeconfig: k}
	}
	return cache.Removable(path)
}

// removeKubeconfig removes the kubelet's kubeconfig if it is ours.
func removeKubeconfig(path string) (bool, error) {
	if ours, err := isOurKubeconfig(path); !ours {
		return false, err
	}
	return cache.Remove(path)
}
