// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

// Latest keeps the last good one of the contents that an inventory has one after another, as those of a ConfigMap. The zero value waits
// for the first. It may be used by several at a time.
type Latest struct {
	offers sync.Mutex // held by Offer
	// verdict is what Parse said of the content of that sum.
	sum     [sha256.Size]byte
	verdict error

	mu      sync.Mutex
	good    *Inventory
	problem error
}

// Offer takes over new content, or says why it will not do; then the last good one stays in use. Content that was offered just before
// costs nothing.
func (l *Latest) Offer(content []byte) error {
	l.offers.Lock()
	defer l.offers.Unlock()
	var good *Inventory
	if sum := sha256.Sum256(content); sum != l.sum { // nothing hashes to the zero value
		inventory, err := Parse(content) // which takes long, and nobody waits for it who needs the last good one
		if err == nil {
			good = inventory
		}
		l.sum, l.verdict = sum, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if good != nil {
		l.good = good
	}
	l.problem = l.verdict
	return l.problem
}

// Fail notes that the content cannot be had. The last good one stays in use.
func (l *Latest) Fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.problem = err
}

// Inventory returns the last good one, or an error if there has been none.
func (l *Latest) Inventory() (*Inventory, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.good != nil:
		return l.good, nil
	case l.problem != nil:
		return nil, l.problem
	}
	return nil, errors.New("inventory: there is none yet")
}

// Problem returns what is wrong with what came last, nil if that is in use.
func (l *Latest) Problem() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.problem
}

// File reads an inventory from a file, again and again. While the file holds no inventory, or is gone, the last good one stays in
// use. Who wants no machine to be known any more writes an empty list.
type File struct {
	path     string
	interval time.Duration
	latest   Latest
	shared   Shared
}

// NewFile returns a File that reads anew what it read an interval ago or longer; each time if the interval is 0. It reads nothing yet.
func NewFile(path string, interval time.Duration) *File {
	return &File{path: path, interval: interval}
}

// Inventory returns what the file holds at the time now, or held last. It is the same pointer until the content changes.
func (f *File) Inventory(now time.Time) (*Inventory, error) {
	f.shared.Refresh(now, f.interval, f.refresh)
	return f.latest.Inventory()
}

// Problem returns what kept the last call of Inventory from using what is in the file, nil if nothing did.
func (f *File) Problem() error { return f.latest.Problem() }

func (f *File) refresh() {
	content, err := read(f.path)
	if err != nil {
		f.latest.Fail(fmt.Errorf("inventory: %w", err))
		return
	}
	_ = f.latest.Offer(content) // Problem tells
}

// read reads no more than Parse would look at.
func read(path string) ([]byte, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }() // it was only read
	var content bytes.Buffer
	if _, err := content.ReadFrom(io.LimitReader(file, MaxSize+1)); err != nil {
		return nil, err
	}
	return content.Bytes(), nil
}
