// SPDX-License-Identifier: Apache-2.0

// Package cache is the certificate directory of the plugin. It holds the current certificate, the
// pending request, the result of the last worker, and the worker's lock. The package knows bytes
// and X.509, not Kubernetes.
//
// Readers take no lock: each file is replaced as a whole. In the certificate directory only the
// holder of the lock writes. Other directories of the program use Dir without a lock.
package cache

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"syscall"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/trustedfile"
)

// DefaultPath is the certificate directory unless the operator names another. It is not below
// /var/lib/kubelet, which CSI drivers mount into pods.
const DefaultPath = "/var/lib/kubelet-authenticator"

// The files of the directory.
const (
	CurrentFile   = "kubelet-authenticator-current.pem"
	PendingFile   = "kubelet-authenticator-pending.json"
	StateFile     = "kubelet-authenticator-state.json"
	LockFile      = "kubelet-authenticator.lock"
	LogFile       = "kubelet-authenticator-worker.log"
	BootstrapFile = "bootstrap.kubeconfig"
)

const (
	// maxFileSize bounds every file that is read, in bytes.
	maxFileSize = trustedfile.MaxSize
	// keptAside is how many files set aside are kept per name.
	keptAside = 3

	asideMark = ".set-aside-"
	tempMark  = ".tmp-"
)

// Dir is a certificate directory.
type Dir struct{ path string }

// At returns the certificate directory at path. It does no I/O.
func At(path string) Dir { return Dir{path: filepath.Clean(path)} }

// Path returns where the directory is.
func (d Dir) Path() string { return d.path }

// File returns the path of one of the directory's files.
func (d Dir) File(name string) string { return filepath.Join(d.path, name) }

// ForeignDirError says that the directory cannot be trusted: another user could put a file into it.
// This program neither repairs nor moves such a directory, which may belong to another program.
type ForeignDirError struct{ Path, Problem string }

func (e *ForeignDirError) Error() string {
	return fmt.Sprintf("certificate directory %s: %s", e.Path, e.Problem)
}

// WriteError says that something in the directory could not be written: the disk is full or
// read-only, or rights are missing.
type WriteError struct {
	Path string
	Err  error
}

func (e *WriteError) Error() string { return fmt.Sprintf("write %s: %v", e.Path, bare(e.Err)) }
func (e *WriteError) Unwrap() error { return e.Err }

// bare drops the operation and path of a file system error. Our own errors have them already.
func bare(err error) error {
	var path *fs.PathError
	if errors.As(err, &path) {
		return path.Err
	}
	var link *os.LinkError
	if errors.As(err, &link) {
		return link.Err
	}
	return err
}

// Check returns a *ForeignDirError if others than this user and root may write into the directory.
// The error is fs.ErrNotExist if there is none. Check changes nothing.
func (d Dir) Check() error {
	info, err := os.Stat(d.path)
	if err != nil {
		if errors.Is(err, syscall.ENOTDIR) {
			return &ForeignDirError{d.path, "a part of its path is not a directory"}
		}
		return fmt.Errorf("certificate directory %s: %w", d.path, bare(err))
	}
	if !info.IsDir() {
		return &ForeignDirError{d.path, "is not a directory"}
	}
	if problem := trustedfile.Problem(info); problem != "" {
		return &ForeignDirError{d.path, problem}
	}
	return nil
}

// Create makes the directory, 0700, durably, if there is none. It does not change an existing one,
// which may be /run by mistake.
func (d Dir) Create() error {
	if err := makeDir(d.path); err != nil && !errors.Is(err, syscall.ENOTDIR) {
		return &WriteError{d.path, err}
	}
	return d.Check()
}

// makeDir is a durable os.MkdirAll. An fsync of a directory does not cover its own entry in the
// parent directory.
func makeDir(path string) error {
	var changed []string
	for at := path; ; at = filepath.Dir(at) {
		if _, err := os.Stat(at); !errors.Is(err, fs.ErrNotExist) || at == filepath.Dir(at) {
			break
		}
		changed = append(changed, filepath.Dir(at))
	}
	if err := os.MkdirAll(path, 0o700); err != nil {
		return err
	}
	for _, parent := range changed {
		if err := At(parent).sync(); err != nil {
			return err
		}
	}
	return nil
}

// damagedFileError says that a file's content cannot be used. It quotes nothing: the content may be
// a key.
type damagedFileError struct{ Path, Problem string }

func (e *damagedFileError) Error() string { return fmt.Sprintf("%s: %s", e.Path, e.Problem) }

// Read returns a file's content and whether others may read it. The error is fs.ErrNotExist, an
// error for which MustBeSetAside returns true, or another error of the file system.
func (d Dir) Read(name string) (data []byte, exposed bool, err error) {
	data, info, err := trustedfile.ReadAt(d.File(name))
	if err != nil {
		return nil, false, err
	}
	return data, info.Mode().Perm()&0o044 != 0, nil
}

// Stamp identifies a version of a file: each Write gives the file another Stamp. It is zero for a
// file that cannot be found.
type Stamp struct {
	inode          uint64
	size, modified int64
}

