// SPDX-License-Identifier: Apache-2.0

package authorizer

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

func TestStateFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "state.json")
	lists := listsOf([]v1alpha1.RevocationSliceSpec{slice(1, []v1alpha1.RevokedCertificate{revokedCertificate("a", 1)}, currentCertificate("a", 2)).Spec},
		[]string{"s"}, map[string]Certificate{id(2): {"a", time.Unix(1_800_000_000, 0).UTC()}})
	upToDateAt := time.Unix(1_700_000_000, 0).UTC()
	for range 2 { // the second write replaces the file
		if err := writeState(path, lists, upToDateAt); err != nil {
			t.Fatal(err)
		}
	}
	got, at, err := readState(path)
	if err != nil || !at.Equal(upToDateAt) || !reflect.DeepEqual(got.remembered, lists.remembered) || !reflect.DeepEqual(got.suspendedNodes, lists.suspendedNodes) ||
		got.Decide(asks("a", "get /secrets a/b", 1)).Verdict != Deny || got.Decide(asks("a", "get /secrets a/b", 2)).Verdict != NoOpinion {
		t.Errorf("%+v, %s, %v", got, at, err)
	}
	info, err := os.Stat(path)
	left, dirErr := os.ReadDir(filepath.Dir(path))
	if err != nil || info.Mode().Perm() != 0o600 || dirErr != nil || len(left) != 1 {
		t.Errorf("mode %v, %d files", info.Mode(), len(left))
	}
}

// A damaged file is logged, and gives empty lists: the process starts.
func TestDamagedStateFile(t *testing.T) {
	t.Parallel()
	good := `{"version":1,"upToDateAt":"2026-11-28T12:00:00Z","slices":[],"suspendedNodes":["a"],"certificates":{}}`
	for name, content := range map[string]string{
		"good": good, "empty": "", "cut": good[:40], "another version": strings.Replace(good, `:1`, `:2`, 1), "no version": strings.Replace(good, `"version":1,`, "", 1),
		"an unknown field": strings.Replace(good, `"slices"`, `"lists"`, 1), "two documents": good + good, "text after": good + "x",
		"no name of a node": strings.Replace(good, `"slices":[]`, `"slices":[{"number":1,"certificates":[{"nodeName":"A'","sha256":"`+sum(1)+`"}]}]`, 1),
		"no fingerprint":    strings.Replace(good, `"slices":[]`, `"slices":[{"number":1,"certificates":[{"nodeName":"a","sha256":"1"}]}]`, 1),
	} {
		w := newWorld(t)
		w.isDown.Store(true)
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "state.json"), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		a, _ := w.start(dir, nil)
		used := a.lists.Load().suspendedNodes["a"]
		if used != (name == "good") || (w.logged("cannot use the state file") == 1) != (name != "good") {
			t.Errorf("%s: used: %t, %v", name, used, w.log)
		}
		if (a.age() < 0) != (name != "good") {
			t.Errorf("%s: age %s", name, a.age())
		}
	}
}

func TestStateFileTooLong(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "state.json")
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := file.Truncate(maxState + 1); err != nil {
		t.Fatal(err)
	}
	if err := file.Close(); err != nil {
		t.Fatal(err)
	}
	if _, _, err := readState(path); err == nil || !strings.Contains(err.Error(), "longer than") {
		t.Error(err)
	}
	lists := &Lists{remembered: map[string]Certificate{strings.Repeat("a", maxState): {}}}
	if err := writeState(path, lists, time.Now()); err == nil {
		t.Error("a file that is not read again is written")
	}
}
