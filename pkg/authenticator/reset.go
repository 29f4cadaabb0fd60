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

// resetLockWait bounds how long a reset waits for the lock after it has ended the worker.
const resetLockWait = 10 * time.Second

// Reset removes this program's files from the machine: those in the certificate directory, the
// note, and the kubelet's environment file. It ends a running worker first. removed has the removed
// files. left has the reasons why it kept a file although the name is one of ours.
func (a *Authenticator) Reset(ctx context.Context, envFile string) (removed []string, left []error, err error) {
	if !filepath.IsAbs(a.dir.Path()) {
		return nil, nil, AsFailure(a.invalid)
	}
	// Remove this file first: without it the kubelet does not use this program, even if other files
	// remain.
	paths := []string{envFile}
	if a.note.usable() {
		paths = append(paths, a.note.dir.File(a.note.name))
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
	if err := a.dir.Check(); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return removed, left, nil
		}
		return removed, left, AsFailure(err)
	}
	lock, err := a.endWorker(ctx)
	if err != nil {
		return removed, left, AsFailure(err)
	}
	defer lock.Unlock()
	kept, problems := lock.Reset(kubelet.IsCopy)
	return append(removed, kept...), append(left, problems...), nil
}

// endWorker kills a running worker and takes the lock. A worker can be killed at any point.
func (a *Authenticator) endWorker(ctx context.Context) (*cache.Lock, error) {
	ctx, cancel := context.WithTimeout(ctx, resetLockWait)
	defer cancel()
	if id := a.dir.Worker(); id.Alive() {
		if err := syscall.Kill(id.PID, syscall.SIGKILL); err != nil {
			return nil, &Failure{WorkerUnavailable, "", fmt.Errorf("end worker %d: %w", id.PID, err)}
		}
	}
	return a.dir.WaitLock(ctx)
}
