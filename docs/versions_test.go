// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const (
	kubernetes = "k8s.io/kubernetes"
	clusterAPI = "sigs.k8s.io/cluster-api"
	// oldestKubelet is how many minors a kubelet may be older than the API server.
	oldestKubelet = 3
)

var (
	exactVersion = regexp.MustCompile(`v\d+\.\d+\.\d+`)
	testName     = regexp.MustCompile("`(Test\\w+)`")
	makeTarget   = regexp.MustCompile("`make ([a-z-]+)`")
	skewed       = regexp.MustCompile(`_TEST_RELEASES='?([v0-9. ]+)`)
	upgradeFrom  = regexp.MustCompile(`(?m)^UPGRADE_FROM \?= (\S+)$`)
)

// required returns the version of a module that a go.mod requires, empty if it does not.
func required(t *testing.T, goMod, module string) string {
	t.Helper()
	found := regexp.MustCompile(`(?m)^\s*(?:require )?` + regexp.QuoteMeta(module) + ` (v\S+)`).FindStringSubmatch(readFile(t, goMod))
	if found == nil {
		return ""
	}
	return found[1]
}

// versionTables returns the rows of the tables in a page's section on versions without their heads,
// by the heading above.
func versionTables(t *testing.T, page string) map[string][][]string {
	t.Helper()
	tables := map[string][][]string{}
	_, section, _ := strings.Cut(readFile(t, page), "\n## Versions that work together\n")
	section, _, _ = strings.Cut(section, "\n## ")
	heading, body := "", false
	for line := range strings.Lines(section) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "#"):
			heading = strings.TrimLeft(line, "# ")
		case strings.HasPrefix(line, "| ---"):
			body = true
		case !strings.HasPrefix(line, "|"):
			body = false
		case body:
			cells := strings.Split(strings.Trim(line, "|"), "|")
			for i := range cells {
				cells[i] = strings.TrimSpace(cells[i])
			}
			tables[heading] = append(tables[heading], cells)
		}
	}
	return tables
}

// versions.md has the versions that the tests build, and no others.
func TestVersions(t *testing.T) {
	components := filepath.Join(repository, "test", "components")
	makefile := readFile(t, filepath.Join(repository, "Makefile"))
	tables := versionTables(t, "versions.md")
	isNamed := func(heading string, cells ...string) {
		t.Helper()
		if !slices.ContainsFunc(tables[heading], func(row []string) bool { return slices.Equal(row[:len(cells)], cells) }) {
			t.Errorf("%s: no row begins with %q", heading, cells)
		}
	}
	hasRow := func(heading string, cells ...string) {
		t.Helper()
		if !slices.ContainsFunc(tables[heading], func(row []string) bool { return slices.Equal(row[:len(cells)], cells) && !notRun(row) }) {
			t.Errorf("%s: no row that was run begins with %q", heading, cells)
		}
	}

	server := required(t, filepath.Join(components, "go.mod"), kubernetes)
	built := []string{server}
	hasRow("Kubernetes", server, server)
	oldest := minor(t, server)
	others, err := filepath.Glob(filepath.Join(components, "v*", "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	var folders []string
	for _, other := range others {
		kubelet := required(t, other, kubernetes)
		folder := filepath.Base(filepath.Dir(other))
		if !strings.HasPrefix(kubelet, folder+".") {
			t.Errorf("%s is of %s", other, kubelet)
		}
		built, folders = append(built, kubelet), append(folders, folder)
		oldest = min(oldest, minor(t, kubelet))
		isNamed("Kubernetes", kubelet, kubelet) // an API server and a kubelet of that release
		if minor(t, kubelet) >= minor(t, server)-oldestKubelet {
			isNamed("Kubernetes", server, kubelet)
		}
	}
	if want := minor(t, server) - oldestKubelet; oldest > want {
		t.Errorf("the oldest kubelet that is run beside %s is 1.%d, not 1.%d", server, oldest, want)
	}
	if asked := skewed.FindStringSubmatch(makefile); asked == nil || !slices.Equal(strings.Fields(asked[1]), folders) {
		t.Errorf("make test-skew asks for %q, not for %q", asked, folders)
	}

	modules, err := filepath.Glob(filepath.Join(components, "*", "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	for _, goMod := range append(modules, filepath.Join(repository, "go.mod"), filepath.Join(repository, "test", "go.mod")) {
		if version := required(t, goMod, clusterAPI); version != "" {
			built = append(built, version)
			hasRow("Cluster API", version, "v1beta2")
		}
	}

	from := upgradeFrom.FindStringSubmatch(makefile)
	if from == nil {
		t.Fatal("the Makefile has no UPGRADE_FROM")
	}
	hasRow("Plugin and controller", "this release", from[1])
	hasRow("Plugin and controller", from[1], "this release")

	for heading, rows := range tables {
		for _, row := range rows {
			for _, version := range exactVersion.FindAllString(strings.Join(row[:len(row)-1], " "), -1) {
				if !slices.Contains(built, version) {
					t.Errorf("%s: nothing builds %s", heading, version)
				}
			}
		}
	}
}

// Each row names what ran it, which exists, or says that nothing did.
func TestVersionsWereRun(t *testing.T) {
	makefile := readFile(t, filepath.Join(repository, "Makefile"))
	tests := testFunctions(t)
	for heading, rows := range versionTables(t, "versions.md") {
		if heading == "What is carried over" {
			continue
		}
		for _, row := range rows {
			run := row[len(row)-1]
			targets := makeTarget.FindAllStringSubmatch(run, -1)
			if notRun(row) == (len(targets) > 0) {
				t.Errorf("%s: it is not clear whether %q was run", heading, row)
			}
			for _, target := range targets {
				if !strings.Contains(makefile, "\n"+target[1]+": ##") {
					t.Errorf("%s: there is no make %s", heading, target[1])
				}
			}
			for _, test := range testName.FindAllStringSubmatch(run, -1) {
				if !slices.Contains(tests, test[1]) {
					t.Errorf("%s: there is no %s", heading, test[1])
				}
			}
		}
	}
}

func notRun(row []string) bool { return strings.HasPrefix(row[len(row)-1], "*not run*: ") }

func minor(t *testing.T, version string) int {
	t.Helper()
	parts := strings.Split(version, ".")
	if len(parts) != 3 || parts[0] != "v1" {
		t.Fatalf("version %q", version)
	}
	number, err := strconv.Atoi(parts[1])
	if err != nil {
		t.Fatal(err)
	}
	return number
}

// testFunctions are the names of the end-to-end tests.
func testFunctions(t *testing.T) (names []string) {
	t.Helper()
	declared := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	err := filepath.WalkDir(filepath.Join(repository, "test"), func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		for _, found := range declared.FindAllStringSubmatch(readFile(t, path), -1) {
			names = append(names, found[1])
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}
