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

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
)

// resetLockWait bounds how long a reset waits for the lock after it has ended the worker.
const resetLockWait = 10 * time.Second

// PlanReset returns what Reset would remove now, and the reasons why it would keep a file although
// the name is one of ours. It changes nothing.
func (a *Authenticator) PlanReset(envFile string) (own []string, left []error, err error) {
	if !filepath.IsAbs(a.node.Dir().Path()) {
		return nil, nil, reason.AsFailure(a.node.Invalid)
	}
	for _, path := range a.filesOutside(envFile) {
		ok, err := cache.Removable(path)
		if err != nil {
			left = append(left, err)
		}
		if ok {
			own = append(own, path)
		}
	}
	switch err := a.node.Dir().Check(); {
	case errors.Is(err, fs.ErrNotExist):
		return own, left, nil
	case err != nil:
		return own, left, reason.AsFailure(err)
	}
	certs, problems := a.node.Dir().OwnFiles(kubelet.IsCopy)
	return append(own, certs...), append(left, problems...), nil
}

// filesOutside returns this program's files outside the certificate directory. The environment file
// is the first to go: without it the kubelet does not use this program, even if other files remain.
func (a *Authenticator) filesOutside(envFile string) []string {
	if a.node.Note.Usable() {
		return []string{envFile, a.node.Note.Path()}
	}
	return []string{envFile}
}

// Reset removes this program's files from the machine: those in the certificate directory, the
// note, and the kubelet's environment file. It ends a running worker first. removed has the removed
// files. left has the reasons why it kept a file although the name is one of ours.
func (a *Authenticator) Reset(ctx context.Context, envFile string) (removed []string, left []error, err error) {
	if !filepath.IsAbs(a.node.Dir().Path()) {
		return nil, nil, reason.AsFailure(a.node.Invalid)
	}
	for _, path := range a.filesOutside(envFile) {
		gone, err := cache.Remove(path)
		if err != nil {
			left = append(left, err)
		}
		if gone {
			removed = append(removed, path)
		}
	}
	if err := a.node.Dir().Check(); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return removed, left, nil
		}
		return removed, left, reason.AsFailure(err)
	}
	lock, err := a.endWorker(ctx)
	if err != nil {
		return removed, left, reason.AsFailure(err)
	}
	defer lock.Unlock()
	certs, problems := lock.Reset(kubelet.IsCopy)
	return append(removed, certs...), append(left, problems...), nil
}

// endWorker kills a running worker and takes the lock. A worker can be killed at any point.
func (a *Authenticator) endWorker(ctx context.Context) (*cache.Lock, error) {
	ctx, cancel := context.WithTimeout(ctx, resetLockWait)
	defer cancel()
	if id := a.node.Dir().Worker(); id.Alive() {
		if err := syscall.Kill(id.PID, syscall.SIGKILL); err != nil {
			return nil, reason.WorkerUnavailable.Failure("", fmt.Errorf("end worker %d: %w", id.PID, err))
		}
	}
	return a.node.Dir().WaitLock(ctx)
}
