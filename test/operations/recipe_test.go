// SPDX-License-Identifier: Apache-2.0

package operations

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// sections returns the parts of docs/operations.md that have commands, by title, each as its blocks.
func sections(t *testing.T) map[string][]string {
	t.Helper()
	document := read(t, filepath.Join(module, "docs", "operations.md"))
	found := map[string][]string{}
	for _, section := range strings.Split(document, "\n## ")[1:] {
		title, text, _ := strings.Cut(section, "\n")
		for _, rest := range strings.Split(text, "```sh\n")[1:] {
			block, _, _ := strings.Cut(rest, "```")
			found[title] = append(found[title], block)
		}
	}
	return found
}

// recipe is a recipe, and the operator who follows it.
type recipe struct {
	t      *testing.T
	title  string
	blocks []string
	// settings are the shell's variables, as the first block of the recipe has them, with the test's
	// values.
	settings map[string]string
	next     int
	// dir is a folder of the operator's for this recipe. What he keeps is linked there.
	dir string
}

// tried are the titles of the recipes that were followed to the end.
var tried sync.Map

// newRecipe opens a recipe. Its first block sets variables. The test gives the value of each,
// except the namespace.
func newRecipe(t *testing.T, title string, values map[string]string) *recipe {
	t.Helper()
	blocks := sections(t)[title]
	if len(blocks) < 2 {
		t.Fatalf("docs/operations.md has no recipe %q", title)
	}
	settings := map[string]string{}
	for line := range strings.Lines(blocks[0]) {
		name, value, ok := strings.Cut(strings.TrimSpace(line), "=")
		if !ok || !regexp.MustCompile(`^[A-Z_]+$`).MatchString(name) {
			t.Fatalf("%s: the first block has %q", title, line)
		}
		settings[name] = value
	}
	given := map[string]string{"NAMESPACE": namespace}
	maps.Copy(given, values)
	for name := range settings {
		value, ok := given[name]
		if !ok {
			t.Fatalf("%s: the test has no %s", title, name)
		}
		settings[name] = value
	}
	for name := range values {
		if _, ok := settings[name]; !ok {
			t.Fatalf("%s: it does not set %s", title, name)
		}
	}
	r := &recipe{t: t, title: title, blocks: blocks[1:], settings: settings, dir: t.TempDir()}
	for _, name := range []string{"cluster", "packaging"} {
		harness.Must(t, os.Symlink(filepath.Join(shared.dir, name), filepath.Join(r.dir, name)))
	}
	t.Cleanup(func() {
		if !t.Failed() && r.next < len(r.blocks) {
			t.Errorf("%s: the last %d blocks were not run", title, len(r.blocks)-r.next)
		}
		if !t.Failed() {
			tried.Store(title, true)
		}
	})
	return r
}

// inventory guards the operator's machines: two recipes at once would each write the other's away.
var inventory sync.Mutex

// shellLimit bounds a block. What waits in it is over within seconds.
const shellLimit = time.Minute

// step runs the next block of the recipe, as it is written, and returns what it printed. The block
// has to contain a text, so that a reader of the test sees what runs. Later blocks see variables
// that it sets.
func (r *recipe) step(contains string) (output string) {
	r.t.Helper()
	if r.next == len(r.blocks) {
		r.t.Fatalf("%s: it has %d steps", r.title, r.next)
	}
	block := r.blocks[r.next]
	r.next++
	if !strings.Contains(block, contains) {
		r.t.Fatalf("%s, step %d: there is no %q in\n%s", r.title, r.next, contains, block)
	}
	if strings.Contains(block, "machines/") {
		inventory.Lock()
		defer inventory.Unlock()
	}
	return r.shell(block)
}

// assigned finds the variables that a block sets for those after it.
var assigned = regexp.MustCompile(`(?m)^([A-Z_]+)=`)

// shell has the operator type something else.
func (r *recipe) shell(script string) (output string) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.t.Context()), shellLimit)
	defer cancel()
	names := assigned.FindAllStringSubmatch(script, -1)
	variables := filepath.Join(r.t.TempDir(), "variables")
	whole := script
	for _, name := range names {
		whole += fmt.Sprintf("printf '%%s\\n' \"$%s\" >> %s\n", name[1], variables)
	}
	cmd := exec.CommandContext(ctx, "sh", "-eu", "-c", whole)
	cmd.Dir = r.dir
	cmd.Env = append(os.Environ(), shared.operator()...)
	for _, name := range slices.Sorted(maps.Keys(r.settings)) {
		cmd.Env = append(cmd.Env, name+"="+r.settings[name])
	}
	began := time.Now()
	result := harness.Run(r.t, cmd)
	r.t.Logf("%s (%s)\n%s--\n%s%s", r.title, time.Since(began).Round(time.Millisecond), script, result.Stdout, result.Stderr)
	if result.Code != 0 {
		r.t.Fatalf("exit code %d", result.Code)
	}
	if len(names) > 0 {
		values := strings.Split(read(r.t, variables), "\n")
		for i, name := range names {
			r.settings[name[1]] = values[i]
		}
	}
	return result.Stdout
}

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	harness.Must(t, err)
	return string(data)
}

// All recipes are followed by a test, whatever is added to the page.
func allAreTried(t *testing.T) {
	for title := range sections(t) {
		if _, ok := tried.Load(title); !ok {
			t.Errorf("no test follows the recipe %q", title)
		}
	}
}
