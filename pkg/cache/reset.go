// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/trustedfile"
)

// Remove deletes a file durably if this program could have written it: a regular file of this user.
// It follows no link. A file that does not exist is no error, and removes nothing.
func Remove(path string) (removed bool, err error) {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("%s: %w", path, bare(err))
	}
	const hint = "remove it yourself if nothing needs it"
	switch {
	case info.Mode()&fs.ModeSymlink != 0:
		return false, &trustedfile.Error{Path: path, Problem: "is a symbolic link", Hint: hint}
	case !info.Mode().IsRegular():
		return false, &trustedfile.Error{Path: path, Problem: "is not a regular file", Hint: hint}
	case !trustedfile.OwnedByUs(info):
		return false, &trustedfile.Error{Path: path, Problem: "belongs to another user", Hint: hint}
	}
	if err := os.Remove(path); err != nil {
		return false, &WriteError{path, err}
	}
	if err := At(filepath.Dir(path)).sync(); err != nil {
		return true, &WriteError{path, err}
	}
	return true, nil
}

// Reset removes all that this program keeps in the directory, and the directory if nothing else is
// in it. bootstrap reports whether a bootstrap.kubeconfig is this program's. The errors say why a
// file with one of its names was kept. The lock file is removed last. The caller then releases the
// lock.
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
				err = &damagedFileError{l.dir.File(name), "is not a copy that this program made"}
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
	// This fails if the directory is not empty, or is a link that somebody made.
	if syscall.Rmdir(l.dir.path) == nil {
		removed = append(removed, l.dir.path)
		if err := At(filepath.Dir(l.dir.path)).sync(); err != nil {
			left = append(left, &WriteError{l.dir.path, err})
		}
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
