// SPDX-License-Identifier: Apache-2.0

// Package tpm uses the node's TPM 2.0: its endorsement keys, its attestation key, and the proof
// that answers a challenge. It does not know Kubernetes.
//
// It never writes to the TPM: no NV index, no persistent key. It flushes everything that it loads.
// The one exception is NSMRequest, which defines an NV index and removes it again.
package tpm

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/gofrs/flock"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/trustedfile"
)

// LockFile is the name of the lock in Options.LockDir.
const LockFile = "kubelet-authenticator-tpm.lock"

// lockWait is how long Run waits until another process releases the TPM. On the slowest known chip,
// making an RSA key took 20 s.
const lockWait = 30 * time.Second

// Options say which TPM is used.
type Options struct {
	// Device is a character device, or the Unix socket of a software TPM. Default: /dev/tpmrm0,
	// then /dev/tpm0.
	Device string
	// LockDir is a directory that only this user can write, so that no other user can hold the lock
	// or replace it by a link. It is created if it does not exist.
	LockDir string
}

// TPM is an open TPM, valid in the function that Run calls.
type TPM struct {
	conn *conn
	// underWay names the last command that was sent.
	underWay *atomic.Pointer[string]
	// observe is called for each command, if set.
	observe func(command string, took time.Duration, err error)
	// properties, indices and persistent cache answers of the TPM. They are nil before the first
	// answer.
	properties map[uint32]uint32
	indices    []uint32
	persistent []uint32
}

// LockTimeoutError says that another process held the TPM's lock for as long as Run waits.
type LockTimeoutError struct{ Path string }

func (e *LockTimeoutError) Error() string {
	return fmt.Sprintf("TPM: another process has held the lock %s for %v", e.Path, lockWait)
}

// OpenError says that no TPM could be opened. It wraps one error for each device. They distinguish
// an absent TPM from one that is in use.
type OpenError struct{ Tried []error }

func (e *OpenError) Error() string {
	return "no TPM can be opened: " + strings.ReplaceAll(errors.Join(e.Tried...).Error(), "\n", "; ")
}
func (e *OpenError) Unwrap() []error { return e.Tried }

// UntrustedLockError says that another user could hold the lock for ever, or put a link in its
// place. Problem names the directory or the file.
type UntrustedLockError struct{ Problem string }

func (e *UntrustedLockError) Error() string { return "TPM: lock: " + e.Problem }

// LockError says that the lock, or the directory for it, could not be made or locked.
type LockError struct {
	// Path is the lock's.
	Path string
	Err  error
}

func (e *LockError) Error() string {
	var path *fs.PathError
	if errors.As(e.Err, &path) { // its text names the path
		return fmt.Sprintf("TPM: lock: %v", e.Err)
	}
	return fmt.Sprintf("TPM: lock %s: %v", e.Path, e.Err)
}
func (e *LockError) Unwrap() error { return e.Err }

// Run opens the TPM, calls f and closes it. Meanwhile no other process of this program uses the
// TPM.
//
// It returns as soon as ctx ends, although a TPM cannot be interrupted. Then f continues in the
// background until the current command returns. Further commands fail, loaded objects are flushed,
// and only then the lock is released. So f must not touch what its caller continues to use.
func Run[T any](ctx context.Context, o Options, f func(*TPM) (T, error)) (T, error) {
	var none T
	unlock, err := lock(ctx, o.LockDir)
	if err != nil {
		return none, err
	}
	type result struct {
		value T
		err   error
	}
	done := make(chan result, 1)
	var underWay atomic.Pointer[string]
	go func() {
		value, err := use(ctx, o.Device, &underWay, f)
		unlock()
		done <- result{value, err}
	}()
	select {
	case r := <-done:
		return r.value, r.err
	case <-ctx.Done():
		if command := underWay.Load(); command != nil {
			return none, &commandError{*command, ctx.Err()}
		}
		return none, fmt.Errorf("TPM: open: %w", ctx.Err())
	}
}

func use[T any](ctx context.Context, device string, underWay *atomic.Pointer[string], f func(*TPM) (T, error)) (T, error) {
	devices := []string{device}
	if device == "" {
		// the first one goes through the kernel's resource manager
		devices = []string{"/dev/tpmrm0", "/dev/tpm0"}
	}
	c, err := open(ctx, devices)
	if err != nil {
		var none T
		return none, err
	}
	defer c.close()
	return f(&TPM{conn: c, underWay: underWay})
}

// lock waits for the lock until ctx ends, and for lockWait at most.
func lock(ctx context.Context, dir string) (unlock func(), err error) {
	path := filepath.Join(dir, LockFile)
	if err := os.MkdirAll(dir, 0o700); errors.Is(err, syscall.ENOTDIR) {
		return nil, &UntrustedLockError{fmt.Sprintf("%s, or a part of its path, is not a directory", dir)}
	} else if err != nil {
		return nil, &LockError{path, err}
	}
	info, err := os.Stat(dir)
	if err != nil {
		return nil, &LockError{path, err}
	}
	if problem := trustedfile.Problem(info); problem != "" {
		return nil, &UntrustedLockError{fmt.Sprintf("directory %s %s", dir, problem)}
	}
	l := flock.New(path, flock.SetFlag(os.O_CREATE|os.O_RDWR|syscall.O_NOFOLLOW))
	wait, cancel := context.WithTimeout(ctx, lockWait)
	defer cancel()
	_, err = l.TryLockContext(wait, 10*time.Millisecond)
	if err == nil {
		return func() { _ = l.Close() }, nil
	}
	_ = l.Close()
	switch {
	case wait.Err() != nil && ctx.Err() == nil:
		return nil, &LockTimeoutError{path}
	case ctx.Err() != nil:
		return nil, fmt.Errorf("TPM: lock: %w", ctx.Err())
	case errors.Is(err, syscall.ELOOP):
		return nil, &UntrustedLockError{path + " is a symbolic link"}
	}
	return nil, &LockError{path, err}
}
