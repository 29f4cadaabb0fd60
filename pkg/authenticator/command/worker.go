// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"errors"
	"time"

	"github.com/spf13/cobra"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
)

// graceAfterDeadline is the time in which a worker can record that its deadline has passed.
const graceAfterDeadline = 5 * time.Second

func (i *invocation) workerCommand() *cobra.Command {
	var detached bool
	c := &cobra.Command{
		Use:    workerName,
		Short:  "Get a certificate where one is wanted, and end; the root command starts this",
		Hidden: true,
		Args:   cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			a, err := i.load()
			if err != nil {
				return err
			}
			if detached {
				logToFile(a)
			}
			return i.work(cmd.Context(), a)
		},
	}
	c.Flags().BoolVar(&detached, detachedFlag, false, "log to a file in the certificate directory")
	return c
}

// work ends soon after the worker's deadline, even if something hangs.
func (i *invocation) work(ctx context.Context, a *authenticator.Authenticator) error {
	done := make(chan error, 1)
	go func() { done <- a.Work(ctx) }()
	select {
	case err := <-done:
		return err
	case <-time.After(i.deadline() + graceAfterDeadline):
		return &reason.Failure{Reason: reason.WorkerUnavailable, Err: errors.New("worker: overran its deadline")}
	}
}

// logToFile is a best effort: a full disk must not keep a worker from trying.
func logToFile(a *authenticator.Authenticator) {
	if log, err := a.OpenLog(); err == nil {
		_ = logInto(log)
	}
}
