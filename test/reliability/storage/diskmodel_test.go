// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// The disk itself keeps what was made durable, may lose the rest, and does what Linux's file
// systems do as long as it has power.
func TestDiskLosesWhatIsNotSynced(t *testing.T) {
	needsRoot(t)
	d := mount(t, t.TempDir(), image{"dir": nil, "dir/old": []byte("old")})
	at := func(name string) string { return filepath.Join(d.path, name) }
	write := func(name, content string, sync bool) {
		t.Helper()
		f, err := os.OpenFile(at(name), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
		harness.Must(t, err)
		_, err = f.WriteString(content)
		if sync {
			err = errors.Join(err, f.Sync())
		}
		harness.Must(t, errors.Join(err, f.Close()))
	}
	sync := func(name string) {
		t.Helper()
		f, err := os.Open(at(name))
		harness.Must(t, err)
		harness.Must(t, errors.Join(f.Sync(), f.Close()))
	}
	want := func(step string, images ...image) {
		t.Helper()
		var got []image
		for _, l := range d.losses() {
			got = append(got, l.left)
		}
		if !slices.EqualFunc(got, images, equalImages) {
			t.Errorf("%s: it may hold %q", step, got)
		}
	}
	old := image{"dir": nil, "dir/old": []byte("old")}
	with := func(more image) image {
		all := maps.Clone(old)
		maps.Copy(all, more)
		return all
	}
	want("at first", old)
	write("dir/new", "new", false)
	want("a file without fsync", old, with(image{"dir/new": {}}), with(image{"dir/new": []byte("n")}), with(image{"dir/new": {0, 0, 0}}), with(image{"dir/new": []byte("new")}))
	sync("dir/new")
	want("a file without fsync of its directory", old, with(image{"dir/new": []byte("new")}))
	harness.Must(t, os.Rename(at("dir/new"), at("dir/old")))
	want("a rename", old, with(image{"dir/new": []byte("new")}), image{"dir": nil, "dir/old": []byte("new")})
	sync("dir")
	old = image{"dir": nil, "dir/old": []byte("new")}
	want("a rename, and fsync of the directory", old)
	write("dir/old", "er", false)
	want("an append", old, with(image{"dir/old": []byte("ne")}), with(image{"dir/old": make([]byte, 5)}), with(image{"dir/old": []byte("newer")}))
	harness.Must(t, os.Truncate(at("dir/old"), 1))
	if data, err := os.ReadFile(at("dir/old")); err != nil || string(data) != "n" {
		t.Errorf("it reads %q, %v", data, err)
	}
	write("dir/old", "ew", true)
	want("written again", old)
	harness.Must(t, os.Remove(at("dir/old")))
	want("removed", old, image{"dir": nil})
	sync("dir")
	want("removed for good", image{"dir": nil})
	harness.Must(t, os.MkdirAll(at("a/b"), 0o700))
	write("a/b/file", "x", true)
	sync("a/b")
	want("a directory whose name is not durable", image{"dir": nil}, image{"dir": nil, "a": nil}, image{"dir": nil, "a": nil, "a/b": nil, "a/b/file": []byte("x")})
	if _, err := os.Stat(at("nothing")); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	if err := os.Remove(at("a/b")); !errors.Is(err, syscall.ENOTEMPTY) {
		t.Error(err)
	}
	// After a power cut nobody reads or writes.
	calls := d.changes()
	d.cutPowerBefore(len(calls) + 1)
	failed := make(chan error)
	go func() { failed <- os.WriteFile(at("late"), nil, 0o600) }()
	<-d.cut
	d.restore()
	if err := <-failed; !errors.Is(err, syscall.EIO) {
		t.Errorf("a call without power: %v", err)
	}
	if _, err := os.ReadDir(at("dir")); !errors.Is(err, syscall.EIO) {
		t.Errorf("a call without power: %v", err)
	}
	if now := d.changes(); !slices.Equal(now, calls) {
		t.Errorf("the calls are %q", now)
	}
}
