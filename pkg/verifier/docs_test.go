// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const (
	repository = "../.."
	rulesPage  = "docs/rules.md"
)

// source is what TestRulesAreDocumented knows of the repository.
type source struct {
	// declared has functions, methods and types as package.Name and package.Type.Name.
	declared map[string]bool
	// tests has the files of each test, and texts the content of each file.
	tests map[string][]string
	texts map[string]string
	// cited has a file for each rule that is cited.
	cited map[string]string
}

var (
	funcDecl    = regexp.MustCompile(`^func (?:\(\w* ?\*?(\w+)(?:\[[^]]*\])?\) )?(\w+)`)
	typeDecl    = regexp.MustCompile(`^type (\w+)`)
	ruleID      = regexp.MustCompile(`(?:^|[^\w./*-])([SIM][1-9]|R1|T[12]|A\*)(?:[^\w*-]|$)`)
	ruleHeading = regexp.MustCompile(`(?m)^### (\S+): `)
	quotedCode  = regexp.MustCompile("`([a-z]\\w*(?:\\.\\w+)+|Test\\w+(?:/\\w+)?)`")
)

// readSource reads each file that may cite a rule.
func readSource(t *testing.T) source {
	s := source{declared: map[string]bool{}, tests: map[string][]string{}, texts: map[string]string{}, cited: map[string]string{}}
	err := filepath.WalkDir(repository, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := filepath.ToSlash(strings.TrimPrefix(path, repository+string(filepath.Separator)))
		switch {
		case entry.IsDir() && slices.Contains([]string{".git", "bin", "dist", "testdata", "man"}, entry.Name()):
			return filepath.SkipDir
		case entry.IsDir(), !slices.Contains([]string{".go", ".md", ".yaml", ".yml", ".sh"}, filepath.Ext(path)):
			return nil
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		text := string(data)
		if name != rulesPage {
			for line := range strings.Lines(text) {
				if !mayCite(line) {
					continue
				}
				for _, m := range ruleID.FindAllStringSubmatch(line, -1) {
					s.cited[m[1]] = name
				}
			}
		}
		if filepath.Ext(path) == ".go" {
			s.addGo(name, text)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// mayCite is a quick look at whether a line can have the ID of a rule.
func mayCite(line string) bool {
	for i := range len(line) - 1 {
		if c := line[i+1]; (c == '*' || '1' <= c && c <= '9') && strings.IndexByte("SIMRTA", line[i]) >= 0 {
			return true
		}
	}
	return false
}

func (s source) addGo(name, text string) {
	s.texts[name] = text
	inPackage := ""
	for line := range strings.Lines(text) {
		if clause, ok := strings.CutPrefix(line, "package "); ok && inPackage == "" {
			inPackage = strings.TrimSpace(clause)
		}
		if strings.HasPrefix(line, "type ") {
			if m := typeDecl.FindStringSubmatch(line); m != nil {
				s.declared[inPackage+"."+m[1]] = true
			}
		}
		if !strings.HasPrefix(line, "func ") {
			continue
		}
		switch m := funcDecl.FindStringSubmatch(line); {
		case m == nil:
		case m[1] != "":
			s.declared[inPackage+"."+m[1]+"."+m[2]] = true
		default:
			s.declared[inPackage+"."+m[2]] = true
			if strings.HasPrefix(m[2], "Test") {
				s.tests[m[2]] = append(s.tests[m[2]], name)
			}
		}
	}
}

// exists reports whether the repository has a function, type or test. A test may be followed by a
// rule, whose rows then begin with its ID and a colon.
func (s source) exists(name string) bool {
	test, rows, ofRule := strings.Cut(name, "/")
	if !strings.HasPrefix(name, "Test") {
		return s.declared[name]
	}
	return slices.ContainsFunc(s.tests[test], func(file string) bool {
		return !ofRule || strings.Contains(s.texts[file], `"`+rows+`: `)
	})
}

// docs/rules.md defines each rule that is cited in the repository, and names functions and tests
// that exist.
func TestRulesAreDocumented(t *testing.T) {
	data, err := os.ReadFile(filepath.Join(repository, rulesPage))
	if err != nil {
		t.Fatal(err)
	}
	s := readSource(t)
	sections := ruleHeading.FindAllStringSubmatchIndex(string(data), -1)
	defined := map[string]bool{}
	for i, at := range sections {
		id, end := string(data[at[2]:at[3]]), len(data)
		if i+1 < len(sections) {
			end = sections[i+1][0]
		}
		if defined[id] || s.cited[id] == "" {
			t.Errorf("%s: %s is defined twice, or cited nowhere", rulesPage, id)
		}
		defined[id] = true
		section := string(data[at[0]:end])
		for _, part := range []string{"\n- **Why:** ", "\n- **Else:** ", "\n- **Functions:** `", "\n- **Tests:** `Test"} {
			if strings.Count(section, part) != 1 {
				t.Errorf("%s: %s: has not one %q", rulesPage, id, strings.TrimSpace(part))
			}
		}
	}
	for id, file := range s.cited {
		if !defined[id] {
			t.Errorf("%s cites %s, which %s does not define", file, id, rulesPage)
		}
	}
	for _, m := range quotedCode.FindAllStringSubmatch(string(data), -1) {
		if strings.HasPrefix(m[1], "spec.") || m[1] == "reasons.md" {
			continue // a field of a request, or a file
		}
		if !s.exists(m[1]) {
			t.Errorf("%s: there is no %s", rulesPage, m[1])
		}
	}
}
