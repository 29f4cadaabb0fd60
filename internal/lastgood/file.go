// SPDX-License-Identifier: Apache-2.0

package lastgood

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/bounded"
)

// File is the last known good content of a file. While the file is invalid or missing, the last
// good content stays in use. It is safe for concurrent use.
type File[T any] struct {
	// Name prefixes errors about reading. Path is the file's. A file of more than MaxSize bytes is
	// invalid.
	Name, Path string
	MaxSize    int64
	// MaxAge is how long ago the file may have been read. At 0 each call reads it.
	MaxAge time.Duration
	// Reparse: see Value.Reparse.
	Reparse bool
	// Parse returns the content's value, or why the content is invalid.
	Parse func([]byte) (T, error)

	refresher Refresher
	value     Value[T]
}

// Get returns the file's value at the time now, or the last good one. The value stays the same
// until the file's content changes.
func (f *File[T]) Get(now time.Time) (T, error) {
	f.refresher.Refresh(now, f.MaxAge, f.refresh)
	value, ok := f.value.Get()
	if ok {
		return value, nil
	}
	if err := f.value.Problem(); err != nil {
		return value, err
	}
	return value, fmt.Errorf("%s: %w", f.Name, errNone)
}

var errNone = errors.New("there is none yet")

// Problem returns why the last call of Get did not use the file's content, nil if it did.
func (f *File[T]) Problem() error { return f.value.Problem() }

// LastRead returns when the file was last read and valid, zero if it never was.
func (f *File[T]) LastRead() time.Time { return f.value.LastRead() }

func (f *File[T]) refresh() {
	content, err := bounded.ReadFile(f.Path, f.MaxSize)
	if err != nil {
		f.value.Fail(fmt.Errorf("%s: %w", f.Name, err))
		return
	}
	f.value.Reparse = f.Reparse
	sum := sha256.Sum256(content)
	// Problem returns it
	_ = f.value.Offer(string(sum[:]), func() (T, error) { return f.Parse(content) })
}
