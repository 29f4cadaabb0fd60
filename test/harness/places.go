// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"os"
	"path/filepath"
	"testing"
)

// Places is a machine with the standard paths of files: its folders are mounted over this
// machine's, only for its commands. That needs root.
type Places struct {
	// Root has the machine's own folders.
	Root string
}

// mounted are the folders of a machine that are its own.
var mounted = []string{"/etc", "/var/lib", "/run", "/root"}

// NewPlaces returns a machine without files, which goes with the test.
func NewPlaces(t testing.TB) Places {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("a mount namespace needs root")
	}
	p := Places{t.TempDir()}
	for _, folder := range mounted {
		Must(t, os.MkdirAll(p.At(folder), 0o750))
	}
	return p
}

// At returns where a file of the machine is on this one.
func (p Places) At(path string) string { return filepath.Join(p.Root, path) }

// Write writes a file of the machine.
func (p Places) Write(t testing.TB, path, content string) {
	t.Helper()
	path = p.At(path)
	Must(t, os.MkdirAll(filepath.Dir(path), 0o750))
	WriteFile(t, path, []byte(content))
}

// Command returns the command line that has sh run a script on the machine.
func (p Places) Command(script string) []string {
	mounts := ""
	for _, folder := range mounted {
		mounts += "mount --bind " + p.At(folder) + " " + folder + "\n"
	}
	return []string{"unshare", "--mount", "--kill-child", "--fork", "--propagation", "private", "sh", "-eu", "-c", mounts + script}
}
