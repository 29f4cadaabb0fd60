// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"fmt"
	"time"
)

const pollInterval = 25 * time.Millisecond

// poll calls check until it returns nil or the context ends; then the last
// reason why not is part of the error.
func poll(ctx context.Context, what string, check func(context.Context) error) error {
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w (last: %w)", what, ctx.Err(), err)
		case <-tick.C:
		}
	}
}

// pollWhile is poll that also gives up as soon as the process ends.
func pollWhile(ctx context.Context, p *Process, what string, check func(context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-p.Done():
			cancel()
		case <-ctx.Done():
		}
	}()
	err := poll(ctx, what, check)
	if err == nil {
		return nil
	}
	if p.ended() {
		if failure := p.Err(); failure != nil {
			return fmt.Errorf("wait for %s: %w", what, failure)
		}
		return fmt.Errorf("wait for %s: %s has exited\n%s", what, p.name, p.LogTail())
	}
	return fmt.Errorf("%w\n%s", err, p.LogTail())
}
