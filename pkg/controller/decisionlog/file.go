// SPDX-License-Identifier: Apache-2.0

package decisionlog

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
)

// fileMode lets the group read the file, such as a sidecar that ships it.
const fileMode = 0o640

// File is a sink that appends to a file. It opens the path again if somebody renamed or removed the
// file, as logrotate does. Each batch is synced, so that it survives a crash of the machine.
type File struct {
	path string
	file *os.File
	// torn says that the file does not end with a line feed.
	torn bool
}

// NewFile returns a sink for a path. The directory must exist.
func NewFile(path string) *File { return &File{path: path} }

// Name returns "file".
func (*File) Name() string { return "file" }

// Write appends lines. A line that a failed write cut stays in the file. It is not valid JSON.
func (f *File) Write(_ context.Context, lines [][]byte) (int, error) {
	if err := f.open(); err != nil {
		return 0, err
	}
	data, prefix := bytes.Join(lines, nil), 0
	if f.torn {
		data, prefix = append([]byte{'\n'}, data...), 1
	}
	n, err := f.file.Write(data)
	if n > 0 {
		f.torn = data[n-1] != '\n'
	}
	written, left := 0, n-prefix
	for written < len(lines) && left >= len(lines[written]) {
		left -= len(lines[written])
		written++
	}
	if err == nil {
		// If the sync fails, the lines are in the file already: writing them again would not help.
		if err = f.file.Sync(); errors.Is(err, syscall.EINVAL) { // not a regular file
			err = nil
		}
	}
	return written, err
}

// open opens the path, unless the open file is still at the path.
func (f *File) open() error {
	if f.file != nil {
		current, err := os.Stat(f.path)
		mine, mineErr := f.file.Stat()
		if err == nil && mineErr == nil && os.SameFile(current, mine) {
			return nil
		}
		_ = f.file.Close() // each write was synced
		f.file = nil
	}
	file, err := os.OpenFile(f.path, os.O_RDWR|os.O_APPEND|os.O_CREATE, fileMode)
	if err != nil {
		return err
	}
	if f.torn, err = endsTorn(file); err != nil {
		return errors.Join(fmt.Errorf("%s: %w", f.path, err), file.Close())
	}
	f.file = file
	return nil
}

// endsTorn reports whether a file ends within a line: an earlier process may have been killed
// during a write.
func endsTorn(file *os.File) (bool, error) {
	info, err := file.Stat()
	if err != nil || !info.Mode().IsRegular() || info.Size() == 0 {
		return false, err
	}
	last := make([]byte, 1)
	if _, err := file.ReadAt(last, info.Size()-1); err != nil && !errors.Is(err, io.EOF) {
		return false, err
	}
	return last[0] != '\n', nil
}

// Close closes the file.
func (f *File) Close() error {
	if f.file == nil {
		return nil
	}
	return f.file.Close()
}
