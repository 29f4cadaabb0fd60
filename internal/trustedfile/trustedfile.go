// SPDX-License-Identifier: Apache-2.0

// Package trustedfile reads files that decide what this program does. It refuses a file if a user
// other than root and this program's user could have written or replaced it.
package trustedfile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/bounded"
)

// MaxSize bounds every file that is read, in bytes.
const MaxSize = 1 << 20

// maxLinks is how many symbolic links a path may have, as in Linux (path_resolution(7)).
const maxLinks = 40

// Error says that another user can write or replace a file, or that the file is not a regular file
// of at most MaxSize. It quotes nothing of the file.
type Error struct {
	// Path is the cause of the problem: the file, or a folder or link in its path.
	Path, Problem string
	// Hint says how to correct the problem.
	Hint string
}

func (e *Error) Error() string { return e.Path + ": " + e.Problem }

// Hint returns the hint of an *Error in err. It returns otherwise if err has none.
func Hint(err error, otherwise string) string {
	var untrusted *Error
	if errors.As(err, &untrusted) {
		return untrusted.Hint
	}
	return otherwise
}

// Problem says why a file or directory cannot be trusted, "" if it can. Root or this program's user
// must own it. Neither its group nor others may write it. The group root is no exception, because
// containers with any UID can have it. OpenSSH's StrictModes has the same rule.
func Problem(info fs.FileInfo) string {
	var uid uint32
	if stat, ok := info.Sys().(*syscall.Stat_t); ok {
		uid = stat.Uid
	}
	mode, write := info.Mode().Perm(), "write it"
	if info.IsDir() {
		write = "write into it"
	}
	switch {
	case !OwnedByUs(info):
		return fmt.Sprintf("belongs to another user (UID %d, mode %04o)", uid, mode)
	case mode&0o022 != 0:
		return fmt.Sprintf("others may %s (UID %d, mode %04o)", write, uid, mode)
	}
	return ""
}

// Remedy returns the commands that make a path trusted.
func Remedy(path string) string { return fmt.Sprintf("chown root %s; chmod go-w %[1]s", path) }

// Read returns the content of a regular file. The file and each folder in its path must pass
// Problem. OwnedByUs must hold for each symbolic link in the path. Others may write a folder with
// the sticky bit, such as /tmp, because they cannot replace our entries there. The error is an
// *Error, fs.ErrNotExist, or another error of the file system.
func Read(path string) ([]byte, error) {
	resolved, err := resolve(path)
	if err != nil {
		return nil, err
	}
	data, _, err := ReadAt(resolved)
	return data, err
}

// Check returns the error that Read would return because of owners and modes. The path may also be
// a directory.
func Check(path string) error {
	_, err := resolve(path)
	return err
}

// ReadAt is Read without the check of the folders in the path. The caller must have checked them.
// It refuses a symbolic link in place of the file.
func ReadAt(path string) ([]byte, fs.FileInfo, error) {
	data, info, err := readRegular(path)
	if err != nil {
		return nil, nil, err
	}
	if problem := Problem(info); problem != "" {
		return nil, nil, &Error{path, problem, Remedy(path)}
	}
	return data, info, nil
}

// ReadUntrusted returns the content of a regular file that anybody may have written. It returns
// nil if there is none.
func ReadUntrusted(path string) []byte {
	resolved, err := filepath.EvalSymlinks(path)
	if err != nil {
		return nil
	}
	data, _, err := readRegular(resolved)
	if err != nil {
		return nil
	}
	return data
}

// readRegular never blocks. It does not open a device, because opening a tape can rewind it.
func readRegular(path string) ([]byte, fs.FileInfo, error) {
	special := &Error{path, "is not a regular file", "put a regular file there"}
	info, err := os.Lstat(path)
	switch {
	case err != nil:
		return nil, nil, bare(path, err)
	case info.Mode()&fs.ModeSymlink != 0:
		return nil, nil, &Error{path, "is a symbolic link", "put a regular file there"}
	case !info.Mode().IsRegular():
		return nil, nil, special
	}
	// O_NONBLOCK: a fifo may have replaced the file since Lstat.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, bare(path, err)
	}
	defer func() { _ = f.Close() }() // it was only read
	if info, err = f.Stat(); err != nil {
		return nil, nil, bare(path, err)
	}
	if !info.Mode().IsRegular() {
		return nil, nil, special
	}
	data, err := bounded.ReadAll(f, MaxSize)
	if tooLong, ok := errors.AsType[*bounded.TooLongError](err); ok {
		return nil, nil, &Error{path, "is " + tooLong.Error(), "put a smaller file there"}
	}
	if err != nil {
		return nil, nil, bare(path, err)
	}
	return data, info, nil
}

// resolve returns a path without symbolic links. It removes ".." from the given path first, then
// follows the path from / as the kernel does, and checks each step.
func resolve(path string) (string, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	at, left, links := "/", strings.Split(path, "/"), 0
	root, err := os.Lstat(at)
	if err != nil {
		return "", err
	}
	if err := checkEntry(at, root, true); err != nil {
		return "", err
	}
	for len(left) > 0 {
		name := left[0]
		left = left[1:]
		if name == "" || name == "." {
			continue
		}
		// at has no links, so Join can resolve ".." of a link's target
		next := filepath.Join(at, name)
		info, err := os.Lstat(next)
		if err != nil {
			return "", bare(next, err)
		}
		if info.Mode()&fs.ModeSymlink == 0 {
			if err := checkEntry(next, info, len(left) > 0); err != nil {
				return "", err
			}
			at = next
			continue
		}
		// a link's mode means nothing
		if !OwnedByUs(info) {
			return "", &Error{next, "is a symbolic link of another user", "remove it, or chown -h root " + next}
		}
		if links++; links > maxLinks {
			return "", bare(path, syscall.ELOOP)
		}
		target, err := os.Readlink(next)
		if err != nil {
			return "", bare(next, err)
		}
		if filepath.IsAbs(target) {
			at = "/"
		}
		left = append(strings.Split(target, "/"), left...)
	}
	return at, nil
}

// checkEntry returns an *Error if an entry of the path cannot be trusted. folder says that the path
// continues below the entry.
func checkEntry(path string, info fs.FileInfo, folder bool) error {
	if folder && info.Mode()&fs.ModeSticky != 0 && OwnedByUs(info) {
		return nil
	}
	if problem := Problem(info); problem != "" {
		return &Error{path, problem, Remedy(path)}
	}
	return nil
}

// OwnedByUs reports whether root or this program's user owns a file.
func OwnedByUs(info fs.FileInfo) bool {
	stat, ok := info.Sys().(*syscall.Stat_t)
	return ok && (stat.Uid == 0 || int(stat.Uid) == os.Geteuid())
}

// bare replaces the operation and path of a file system error by the path.
func bare(path string, err error) error {
	var pathError *fs.PathError
	if errors.As(err, &pathError) {
		err = pathError.Err
	}
	return fmt.Errorf("%s: %w", path, err)
}
