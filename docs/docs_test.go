// SPDX-License-Identifier: Apache-2.0

// Package docs holds the tests of documents that belong to no package of the code.
package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const (
	repository   = ".."
	architecture = "architecture.md"
)

func readFile(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// functions are the bodies of all functions and methods, by package.Name and package.Type.Name.
// Packages of the same name share their entries.
type functions map[string][]*ast.BlockStmt

// readFunctions parses what is built into the programs.
func readFunctions(t *testing.T) functions {
	t.Helper()
	all := functions{}
	for _, root := range []string{"cmd", "pkg", "internal"} {
		walkGo(t, root, func(path string) {
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			for _, declared := range file.Decls {
				if f, ok := declared.(*ast.FuncDecl); ok && f.Body != nil {
					name := file.Name.Name + "." + receiverOf(f) + f.Name.Name
					all[name] = append(all[name], f.Body)
				}
			}
		})
	}
	return all
}

// walkGo calls visit with each Go file below a folder of the repository that is no test.
func walkGo(t *testing.T, root string, visit func(path string)) {
	t.Helper()
	err := filepath.WalkDir(filepath.Join(repository, root), func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && (entry.Name() == "testdata" || entry.Name() == "components"):
			// modules of their own
			return filepath.SkipDir
		case !entry.IsDir() && strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go"):
			visit(path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// receiverOf returns the type of a method with a dot, and nothing for a function.
func receiverOf(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return ""
	}
	receiver := f.Recv.List[0].Type
	for {
		switch r := receiver.(type) {
		case *ast.StarExpr:
			receiver = r.X
		case *ast.IndexExpr:
			receiver = r.X
		case *ast.IndexListExpr:
			receiver = r.X
		case *ast.Ident:
			return r.Name + "."
		default:
			return ""
		}
	}
}

// firstCall returns where the first call of a name in a body ends, 0 if there is none. In f(g())
// the call of g ends first, as it does when the program runs.
func firstCall(body *ast.BlockStmt, name string) token.Pos {
	var first token.Pos
	ast.Inspect(body, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		called := ""
		switch f := call.Fun.(type) {
		case *ast.Ident:
			called = f.Name
		case *ast.SelectorExpr:
			called = f.Sel.Name
		}
		if called == name && (first == 0 || call.End() < first) {
			first = call.End()
		}
		return true
	})
	return first
}

// chart is a flow chart in which each rectangle is a function.
type chart struct {
	// names are the names in all boxes by their ids, of rectangles as the functions are declared.
	// rectangles are the ids of functions.
	names      map[string]string
	rectangles map[string]bool
	arrows     []arrow
}

type arrow struct{ from, kind, to string }

// The kinds of arrows.
const (
	call    = "-->"
	next    = "==>"
	through = "-.->"
)

var (
	chartBlock  = regexp.MustCompile("(?s)\n```mermaid\nflowchart TD\n(.*?)```\n")
	packageLine = regexp.MustCompile(`^%% package (\w+)$`)
	rectangle   = regexp.MustCompile(`^(\w+)\["([\w.]+)(?:<br/>[^"<>]+)?"\]$`)
	roundedBox  = regexp.MustCompile(`^(\w+)\(\["([^"<>]+)"\]\)$`)
	arrowLine   = regexp.MustCompile(`^(\w+) (-->|==>|-\.->)(?:\|[^|]+\|)? (\w+)$`)
	packageRow  = regexp.MustCompile("(?m)^\\| `((?:cmd|pkg|internal|perf|test)/[^` ]+)` \\|")
)

// parseCharts reads the charts of a document. A line that is neither a box nor an arrow is an
// error: mermaid would draw it, and nothing would compare it with the code.
func parseCharts(t *testing.T, document string, all functions) []chart {
	t.Helper()
	var charts []chart
	for _, block := range chartBlock.FindAllStringSubmatch(document, -1) {
		c := chart{names: map[string]string{}, rectangles: map[string]bool{}}
		inPackage := ""
		for line := range strings.Lines(block[1]) {
			line = strings.TrimSpace(line)
			if line == "" {
				continue
			}
			if m := packageLine.FindStringSubmatch(line); m != nil {
				inPackage = m[1]
			} else if m := rectangle.FindStringSubmatch(line); m != nil {
				c.rectangles[m[1]], c.names[m[1]] = true, m[2]
				if all[m[2]] == nil {
					c.names[m[1]] = inPackage + "." + m[2]
				}
			} else if m := roundedBox.FindStringSubmatch(line); m != nil {
				c.names[m[1]] = m[2]
			} else if m := arrowLine.FindStringSubmatch(line); m != nil {
				c.arrows = append(c.arrows, arrow{m[1], m[2], m[3]})
			} else {
				t.Errorf("neither a box nor an arrow: %s", line)
			}
		}
		charts = append(charts, c)
	}
	return charts
}

// Each rectangle is a function, each solid arrow is a call, and a thick arrow is the order of two
// calls of one function.
func TestChartsAreTheCode(t *testing.T) {
	all := readFunctions(t)
	charts := parseCharts(t, readFile(t, architecture), all)
	if len(charts) != 3 {
		t.Fatalf("there are %d charts", len(charts))
	}
	for _, c := range charts {
		if len(c.rectangles) < 6 || len(c.arrows) < 9 {
			t.Errorf("a chart has only %d functions and %d arrows", len(c.rectangles), len(c.arrows))
		}
		for id := range c.rectangles {
			if all[c.names[id]] == nil {
				t.Errorf("there is no function %s", c.names[id])
			}
		}
		for _, a := range c.arrows {
			from, to := c.names[a.from], c.names[a.to]
			switch {
			case from == "" || to == "":
				t.Errorf("%s %s %s: there is no such box", a.from, a.kind, a.to)
			case a.kind == through:
			case !c.rectangles[a.from] || !c.rectangles[a.to]:
				t.Errorf("%s %s %s: an arrow between functions leads to something else", from, a.kind, to)
			case a.kind == call && !calls(all[from], to):
				t.Errorf("%s does not call %s", from, to)
			case a.kind == next && !slices.ContainsFunc(c.callers(a.from, nil), func(caller string) bool { return callsInOrder(all[caller], from, to) }):
				t.Errorf("no function of %q calls %s and then %s", c.callers(a.from, nil), from, to)
			}
		}
	}
}

// callers returns the functions with a solid arrow to a box, or to one from which thick arrows lead
// there. Thick arrows in a circle end at a box that was passed.
func (c chart) callers(id string, passed []string) (names []string) {
	if slices.Contains(passed, id) {
		return nil
	}
	for _, a := range c.arrows {
		switch {
		case a.to != id:
		case a.kind == call:
			names = append(names, c.names[a.from])
		case a.kind == next:
			names = append(names, c.callers(a.from, append(passed, id))...)
		}
	}
	return names
}

// lastPart is the name of a function without package and type.
func lastPart(name string) string { return name[strings.LastIndex(name, ".")+1:] }

func calls(bodies []*ast.BlockStmt, name string) bool {
	return slices.ContainsFunc(bodies, func(body *ast.BlockStmt) bool { return firstCall(body, lastPart(name)) != 0 })
}

func callsInOrder(bodies []*ast.BlockStmt, first, second string) bool {
	return slices.ContainsFunc(bodies, func(body *ast.BlockStmt) bool {
		a, b := firstCall(body, lastPart(first)), firstCall(body, lastPart(second))
		return a != 0 && a < b
	})
}

// The map has a row for each package of the programs, and no other. Packages of test and perf have
// a comment that says what they are for.
func TestEachPackageIsOnTheMap(t *testing.T) {
	var packages, named []string
	for _, root := range []string{"cmd", "pkg", "internal"} {
		walkGo(t, root, func(path string) {
			packages = append(packages, strings.TrimPrefix(filepath.ToSlash(filepath.Dir(path)), repository+"/"))
		})
	}
	for _, row := range packageRow.FindAllStringSubmatch(readFile(t, architecture), -1) {
		named = append(named, row[1])
	}
	slices.Sort(packages)
	slices.Sort(named)
	for _, p := range slices.Compact(packages) {
		if !slices.Contains(named, p) {
			t.Errorf("%s has no row", p)
		}
	}
	for i, n := range named {
		if !slices.Contains(packages, n) || i > 0 && named[i-1] == n {
			t.Errorf("%s is no package, or has two rows", n)
		}
	}
}

var (
	// ours are names of manifests, without those that the text makes of a cluster's name.
	ours       = regexp.MustCompile("`(node-attestation-[a-z-]+)`")
	metadataOf = regexp.MustCompile(`(?m)^kind: (\w+)\nmetadata:\n  name: (\S+)$`)
)

// Permissions name each admission policy, and nothing of ours that no manifest has or mentions.
func TestPermissionsNameThePolicies(t *testing.T) {
	page := readFile(t, "permissions.md")
	manifests := ""
	err := filepath.WalkDir(filepath.Join(repository, "packaging"), func(path string, entry fs.DirEntry, err error) error {
		if entry != nil && entry.IsDir() && entry.Name() == "files" { // the chart's copies
			return filepath.SkipDir
		}
		if err == nil && strings.HasSuffix(path, ".yaml") {
			manifests += readFile(t, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	policies := 0
	for _, m := range metadataOf.FindAllStringSubmatch(manifests, -1) {
		if m[1] != "ValidatingAdmissionPolicy" {
			continue
		}
		policies++
		if !strings.Contains(page, "`"+m[2]+"`") {
			t.Errorf("the policy %s is not on the page", m[2])
		}
	}
	if policies < 12 {
		t.Errorf("only %d policies were found", policies)
	}
	for _, m := range ours.FindAllStringSubmatch(page, -1) {
		if !regexp.MustCompile(`\b` + m[1] + `(?:[^\w-]|$)`).MatchString(manifests) {
			t.Errorf("no manifest has %s", m[1])
		}
	}
}
