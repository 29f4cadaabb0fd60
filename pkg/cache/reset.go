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

// Removable reports whether Remove would delete a file: it exists, and this program could have
// written it. The error says why an existing file would be kept.
func Removable(path string) (bool, error) {
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
	return true, nil
}

// Remove deletes a file durably if this program could have written it: a regular file of this user.
// It follows no link. A file that does not exist is no error, and removes nothing.
func Remove(path string) (removed bool, err error) {
	if ok, err := Removable(path); !ok {
		return false, err
	}
	if err := os.Remove(path); err != nil {
		return false, &WriteError{path, err}
	}
	if err := At(filepath.Dir(path)).sync(); err != nil {
		return true, &WriteError{path, err}
	}
	return true, nil
}

// OwnFiles returns the paths of the files in the directory that Reset removes, the lock file last.
// left has the reasons why Reset keeps a file although its name is one of ours. bootstrap says of a
// bootstrap kubeconfig's content whether this program made that copy.
func (d Dir) OwnFiles(bootstrap func(data []byte) bool) (own []string, left []error) {
	entries, err := os.ReadDir(d.path)
	if err != nil {
		return nil, []error{fmt.Errorf("certificate directory %s: %w", d.path, bare(err))}
	}
	var names []string
	for _, entry := range entries {
		if name := entry.Name(); name != LockFile && isOurs(name) {
			names = append(names, name)
		}
	}
	for _, name := range append(names, LockFile) {
		ok, err := Removable(d.File(name))
		if ok && name == BootstrapFile {
			var data []byte
			if data, _, err = d.Read(name); err == nil && !bootstrap(data) {
				err = &damagedFileError{d.File(name), "is not a copy that this program made"}
			}
		}
		switch {
		case errors.Is(err, fs.ErrNotExist): // deleted meanwhile
		case err != nil: // it may be the operator's
			left = append(left, err)
		case ok:
			own = append(own, d.File(name))
		}
	}
	return own, left
}

// Reset removes the OwnFiles, and the directory if nothing else is in it. The errors say why a file
// with one of its names was kept. The caller then releases the lock.
func (l *Lock) Reset(bootstrap func(data []byte) bool) (removed []string, left []error) {
	own, left := l.dir.OwnFiles(bootstrap)
	for _, path := range own {
		gone, err := Remove(path)
		if err != nil {
			left = append(left, err)
		}
		if gone {
			removed = append(removed, path)
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
