// SPDX-License-Identifier: Apache-2.0

package nodestate

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
)

var someNote = Note{Parent: plugintest.Asker, Certificate: "abc", Until: plugintest.Noon.Unix(), Reviewed: plugintest.Noon.Unix() - 5, Rejected: true}

func TestNoteIsReadBack(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run") // is made
	file := NewNoteFile(dir, "/certs")
	if got := file.Read(); got != (Note{}) {
		t.Errorf("before any was written: %+v", got)
	}
	file.Write(someNote)
	if got := file.Read(); got != someNote {
		t.Errorf("got %+v, want %+v", got, someNote)
	}
	short := Note{Parent: plugintest.Asker}
	file.Write(short) // leaves nothing of the longer one
	if got := file.Read(); got != short {
		t.Errorf("got %+v, want %+v", got, short)
	}
	for path, mode := range map[string]os.FileMode{dir: 0o700 | os.ModeDir, file.Path(): 0o600} {
		if info, err := os.Stat(path); err != nil || info.Mode() != mode {
			t.Errorf("%s: %v, %v", path, info, err)
		}
	}
}

func TestNotesOfTwoDirectoriesAreTwo(t *testing.T) {
	a := NewNoteFile("/run/x", "/certs/a")
	if a == NewNoteFile("/run/x", "/certs/b") {
		t.Error("they share one")
	}
	if a != NewNoteFile("/run/x", "/certs//b/../a/") {
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
	inPlace := NewNoteFile(filepath.Join(root, "taken"), "/certs")
	if err := os.MkdirAll(inPlace.Path(), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, file := range map[string]NoteFile{
		"below a file":         NewNoteFile(plain, "/certs"),
		"a directory in place": inPlace,
		"where nobody writes":  NewNoteFile("/proc/self", "/certs"),
	} {
		before := plugintest.Snapshot(t, root)
		file.Write(someNote)
		if got := file.Read(); got != (Note{}) {
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
	for name, spoil := range map[string]func(file NoteFile) error{
		"others may write it":            func(file NoteFile) error { return os.Chmod(file.Path(), 0o666) },
		"others may write the directory": func(file NoteFile) error { return os.Chmod(file.dir.Path(), 0o1777) },
		"a link": func(file NoteFile) error {
			return errors.Join(os.Rename(file.Path(), file.dir.File("x")), os.Symlink("x", file.Path()))
		},
	} {
		t.Run(name, func(t *testing.T) {
			file := NewNoteFile(filepath.Join(t.TempDir(), "run"), "/certs")
			file.Write(someNote)
			if got := file.Read(); got != someNote {
				t.Fatalf("before: %+v", got)
			}
			if err := spoil(file); err != nil {
				t.Fatal(err)
			}
			if got := file.Read(); got != (Note{}) {
				t.Errorf("read %+v", got)
			}
		})
	}
}

func TestNoteThatMakesNoSenseIsNone(t *testing.T) {
	file := NewNoteFile(t.TempDir(), "/certs")
	file.Write(someNote)
	whole, err := os.ReadFile(file.Path())
	if err != nil {
		t.Fatal(err)
	}
	for _, garbage := range []string{
		"", "null", "[]", "garbage", "{", string(whole[:len(whole)/2]), string(whole[:len(whole)-1]), string(whole) + "}",
		`{"until":"2026-11-20T12:00:00Z"}`, `{"parent":{"pid":-1.5}}`, `{"rejected":true,"until":1e300}`, "\x00\x00\x00",
	} {
		if err := os.WriteFile(file.Path(), []byte(garbage), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := file.Read(); got != (Note{}) {
			t.Errorf("%q: %+v", garbage, got)
		}
	}
}
