// SPDX-License-Identifier: Apache-2.0

package harness

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
)

// Page is a page of recipes: sections with shell blocks that an operator pastes one by one.
type Page struct {
	file    string
	recipes map[string][]string // the blocks, by title
	tried   sync.Map            // titles of the recipes that were followed to the end
}

// ReadPage reads a page of recipes.
func ReadPage(file string) (*Page, error) {
	document, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	p := &Page{file: filepath.Base(file), recipes: map[string][]string{}}
	for _, section := range strings.Split(string(document), "\n## ")[1:] {
		title, text, _ := strings.Cut(section, "\n")
		for _, rest := range strings.Split(text, "```sh\n")[1:] {
			block, _, _ := strings.Cut(rest, "```")
			p.recipes[title] = append(p.recipes[title], block)
		}
	}
	return p, nil
}

// AllAreTried checks that a test has followed each recipe of the page.
func (p *Page) AllAreTried(t *testing.T) {
	t.Helper()
	for title := range p.recipes {
		if _, ok := p.tried.Load(title); !ok {
			t.Errorf("%s: no test follows the recipe %q", p.file, title)
		}
	}
}

// Recipe is a recipe, and the operator who follows it.
type Recipe struct {
	// Dir is where the operator's shell is.
	Dir    string
	t      *testing.T
	title  string
	blocks []string
	// settings are the shell's variables, as the first block of the recipe has them, with the
	// test's values. environment has what else the shell finds.
	settings    map[string]string
	environment []string
	next        int
}

// Recipe opens a recipe, in an empty folder. Its first block sets variables, and values has a value
// for each. A test that leaves out a block fails.
func (p *Page) Recipe(t *testing.T, title string, values map[string]string, environment ...string) *Recipe {
	t.Helper()
	blocks := p.recipes[title]
	if len(blocks) < 2 {
		t.Fatalf("%s has no recipe %q", p.file, title)
	}
	settings := map[string]string{}
	for line := range strings.Lines(blocks[0]) {
		name, _, ok := strings.Cut(strings.TrimSpace(line), "=")
		if !ok || !regexp.MustCompile(`^[A-Z_]+$`).MatchString(name) {
			t.Fatalf("%s: the first block has %q", title, line)
		}
		if settings[name], ok = values[name]; !ok {
			t.Fatalf("%s: the test has no %s", title, name)
		}
	}
	r := &Recipe{Dir: t.TempDir(), t: t, title: title, blocks: blocks[1:], settings: settings, environment: environment}
	t.Cleanup(func() {
		switch {
		case t.Failed():
		case r.next < len(r.blocks):
			t.Errorf("%s: the last %d blocks were not run", title, len(r.blocks)-r.next)
		default:
			p.tried.Store(title, true)
		}
	})
	return r
}

// Has reports whether the first block sets a variable.
func (r *Recipe) Has(variable string) bool { _, ok := r.settings[variable]; return ok }

// Next returns the next block.
func (r *Recipe) Next() string {
	r.t.Helper()
	if r.next == len(r.blocks) {
		r.t.Fatalf("%s: it has %d steps", r.title, r.next)
	}
	return r.blocks[r.next]
}

// Step runs the next block, as it is written, and returns what it printed. The block has to contain
// a text, so that a reader of the test sees what runs. Later blocks see variables that it sets.
func (r *Recipe) Step(contains string) (output string) {
	r.t.Helper()
	block := r.Next()
	r.next++
	if !strings.Contains(block, contains) {
		r.t.Fatalf("%s, step %d: there is no %q in\n%s", r.title, r.next, contains, block)
	}
	return r.Shell(block)
}

// ShellLimit bounds what an operator types. Its waits are over within seconds.
const ShellLimit = time.Minute

// assigned finds the variables that a block sets for those after it.
var assigned = regexp.MustCompile(`(?m)^([A-Z_]+)=`)

// Shell runs another command of the operator.
func (r *Recipe) Shell(script string) (output string) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.t.Context()), ShellLimit)
	defer cancel()
	names := assigned.FindAllStringSubmatch(script, -1)
	variables := filepath.Join(r.t.TempDir(), "variables")
	whole := script
	for _, name := range names {
		whole += fmt.Sprintf("printf '%%s\\n' \"$%s\" >> %s\n", name[1], variables)
	}
	cmd := exec.CommandContext(ctx, "sh", "-eu", "-c", whole) //nolint:gosec // G204: the blocks of our own pages
	cmd.Dir = r.Dir
	cmd.Env = append(os.Environ(), r.environment...)
	for _, name := range slices.Sorted(maps.Keys(r.settings)) {
		cmd.Env = append(cmd.Env, name+"="+r.settings[name])
	}
	began := time.Now()
	result := Run(r.t, cmd)
	r.t.Logf("%s (%s)\n%s--\n%s%s", r.title, time.Since(began).Round(time.Millisecond), script, result.Stdout, result.Stderr)
	if result.Code != 0 {
		r.t.Fatalf("exit code %d", result.Code)
	}
	if len(names) > 0 {
		data, err := os.ReadFile(variables)
		Must(r.t, err)
		values := strings.Split(string(data), "\n")
		for i, name := range names {
			r.settings[name[1]] = values[i]
		}
	}
	return result.Stdout
}
