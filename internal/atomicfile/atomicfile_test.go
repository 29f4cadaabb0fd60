// SPDX-License-Identifier: Apache-2.0

package atomicfile

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

// content returns the content of each file in a folder, with its mode.
func content(t *testing.T, dir string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for _, entry := range entries {
		if entry.IsDir() {
			continue
		}
		data, err := os.ReadFile(filepath.Join(dir, entry.Name()))
		if err != nil {
			t.Fatal(err)
		}
		info, err := entry.Info()
		if err != nil {
			t.Fatal(err)
		}
		all[entry.Name()] = info.Mode().String() + " " + string(data)
	}
	return all
}

// A write leaves nothing beside the file, also after a crash that left a temporary file: one name,
// so that a process that crashes again and again does not fill the disk.
func TestReplace(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "a")
	for _, text := range []string{"old", "new"} {
		if err := os.WriteFile(path+Temporary, []byte("a longer text that a crash left"), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := Replace(0o600, File{path, []byte(text)}); err != nil {
			t.Fatal(err)
		}
		if all := content(t, dir); len(all) != 1 || all["a"] != fs.FileMode(0o600).String()+" "+text {
			t.Errorf("%q", all)
		}
	}
}

// Unless all files could be written, none is replaced.
func TestReplaceAllOrNone(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := Replace(0o600, File{filepath.Join(dir, "a"), []byte("old")}); err != nil {
		t.Fatal(err)
	}
	err := Replace(0o600, File{filepath.Join(dir, "a"), []byte("new")}, File{filepath.Join(dir, "missing", "b"), nil})
	if all := content(t, dir); err == nil || len(all) != 1 || all["a"] != fs.FileMode(0o600).String()+" old" {
		t.Errorf("%q, %v", all, err)
	}
}

// A folder in the file's place stays, and nothing is left beside it.
func TestReplaceRefuses(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "a", "b"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := Replace(0o600, File{filepath.Join(dir, "a"), nil}); err == nil || len(content(t, dir)) != 0 {
		t.Errorf("%q, %v", content(t, dir), err)
	}
}