// Modified returns when the file was last written, by this machine's clock.
func (s Stamp) Modified() time.Time { return time.Unix(0, s.modified) }

// Stamp returns the Stamp of a file. It is much cheaper than Read.
func (d Dir) Stamp(name string) Stamp {
	info, err := os.Lstat(d.File(name))
	if err != nil {
		return Stamp{}
	}
	stamp := Stamp{size: info.Size(), modified: info.ModTime().UnixNano()}
	if stat, ok := info.Sys().(*syscall.Stat_t); ok {
		stamp.inode = stat.Ino
	}
	return stamp
}

// Write replaces a file as a whole. After a crash at any point, the file has either the old or the
// new content. Once Write has returned nil, the new content is durable. Only the owner may read the
// file. Errors are *WriteError.
func (d Dir) Write(name string, data []byte) error { return d.write(name, data, 0o600) }

// WritePublic is Write for a file that every user may read. It must hold no secret.
func (d Dir) WritePublic(name string, data []byte) error { return d.write(name, data, 0o644) }

func (d Dir) write(name string, data []byte, mode fs.FileMode) (err error) {
	path := d.File(name)
	if len(data) > maxFileSize {
		return &WriteError{path, fmt.Errorf("more than %d bytes, it could not be read again", maxFileSize)}
	}
	f, err := os.CreateTemp(d.path, "."+name+tempMark+"*") // mode 0600
	if err != nil {
		return &WriteError{path, err}
	}
	defer func() {
		if err != nil {
			_ = f.Close()
			_ = os.Remove(f.Name())
			err = &WriteError{path, err}
		}
	}()
	if _, err := f.Write(data); err != nil {
		return err
	}
	if mode != 0o600 {
		if err := f.Chmod(mode); err != nil { // the umask does not apply
			return err
		}
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	return d.sync()
}

// underWay is the age up to which a half-written file may still be in use by its writer.
const underWay = time.Minute

// CleanFile removes what a crash during a Write of that file left behind. It needs no lock, since
// it keeps files that may still be in use.
func (d Dir) CleanFile(name string) { d.clean(name, underWay) }

// clean removes half-written files of at least an age.
func (d Dir) clean(name string, age time.Duration) {
	leftovers, err := filepath.Glob(d.File("." + name + tempMark + "*"))
	if err != nil {
		return
	}
	for _, path := range leftovers {
		if info, err := os.Lstat(path); err == nil && time.Since(info.ModTime()).Abs() >= age {
			_ = os.Remove(path) // not an error: the next clean tries again
		}
	}
}

// remove deletes a file durably. A file that is not there is no error.
func (d Dir) remove(name string) error {
	err := os.Remove(d.File(name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = d.sync()
	}
	if err != nil {
		return &WriteError{d.File(name), err}
	}
	return nil
}

// sync makes renames and removals in the directory durable.
func (d Dir) sync() error {
	f, err := os.Open(d.path)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	return f.Sync()
}

// SetAside renames a file that cannot be used, so that an administrator can look at it, and keeps
// the last few of them. It returns the new name. The caller holds the lock, unless it sets the lock
// file aside.
func (d Dir) SetAside(name string, now time.Time) (string, error) {
	path := d.File(name)
	aside := path + asideMark + now.UTC().Format("20060102T150405.000000000Z")
	if err := os.Rename(path, aside); err != nil {
		return "", &WriteError{path, err}
	}
	old, err := filepath.Glob(path + asideMark + "*")
	if err == nil {
		sort.Strings(old) // the names sort by time
		for len(old) > keptAside {
			_ = os.RemoveAll(old[0])
			old = old[1:]
		}
	}
	return aside, d.sync()
}

// EverInstalled reports whether the node ever had a certificate, valid or not.
func (d Dir) EverInstalled() bool {
	if _, err := os.Lstat(d.File(CurrentFile)); err == nil {
		return true
	}
	if aside, err := filepath.Glob(d.File(CurrentFile) + asideMark + "*"); err == nil && len(aside) > 0 {
		return true
	}
	state, err := d.State()
	return err == nil && !state.Issued.IsZero()
}

// MustBeSetAside reports whether err means that a file exists and must be set aside: it is damaged
// or not to be trusted.
func MustBeSetAside(err error) bool {
	var untrusted *trustedfile.Error
	var damaged *damagedFileError
	return errors.As(err, &untrusted) || errors.As(err, &damaged)
}

// OpenLog opens the worker's log for appending. A log larger than 1 MiB is renamed first.
func (d Dir) OpenLog() (*os.File, error) {
	path := d.File(LogFile)
	if info, err := os.Lstat(path); err == nil && (!info.Mode().IsRegular() || info.Size() > maxFileSize) {
		if err := os.Rename(path, oldLog(path)); err != nil {
			return nil, &WriteError{path, err}
		}
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, &WriteError{path, err}
	}
	return f, nil
}

func oldLog(path string) string { return strings.TrimSuffix(path, ".log") + ".old.log" }
