// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const (
	maxReadmeWords = 1300
	maxEntryWords  = 25
)

var (
	indexEntry  = regexp.MustCompile(`(?m)^- \[([^]]+)\]\(([^)#]+)\): (.+)$`)
	image       = regexp.MustCompile(`!\[([^]]+)\]\(plots/([^)]+)\)`)
	drawn       = regexp.MustCompile(`"([a-z-]+\.svg)"`)
	makeCommand = regexp.MustCompile("(?m)(?:^    |`)make ([a-z-]+)")
)

func glob(t *testing.T, pattern string) []string {
	t.Helper()
	found, err := filepath.Glob(pattern)
	if err != nil || len(found) == 0 {
		t.Fatalf("%s: %v, %v", pattern, found, err)
	}
	return found
}

// docs/README.md lists each page once, with a line that says what it is for. Each page begins with
// its reader and task.
func TestEachPageIsInTheIndex(t *testing.T) {
	index := readFile(t, "README.md")
	entries := map[string]int{}
	for _, entry := range indexEntry.FindAllStringSubmatch(index, -1) {
		name, target := entry[1], entry[2]
		entries[target]++
		if name != target {
			t.Errorf("%s is called %s", target, name)
		}
		if n := len(strings.Fields(entry[3])); n > maxEntryWords {
			t.Errorf("%s: %d words", target, n)
		}
	}
	pages := slices.DeleteFunc(slices.Concat(glob(t, "*.md"), glob(t, "integration/*.md"), glob(t, "platforms/*.md")), func(page string) bool { return page == "README.md" })
	for _, page := range pages {
		if entries[page] != 1 {
			t.Errorf("%s is listed %d times", page, entries[page])
		}
	}
	for _, page := range append(pages, "README.md") {
		_, text, _ := strings.Cut(readFile(t, page), "\n\n")
		if !strings.HasPrefix(text, "For ") {
			t.Errorf("%s does not begin with its reader and task: %.60q", page, text)
		}
	}
	for target := range maps.Keys(entries) {
		if !slices.Contains(pages, target) && !strings.HasPrefix(target, "../") {
			t.Errorf("there is no page %s", target)
		}
	}
	for _, page := range glob(t, "reference/*.md") {
		if strings.Count(index, "("+page+")") != 1 {
			t.Errorf("%s is not named once", page)
		}
	}
	for _, reader := range []string{"Operator", "Cluster API user", "Provider author", "Security reviewer", "Contributor"} {
		if !strings.Contains(index, "\n## "+reader+"\n") {
			t.Errorf("nothing is for the %s", strings.ToLower(reader))
		}
	}
}

// The README is short, has one picture of the exchange, and types commands that exist.
func TestReadme(t *testing.T) {
	readme, makefile := readFile(t, "../README.md"), readFile(t, "../Makefile")
	if n := len(strings.Fields(readme)); n >= maxReadmeWords {
		t.Errorf("it has %d words", n)
	}
	if strings.Count(readme, "```mermaid\nsequenceDiagram\n") != 1 {
		t.Error("there is no sequence diagram, or more than one")
	}
	commands := makeCommand.FindAllStringSubmatch(readme, -1)
	for _, command := range commands {
		if !strings.Contains(makefile, "\n"+command[1]+": ##") {
			t.Errorf("there is no make %s", command[1])
		}
	}
	for _, want := range []string{"demo", "test"} {
		if !slices.ContainsFunc(commands, func(c []string) bool { return c[1] == want }) {
			t.Errorf("make %s is missing", want)
		}
	}
	if !strings.Contains(readme, "(docs/README.md)") {
		t.Error("it does not lead to the index")
	}
}

// The pictures of performance.md are those that the benchmarks draw.
func TestPlots(t *testing.T) {
	var shown, draws []string
	for _, m := range image.FindAllStringSubmatch(readFile(t, "performance.md"), -1) {
		shown = append(shown, m[2])
	}
	for _, source := range append(glob(t, "../perf/scale/*.go"), glob(t, "../perf/bench/*.go")...) {
		if strings.HasSuffix(source, "_test.go") {
			continue
		}
		for _, m := range drawn.FindAllStringSubmatch(readFile(t, source), -1) {
			draws = append(draws, m[1])
		}
	}
	var files []string
	for _, path := range glob(t, "plots/*") {
		files = append(files, filepath.Base(path))
		if svg := readFile(t, path); !strings.Contains(svg, "make bench") || !strings.Contains(svg, "prefers-color-scheme:dark") {
			t.Errorf("%s does not say what drew it, or has no dark colours", path)
		}
	}
	slices.Sort(shown)
	slices.Sort(draws)
	slices.Sort(files)
	if len(shown) < 2 || !slices.Equal(shown, draws) || !slices.Equal(shown, files) {
		t.Errorf("%q are shown, %q are drawn, %q are there", shown, draws, files)
	}
}
