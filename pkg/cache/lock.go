// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/gofrs/flock"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
)

// ErrLocked says that another process holds the lock.
var ErrLocked = errors.New("the lock is held by another process")

// Lock is the right to write into the directory. It ends when the process that holds it ends.
//
// Its file names the worker. A run that gets the lock, and finds no such process alive, starts a
// worker. It writes the name before it releases the lock. So there is one worker, however many runs
// there are.
type Lock struct {
	dir   Dir
	flock *flock.Flock
}

// TryLock takes the lock or returns ErrLocked. It creates the directory.
func (d Dir) TryLock() (*Lock, error) {
	l, err := d.newLock()
	if err != nil {
		return nil, err
	}
	ok, err := l.flock.TryLock()
	return l.taken(ok, err)
}

// WaitLock takes the lock, waiting for it until ctx ends.
func (d Dir) WaitLock(ctx context.Context) (*Lock, error) {
	l, err := d.newLock()
	if err != nil {
		return nil, err
	}
	ok, err := l.flock.TryLockContext(ctx, 5*time.Millisecond)
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		err = nil
	}
	return l.taken(ok, err)
}

func (d Dir) newLock() (*Lock, error) {
	if err := d.Create(); err != nil {
		return nil, err
	}
	// With a link or a directory in the lock's place each attempt would fail.
	if info, err := os.Lstat(d.File(LockFile)); err == nil && !info.Mode().IsRegular() {
		if _, err := d.SetAside(LockFile, time.Now()); err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, err
		}
	}
	return &Lock{dir: d, flock: flock.New(d.File(LockFile), flock.SetFlag(os.O_CREATE|os.O_RDWR|syscall.O_NOFOLLOW))}, nil
}

func (l *Lock) taken(ok bool, err error) (*Lock, error) {
	if err != nil {
		_ = l.flock.Close()
		return nil, &WriteError{l.dir.File(LockFile), err}
	}
	if !ok {
		_ = l.flock.Close()
		return nil, fmt.Errorf("%s: %w", l.dir.File(LockFile), ErrLocked)
	}
	return l, nil
}

// Unlock releases the lock.
func (l *Lock) Unlock() { _ = l.flock.Close() }

// Clean removes what a crash in the middle of a write left behind.
func (l *Lock) Clean() { l.dir.clean("*", 0) }

// NameWorker writes which process is the worker. The zero ID means that there is no worker yet.
// Readers take no lock. The file is emptied only for the zero ID. So a reader never finds it empty
// while the same worker is named again.
func (l *Lock) NameWorker(id process.ID) error {
	path, flags := l.dir.File(LockFile), os.O_WRONLY|syscall.O_NOFOLLOW
	if id == (process.ID{}) {
		flags |= os.O_TRUNC
	}
	f, err := os.OpenFile(path, flags, 0)
	if err != nil {
		return &WriteError{path, err}
	}
	content := id.String() + "\n" + process.BootID() + "\n"
	if _, err = f.WriteString(content); err == nil {
		err = f.Truncate(int64(len(content)))
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return &WriteError{path, err}
	}
	return nil
}

// Worker returns the process last named as the worker. It is the zero ID if there is none, or only
// one of an earlier boot. The process may have ended.
func (d Dir) Worker() process.ID {
	data, _, err := d.Read(LockFile)
	if err != nil {
		return process.ID{}
	}
	id, boot, _ := strings.Cut(string(data), "\n")
	if strings.TrimSuffix(boot, "\n") != process.BootID() {
		return process.ID{}
	}
	return process.Parse(id)
}
