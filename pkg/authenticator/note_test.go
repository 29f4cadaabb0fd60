// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
)

var someNote = note{Parent: asker, Certificate: "abc", Until: plugintest.Noon.Unix(), Reviewed: plugintest.Noon.Unix() - 5, Rejected: true}

// path is where the note is.
func (f noteFile) path() string { return f.dir.File(f.name) }

func TestNoteIsReadBack(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run") // is made
	file := newNoteFile(dir, "/certs")
	if got := file.read(); got != (note{}) {
		t.Errorf("before any was written: %+v", got)
	}
	file.write(someNote)
	if got := file.read(); got != someNote {
		t.Errorf("got %+v, want %+v", got, someNote)
	}
	short := note{Parent: asker}
	file.write(short) // leaves nothing of the longer one
	if got := file.read(); got != short {
		t.Errorf("got %+v, want %+v", got, short)
	}
	for path, mode := range map[string]os.FileMode{dir: 0o700 | os.ModeDir, file.path(): 0o600} {
		if info, err := os.Stat(path); err != nil || info.Mode() != mode {
			t.Errorf("%s: %v, %v", path, info, err)
		}
	}
}

func TestNotesOfTwoDirectoriesAreTwo(t *testing.T) {
	a := newNoteFile("/run/x", "/certs/a")
	if a == newNoteFile("/run/x", "/certs/b") {
		t.Error("they share one")
	}
	if a != newNoteFile("/run/x", "/certs//b/../a/") {
		t.Error("one directory has two")
	}
}

// Without a note all works but one thing, so nothing about it is ever a failure.
func TestNoteThatCannotBeKeptIsNone(t *testing.T) {
	root := t.TempDir()
	plain := filepath.Join(root, "file")
	if err := errors.Join(os.WriteFile(plain, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	inPlace := newNoteFile(filepath.Join(root, "taken"), "/certs")
	if err := os.MkdirAll(inPlace.path(), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, file := range map[string]noteFile{
		"below a file":         newNoteFile(plain, "/certs"),
		"a directory in place": inPlace,
		"where nobody writes":  newNoteFile("/proc/self", "/certs"),
	} {
		before := plugintest.Snapshot(t, root)
		file.write(someNote)
		if got := file.read(); got != (note{}) {
			t.Errorf("%s: read %+v", name, got)
		}
		if after := plugintest.Snapshot(t, root); after != before {
			t.Errorf("%s: left behind:\n%s", name, after)
		}
	}
}

// What others could have written decides nothing: a certificate that passes for rejected costs the
// bootstrap credential.
func TestNoteThatCannotBeTrustedIsNone(t *testing.T) {
	for name, spoil := range map[string]func(file noteFile) error{
		"others may write it":            func(file noteFile) error { return os.Chmod(file.path(), 0o666) },
		"others may write the directory": func(file noteFile) error { return os.Chmod(file.dir.Path(), 0o1777) },
		"a link": func(file noteFile) error {
			return errors.Join(os.Rename(file.path(), file.dir.File("x")), os.Symlink("x", file.path()))
		},
	} {
		t.Run(name, func(t *testing.T) {
			file := newNoteFile(filepath.Join(t.TempDir(), "run"), "/certs")
			file.write(someNote)
			if got := file.read(); got != someNote {
				t.Fatalf("before: %+v", got)
			}
			if err := spoil(file); err != nil {
				t.Fatal(err)
			}
			if got := file.read(); got != (note{}) {
				t.Errorf("read %+v", got)
			}
		})
	}
}

func TestNoteThatMakesNoSenseIsNone(t *testing.T) {
	file := newNoteFile(t.TempDir(), "/certs")
	file.write(someNote)
	whole, err := os.ReadFile(file.path())
	if err != nil {
		t.Fatal(err)
	}
	for _, garbage := range []string{
		"", "null", "[]", "garbage", "{", string(whole[:len(whole)/2]), string(whole[:len(whole)-1]), string(whole) + "}",
		`{"until":"2026-11-20T12:00:00Z"}`, `{"parent":{"pid":-1.5}}`, `{"rejected":true,"until":1e300}`, "\x00\x00\x00",
	} {
		if err := os.WriteFile(file.path(), []byte(garbage), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := file.read(); got != (note{}) {
			t.Errorf("%q: %+v", garbage, got)
		}
	}
}
