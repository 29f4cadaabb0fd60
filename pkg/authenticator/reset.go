// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"syscall"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
)

// resetLockWait is how long a reset waits for the lock after it has ended the worker.
const resetLockWait = 10 * time.Second

// Reset removes what this program keeps on the machine: what it put into the certificate directory, the note, and the kubelet's environment file. A
// worker that lives is ended first. It returns what it removed, and why other files were left alone although they have such a name.
func Reset(ctx context.Context, o Options, envFile string) (removed []string, left []error, err error) {
	if !filepath.IsAbs(o.dir.Path()) {
		return nil, nil, AsFailure(o.invalid)
	}
	// Without its file the kubelet is not started with us any more, whatever of us is left.
	var paths []string
	paths = append(paths, envFile)
	if o.note.usable() {
		paths = append(paths, o.note.dir.File(o.note.name))
	}
	for _, path := range paths {
		gone, err := cache.Remove(path)
		if err != nil {
			left = append(left, err)
		}
		if gone {
			removed = append(removed, path)
		}
	}
	if err := o.dir.Check(); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return removed, left, nil
		}
		return removed, left, AsFailure(err)
	}
	lock, err := o.endWorker(ctx)
	if err != nil {
		return removed, left, AsFailure(err)
	}
	defer lock.Unlock()
	kept, problems := lock.Reset(kubelet.IsCopy)
	return append(removed, kept...), append(left, problems...), nil
}

// endWorker takes the lock from a worker, which can be killed at any point.
func (o *Options) endWorker(ctx context.Context) (*cache.Lock, error) {
	ctx, cancel := context.WithTimeout(ctx, resetLockWait)
	defer cancel()
	if id := o.dir.Worker(); id.Alive() {
		if err := syscall.Kill(id.PID, syscall.SIGKILL); err != nil {
			return nil, &Failure{WorkerUnavailable, "", fmt.Errorf("end worker %d: %w", id.PID, err)}
		}
	}
	return o.dir.WaitLock(ctx)
}
