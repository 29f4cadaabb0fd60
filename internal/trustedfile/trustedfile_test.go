// SPDX-License-Identifier: Apache-2.0

package trustedfile

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

const stranger = 4711

// must fails the test unless every step worked.
func must(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// TestRead has one folder, dir, with a good file, and spoils the way to it.
func TestRead(t *testing.T) {
	give := func(t *testing.T, path string) error {
		t.Helper()
		if os.Geteuid() != 0 {
			t.Skip("only root can give a file away")
		}
		return os.Lchown(path, stranger, stranger)
	}
	for name, c := range map[string]struct {
		// prepare returns the path to read, and the one that the error names
		prepare func(t *testing.T, dir, file string) (read, blamed string)
		says    string // empty if it is read
	}{
		"a good file":     {func(_ *testing.T, _, file string) (string, string) { return file, "" }, ""},
		"readable by all": {func(t *testing.T, _, file string) (string, string) { must(t, os.Chmod(file, 0o644)); return file, "" }, ""},
		"dots in its path": {func(_ *testing.T, dir, _ string) (string, string) {
			return dir + "/./../" + filepath.Base(dir) + "//file", ""
		}, ""},
		"another user's":    {func(t *testing.T, _, file string) (string, string) { must(t, give(t, file)); return file, file }, "belongs to another user (UID 4711, mode 0600)"},
		"others may write":  {func(t *testing.T, _, file string) (string, string) { must(t, os.Chmod(file, 0o666)); return file, file }, "others may write it"},
		"group may write":   {func(t *testing.T, _, file string) (string, string) { must(t, os.Chmod(file, 0o664)); return file, file }, "others may write it"},
		"open folder":       {func(t *testing.T, dir, file string) (string, string) { must(t, os.Chmod(dir, 0o777)); return file, dir }, "others may write into it"},
		"folder of a group": {func(t *testing.T, dir, file string) (string, string) { must(t, os.Chmod(dir, 0o775)); return file, dir }, "others may write into it"},
		"sticky folder": {func(t *testing.T, dir, file string) (string, string) {
			must(t, os.Chmod(dir, 0o777|fs.ModeSticky))
			return file, ""
		}, ""},
		"another user's in a sticky folder": {func(t *testing.T, dir, file string) (string, string) {
			must(t, os.Chmod(dir, 0o777|fs.ModeSticky), give(t, file))
			return file, file
		}, "belongs to another user"},
		"sticky folder of another user": {func(t *testing.T, dir, file string) (string, string) {
			must(t, os.Chmod(dir, 0o777|fs.ModeSticky), give(t, dir))
			return file, dir
		}, "belongs to another user"},
		"folder of another user": {func(t *testing.T, dir, file string) (string, string) { must(t, give(t, dir)); return file, dir }, "belongs to another user"},
		"folder further up": {func(t *testing.T, dir, file string) (string, string) {
			must(t, os.Chmod(filepath.Dir(dir), 0o777))
			return file, filepath.Dir(dir)
		}, "others may write into it"},
		"link": {func(t *testing.T, dir, file string) (string, string) {
			must(t, os.Symlink("file", dir+"/link"))
			return dir + "/link", ""
		}, ""},
		"link of another user": {func(t *testing.T, dir, file string) (string, string) {
			must(t, os.Chmod(dir, 0o777|fs.ModeSticky), os.Symlink("file", dir+"/link"), give(t, dir+"/link"))
			return dir + "/link", dir + "/link"
		}, "symbolic link of another user"},
		"link into an open folder": {func(t *testing.T, dir, file string) (string, string) {
			elsewhere := t.TempDir()
			must(t, os.Symlink(file, elsewhere+"/link"), os.Chmod(dir, 0o777))
			return elsewhere + "/link", dir
		}, "others may write into it"},
		"linked folder above": {func(t *testing.T, dir, file string) (string, string) {
			elsewhere := t.TempDir()
			must(t, os.Symlink(dir, elsewhere+"/link"), os.Chmod(dir, 0o777))
			return elsewhere + "/link/file", dir
		}, "others may write into it"},
		"link through an open folder to a good one": {func(t *testing.T, dir, file string) (string, string) {
			elsewhere := t.TempDir()
			must(t, os.Symlink(file, elsewhere+"/link"), os.Chmod(elsewhere, 0o777))
			return elsewhere + "/link", elsewhere
		}, "others may write into it"},
		"link to a link": {func(t *testing.T, dir, file string) (string, string) {
			must(t, os.Symlink("file", dir+"/a"), os.Symlink(dir+"/a", dir+"/b"))
			return dir + "/b", ""
		}, ""},
		"links in a circle": {func(t *testing.T, dir, file string) (string, string) {
			must(t, os.Symlink("a", dir+"/b"), os.Symlink("b", dir+"/a"))
			return dir + "/a", dir + "/a"
		}, "too many levels of symbolic links"},
		"fifo": {func(t *testing.T, dir, file string) (string, string) {
			must(t, syscall.Mkfifo(dir+"/fifo", 0o600))
			return dir + "/fifo", dir + "/fifo"
		}, "not a regular file"},
		"socket": {func(t *testing.T, dir, file string) (string, string) {
			t.Chdir(dir) // a socket's path is short
			l, err := net.Listen("unix", "socket")
			must(t, err)
			t.Cleanup(func() { _ = l.Close() })
			must(t, os.Chmod("socket", 0o600))
			return dir + "/socket", dir + "/socket"
		}, "not a regular file"},
		"device": {func(t *testing.T, dir, file string) (string, string) {
			if err := syscall.Mknod(dir+"/device", syscall.S_IFCHR|0o600, 1<<8|5); err != nil { // /dev/zero
				t.Skip("only root can make a device: ", err)
			}
			return dir + "/device", dir + "/device"
		}, "not a regular file"},
		"directory": {func(t *testing.T, dir, file string) (string, string) { return dir, dir }, "not a regular file"},
		"too large": {func(t *testing.T, dir, file string) (string, string) {
			must(t, os.Truncate(file, MaxSize+1))
			return file, file
		}, "is longer than 1048576 bytes"},
		"missing": {func(t *testing.T, dir, file string) (string, string) { return dir + "/none", dir + "/none" }, "no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			file := filepath.Join(dir, "file")
			must(t, os.WriteFile(file, []byte("content"), 0o600))
			read, blamed := c.prepare(t, dir, file)
			data, err := Read(read)
			if c.says == "" {
				if err != nil || string(data) != "content" {
					t.Errorf("%q, %v", data, err)
				}
				return
			}
			if err == nil || len(data) > 0 || !strings.HasPrefix(err.Error(), blamed+": ") || !strings.Contains(err.Error(), c.says) {
				t.Fatalf("%q, %v, want %s: %s", data, err, blamed, c.says)
			}
			if missing := name == "missing"; errors.Is(err, fs.ErrNotExist) != missing {
				t.Errorf("as a missing file: %v", err)
			}
			if hint := Hint(err, "other"); strings.Contains(c.says, "others") && hint != Remedy(blamed) {
				t.Errorf("hint %q", hint)
			}
		})
	}
}

func TestReadUntrusted(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(file, []byte("content"), 0o600), os.Chmod(file, 0o666))
	if data := ReadUntrusted(file); string(data) != "content" {
		t.Errorf("got %q", data)
	}
	must(t, os.Remove(file), syscall.Mkfifo(file, 0o600))
	if data := ReadUntrusted(file); data != nil {
		t.Errorf("a fifo: %q", data)
	}
}
