// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// Reset removes files that this program could have written, by name, kind and owner, and no others.
func TestReset(t *testing.T) {
	d := At(filepath.Join(t.TempDir(), "certs"))
	lock, err := d.TryLock()
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Unlock()
	ours := []string{
		CurrentFile, PendingFile, StateFile, LogFile, "kubelet-authenticator-worker.old.log", BootstrapFile,
		CurrentFile + asideMark + "20261120T120000.000000000Z", "." + StateFile + tempMark + "123",
	}
	foreign := []string{
		"precious", "." + CurrentFile, CurrentFile + ".bak", "x" + CurrentFile, ".precious" + tempMark + "1", "precious" + asideMark + "1",
	}
	for _, name := range append(slices.Clone(ours), foreign...) {
		if err := os.WriteFile(d.File(name), []byte(name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	precious := d.File("precious")
	link, dir, given := d.File(PendingFile+asideMark+"1"), d.File(PendingFile+asideMark+"2"), d.File(PendingFile+asideMark+"3")
	if err := errors.Join(os.Symlink(precious, link), os.Mkdir(dir, 0o700), os.WriteFile(given, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	refused := []string{link, dir}
	if os.Geteuid() == 0 { // only root can give a file away
		refused = append(refused, given)
		if err := os.Chown(given, 4711, 4711); err != nil {
			t.Fatal(err)
		}
	}

	removed, left := lock.Reset(func(data []byte) bool { return string(data) == BootstrapFile })
	for _, name := range append(slices.Clone(ours), LockFile) {
		if !slices.Contains(removed, d.File(name)) {
			t.Errorf("%s is not said to be removed", name)
		}
		if _, err := os.Lstat(d.File(name)); err == nil {
			t.Errorf("%s is still there", name)
		}
	}
	for _, path := range refused {
		if _, err := os.Lstat(path); err != nil {
			t.Error(err)
		}
	}
	for _, name := range foreign {
		if data, err := os.ReadFile(d.File(name)); err != nil || string(data) != name {
			t.Errorf("%s: %q %v", name, data, err)
		}
	}
	if len(left) != len(refused) {
		t.Errorf("left %v", left)
	}
}

// A file that is not recognised as a copy belongs to the operator.
func TestResetLeavesAnOperatorsBootstrapKubeconfig(t *testing.T) {
	for name, c := range map[string]struct {
		content []byte
		mode    os.FileMode
		isCopy  bool
	}{
		"no copy":              {[]byte("his"), 0o600, false},
		"others may write it":  {[]byte("his"), 0o664, true},
		"too large to be read": {make([]byte, maxFileSize+1), 0o600, true},
	} {
		t.Run(name, func(t *testing.T) {
			d := At(filepath.Join(t.TempDir(), "certs"))
			lock, err := d.TryLock()
			if err != nil {
				t.Fatal(err)
			}
			defer lock.Unlock()
			if err := errors.Join(os.WriteFile(d.File(BootstrapFile), c.content, 0o600), os.Chmod(d.File(BootstrapFile), c.mode)); err != nil {
				t.Fatal(err)
			}
			if removed, left := lock.Reset(func([]byte) bool { return c.isCopy }); len(left) != 1 || len(removed) != 1 {
				t.Errorf("%v %v", removed, left)
			}
			if _, err := os.Stat(d.File(BootstrapFile)); err != nil {
				t.Error(err)
			}
		})
	}
}

// A link to the certificate directory is the operator's.
func TestResetLeavesALinkToTheDirectory(t *testing.T) {
	root := t.TempDir()
	d := At(filepath.Join(root, "certs"))
	if err := errors.Join(os.Mkdir(filepath.Join(root, "elsewhere"), 0o700), os.Symlink("elsewhere", d.Path())); err != nil {
		t.Fatal(err)
	}
	lock, err := d.TryLock()
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Unlock()
	if removed, left := lock.Reset(func([]byte) bool { return true }); len(left) != 0 || len(removed) != 1 {
		t.Errorf("%v %v", removed, left)
	}
	if _, err := os.Lstat(d.Path()); err != nil {
		t.Error(err)
	}
}
