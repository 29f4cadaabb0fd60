// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"syscall"
)

// Remove deletes a file if it is one that this program could have written: a regular file of this user's. It follows no link. A file that
// is not there is no error, and removes nothing.
func Remove(path string) (removed bool, err error) {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("%s: %w", path, bare(err))
	}
	switch {
	case info.Mode()&fs.ModeSymlink != 0:
		return false, &UntrustedFileError{path, "is a symbolic link"}
	case !info.Mode().IsRegular():
		return false, &UntrustedFileError{path, "is not a regular file"}
	case !ownedByUs(info):
		return false, &UntrustedFileError{path, "belongs to another user"}
	}
	if err := os.Remove(path); err != nil {
		return false, &WriteError{path, err}
	}
	return true, nil
}

// Reset removes all that this program keeps in the directory, and the directory if nothing else is in it. bootstrap tells whether a
// bootstrap.kubeconfig is this program's. What is not removed although it has one of its names is among the errors. The lock goes last, and
// the caller gives it back.
func (l *Lock) Reset(bootstrap func(data []byte) bool) (removed []string, left []error) {
	entries, err := os.ReadDir(l.dir.path)
	if err != nil {
		return nil, []error{fmt.Errorf("certificate directory %s: %w", l.dir.path, bare(err))}
	}
	var names []string
	for _, entry := range entries {
		if name := entry.Name(); name != LockFile && isOurs(name) {
			names = append(names, name)
		}
	}
	for _, name := range append(names, LockFile) {
		if name == BootstrapFile {
			data, _, err := l.dir.Read(name)
			if err == nil && !bootstrap(data) {
				err = &UntrustedFileError{l.dir.File(name), "is not a copy that this program made"}
			}
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil { // it may be the operator's
				left = append(left, err)
				continue
			}
		}
		gone, err := Remove(l.dir.File(name))
		if err != nil {
			left = append(left, err)
		}
		if gone {
			removed = append(removed, l.dir.File(name))
		}
	}
	if syscall.Rmdir(l.dir.path) == nil { // unless something is in it, or it is a link that somebody made
		removed = append(removed, l.dir.path)
	}
	return removed, left
}

// isOurs reports whether a file has a name that this program gives.
func isOurs(name string) bool {
	ours := []string{CurrentFile, PendingFile, StateFile, LockFile, LogFile, BootstrapFile, oldLog(LogFile)}
	base, _, aside := strings.Cut(name, asideMark)
	if aside {
		name = base
	}
	if temp, ok := strings.CutPrefix(name, "."); ok && !aside {
		if base, _, ok := strings.Cut(temp, tempMark); ok {
			name = base
		}
	}
	return slices.Contains(ours, name)
}
