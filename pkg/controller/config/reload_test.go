// SPDX-License-Identifier: Apache-2.0

package config

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
)

// After a change of the file, unattestedNodes apply at once. Other fields do not, and the log says
// so once. While the file is invalid, the last valid names apply.
func TestReload(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	write := func(content string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	minimal := with()
	write(minimal + "unattestedNodes: [a, b]\n")
	c, err := Load(file)
	if err != nil {
		t.Fatal(err)
	}
	settings, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	inForce := []string{"a", "b"}
	r := settings.NewReloader(file, funcr.New(func(_, args string) { lines = append(lines, args) }, funcr.Options{}))
	for _, step := range []struct {
		what, content string
		inForce       []string
		problem       string
		says          []string
	}{
		{"unchanged", minimal + "unattestedNodes: [a, b]\n", []string{"a", "b"}, "", nil},
		{"one more, one less", minimal + "unattestedNodes: [b, c]\n", []string{"b", "c"}, "", []string{`"added"="1: c" "removed"="1: a"`}},
		{"no YAML", "unattestedNodes: [", []string{"b", "c"}, "line 1", nil},
		{"not a name", minimal + "unattestedNodes: [A]\n", []string{"b", "c"}, "unattestedNodes", nil},
		{"another field is wrong", minimal + "unattestedNodes: [d]\nwaitDeadline: 1s\n", []string{"b", "c"}, "waitDeadline", nil},
		{"another field", minimal + "unattestedNodes: [b, c]\nwaitDeadline: 5m\n", []string{"b", "c"}, "", []string{"need a restart"}},
		{"again", minimal + "unattestedNodes: [b, c]\nwaitDeadline: 5m\n", []string{"b", "c"}, "", nil},
		{"none", minimal + "waitDeadline: 5m\n", nil, "", []string{`"removed"="2: b, c"`}},
	} {
		write(step.content)
		lines = nil
		r.Refresh(time.Now())
		if got := settings.Rules().UnattestedNodes(); !slices.Equal(got, inForce) {
			t.Errorf("%s: %v are in force at the first look", step.what, got)
		}
		r.Refresh(time.Now())
		inForce = step.inForce
		problem := ""
		if r.Problem() != nil {
			problem = r.Problem().Error()
		}
		if got := settings.Rules().UnattestedNodes(); !slices.Equal(got, step.inForce) || !strings.Contains(problem, step.problem) || (problem == "") != (step.problem == "") {
			t.Errorf("%s: %v are in force, problem %q", step.what, got, problem)
		}
		if len(lines) != len(step.says) || len(lines) == 1 && !strings.Contains(lines[0], step.says[0]) {
			t.Errorf("%s: logged %q, want %q", step.what, lines, step.says)
		}
	}
	write(minimal + "unattestedNodes: [d]\n" + strings.Repeat("#\n", maxConfigSize/2))
	r.Refresh(time.Now())
	r.Refresh(time.Now())
	if r.Problem() == nil || len(settings.Rules().UnattestedNodes()) > 0 {
		t.Errorf("too long: %v, %v", r.Problem(), settings.Rules().UnattestedNodes())
	}
	if _, err := Load(file); err == nil || !strings.HasSuffix(err.Error(), "longer than 1048576 bytes") {
		t.Errorf("a start reads what is too long: %v", err)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	r.Refresh(time.Now())
	if r.Problem() == nil || r.LastRead().IsZero() {
		t.Errorf("without a file: %v, %v", r.Problem(), r.LastRead())
	}
}

// Another program reads the unattestedNodes alone. Files that other fields name need not exist.
func TestUnattestedFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "config.yaml")
	head := "apiVersion: " + APIVersion + "\nkind: " + Kind + "\ninventory: {file: /nonexistent}\n"
	file, now := UnattestedFile(path, time.Second), time.Now()
	if _, err := file.Get(now); err == nil {
		t.Error("there is no file")
	}
	for i, c := range []struct {
		content string
		valid   bool
		names   []string
	}{
		{head, true, nil},
		{head + "unattestedNodes: [a, b]\n", true, []string{"a", "b"}},
		{head + "unattestedNodes: ['*']\n", false, []string{"a", "b"}},
		{head + "unattestedNode: [c]\n", false, []string{"a", "b"}},
		{head + "unattestedNodes: [c]\n", true, []string{"c"}},
	} {
		if err := os.WriteFile(path, []byte(c.content), 0o600); err != nil {
			t.Fatal(err)
		}
		names, err := file.Get(now.Add(time.Duration(i+1) * time.Second))
		if err != nil || !slices.Equal(names, c.names) || (file.Problem() == nil) != c.valid {
			t.Errorf("%s: %q, %v, %v", c.content, names, err, file.Problem())
		}
	}
}
