// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"
)

const lockRetry = 200 * time.Millisecond

// lockFile takes an exclusive flock and gives it back through the returned
// function. The kernel also gives it back if this process is killed.
func lockFile(ctx context.Context, path string, progress io.Writer) (func(), error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600) //nolint:gosec // G703: the test bed names it
	if err != nil {
		return nil, err
	}
	for said := false; ; {
		err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { _ = file.Close() }, nil // closing releases the lock
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			return nil, errors.Join(fmt.Errorf("flock %s: %w", path, err), file.Close())
		}
		if !said {
			say(progress, "waiting for another process that builds the same (it holds %s)", path)
			said = true
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(fmt.Errorf("wait for %s: %w", path, ctx.Err()), file.Close())
		case <-time.After(lockRetry):
		}
	}
}
