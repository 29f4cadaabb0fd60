// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"cmp"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const reasonsPage = "reasons.md"

// The packages of the controller: their reasons are in conditions, Events and counters.
var reasonRoots = []string{"pkg/attestation", "pkg/verifier", "pkg/controller", "pkg/clusterapi", "cmd/node-attestation-controller"}

// notEmitted are constants and literals that nobody sees.
var notEmitted = map[string]string{
	"DryRun": "the condition of a patch that is never stored",
}

// ofOthers are reasons that only metrics and kubectl attest show.
var ofOthers = []string{"NoEvidence"}

// carriers are the expressions that carry the reason of a decision or of a verdict. What can be in
// them is found where it is put in: constants, and the arguments of functions that take a reason.
var carriers = []string{
	"d.Refusals.Reason", "decision.Refusals.Reason", "warning.Reason", "v.reason", "v.Reason", "refusal.Reason",
	// of an API error, and what an operator wrote
	"metav1.StatusReasonForbidden", "m.by.Spec.Reason", "m.suspension.Spec.Reason", "before.Reason", "by.Reason", "a.Reason",
	// the text of a webhook's answer
	"d.Cause.message",
}

// emittedReasons finds reasons in the code without running it.
type emittedReasons struct {
	files     map[string]*ast.File
	positions *token.FileSet
	// found has where each reason is.
	found map[string]string
	// constants has the names of constants that are reasons.
	constants map[string]bool
	// takes has the position of the reason among the arguments of functions and methods: of
	// exported ones by their names, of others by package.name.
	takes map[string][]int
	// unknown are the expressions in the place of a reason that the test does not understand.
	unknown []string
}

func findReasons(t *testing.T) *emittedReasons {
	t.Helper()
	e := &emittedReasons{
		files: map[string]*ast.File{}, positions: token.NewFileSet(), found: map[string]string{}, constants: map[string]bool{},
		takes: map[string][]int{"Eventf": {3}}, // of client-go's recorder
	}
	for _, root := range reasonRoots {
		walkGo(t, root, func(path string) {
			file, err := parser.ParseFile(e.positions, path, nil, parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			e.files[path] = file
		})
	}
	for _, file := range e.files {
		for _, declared := range file.Decls {
			switch d := declared.(type) {
			case *ast.GenDecl:
				e.addConstants(d)
			case *ast.FuncDecl:
				e.addFunction(file.Name.Name, d)
			}
		}
	}
	for _, file := range e.files {
		// beside constants it has only FormatError.Reason, a text
		if file.Name.Name == "attestation" {
			continue
		}
		for _, declared := range file.Decls {
			if f, ok := declared.(*ast.FuncDecl); ok && f.Body != nil {
				e.inspect(file.Name.Name, f)
			}
		}
	}
	return e
}

// addConstants adds constants of the type Reason, and those with a name such as ReasonX.
func (e *emittedReasons) addConstants(d *ast.GenDecl) {
	if d.Tok != token.CONST {
		return
	}
	for _, spec := range d.Specs {
		values := spec.(*ast.ValueSpec)
		for i, name := range values.Names {
			if !isReasonType(values.Type) && !strings.HasPrefix(strings.ToLower(name.Name), "reason") {
				continue
			}
			e.constants[name.Name] = true
			if i < len(values.Values) {
				e.addLiteral(values.Values[i])
			}
		}
	}
}

// addFunction notes which argument of a function is a reason.
func (e *emittedReasons) addFunction(inPackage string, f *ast.FuncDecl) {
	key, at := functionKey(inPackage, f.Name.Name), 0
	for _, field := range f.Type.Params.List {
		for _, name := range field.Names {
			if name.Name == "reason" || isReasonType(field.Type) {
				if !slices.Contains(e.takes[key], at) {
					e.takes[key] = append(e.takes[key], at)
				}
			}
			at++
		}
		at += max(0, 1-len(field.Names)) // a parameter without a name
	}
}

func functionKey(inPackage, name string) string {
	if ast.IsExported(name) {
		return name
	}
	return inPackage + "." + name
}

func isReasonType(t ast.Expr) bool {
	if selected, ok := t.(*ast.SelectorExpr); ok {
		t = selected.Sel
	}
	name, ok := t.(*ast.Ident)
	return ok && name.Name == "Reason"
}

// inspect finds the reasons in the body of a function.
func (e *emittedReasons) inspect(inPackage string, f *ast.FuncDecl) {
	ast.Inspect(f.Body, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.KeyValueExpr:
			if key, ok := n.Key.(*ast.Ident); ok && strings.EqualFold(key.Name, "reason") {
				e.addValue(n.Value)
			}
		case *ast.AssignStmt:
			for i, target := range n.Lhs {
				if len(n.Lhs) == len(n.Rhs) && strings.EqualFold(lastName(target), "reason") {
					e.addValue(n.Rhs[i])
				}
			}
		case *ast.CallExpr:
			name := lastName(n.Fun)
			for _, at := range e.takes[functionKey(inPackage, name)] {
				// of a time or a WaitGroup
				if at >= len(n.Args) || name == "Add" && !e.isReason(n.Args[at]) {
					continue
				}
				e.addValue(n.Args[at])
			}
			if isReasonType(n.Fun) && len(n.Args) == 1 { // a conversion
				e.addValue(n.Args[0])
			}
		}
		return true
	})
}

// isReason reports whether an expression is a string or a constant that is a reason.
func (e *emittedReasons) isReason(value ast.Expr) bool {
	literal, ok := value.(*ast.BasicLit)
	return ok && literal.Kind == token.STRING || e.constants[lastName(value)]
}

// addValue adds an expression that is used as a reason.
func (e *emittedReasons) addValue(value ast.Expr) {
	switch v := value.(type) {
	case *ast.BasicLit:
		e.addLiteral(v)
		return
	case *ast.CallExpr: // string(...), Reason(...), or a method that returns a reason
		if name := lastName(v.Fun); len(v.Args) == 1 && (name == "string" || name == "Reason") {
			e.addValue(v.Args[0])
			return
		}
		if slices.Contains(carriers, pathOf(v.Fun)) {
			return
		}
	case *ast.UnaryExpr:
		if v.Op == token.AND {
			e.addValue(v.X)
			return
		}
	case *ast.Ident:
		// a parameter or a variable: found where it is set
		if v.Name == "reason" || e.constants[v.Name] {
			return
		}
	case *ast.SelectorExpr:
		if e.constants[v.Sel.Name] || slices.Contains(carriers, pathOf(v)) {
			return
		}
	}
	e.unknown = append(e.unknown, e.positions.Position(value.Pos()).String()+": "+cmp.Or(pathOf(value), "an expression"))
}

func (e *emittedReasons) addLiteral(value ast.Expr) {
	literal, ok := value.(*ast.BasicLit)
	if !ok || literal.Kind != token.STRING {
		return // another constant, which is found where it is declared
	}
	if reason, err := strconv.Unquote(literal.Value); err == nil && reason != "" {
		e.found[reason] = e.positions.Position(literal.Pos()).String()
	}
}

// lastName returns the name that is called or assigned, without what comes before the last dot.
func lastName(expression ast.Expr) string {
	path := pathOf(expression)
	return path[strings.LastIndex(path, ".")+1:]
}

// pathOf returns names with dots between them, or nothing for another expression.
func pathOf(expression ast.Expr) string {
	switch x := expression.(type) {
	case *ast.Ident:
		return x.Name
	case *ast.SelectorExpr:
		return pathOf(x.X) + "." + x.Sel.Name
	}
	return ""
}

// documentedReasons returns the rows of the tables of reasons, by their first cells.
func documentedReasons(t *testing.T) map[string][]string {
	t.Helper()
	rows, inTable := map[string][]string{}, false
	for line := range strings.Lines(readFile(t, filepath.Join(repository, "docs", reasonsPage))) {
		line = strings.TrimSpace(line)
		switch {
		case line == "| reason | meaning | what to do |":
			inTable = true
		case !strings.HasPrefix(line, "|"):
			inTable = false
		case inTable && !strings.HasPrefix(line, "| --- "):
			cells := strings.Split(strings.Trim(line, "|"), "|")
			for i := range cells {
				cells[i] = strings.TrimSpace(cells[i])
			}
			if rows[cells[0]] != nil {
				t.Errorf("%s has two rows of %s", reasonsPage, cells[0])
			}
			rows[cells[0]] = cells
		}
	}
	return rows
}

// docs/reasons.md has each reason that the controller gives, and no other. It says what each reason
// means and what to do.
func TestEachReasonHasARemedy(t *testing.T) {
	emitted, rows := findReasons(t), documentedReasons(t)
	for _, unknown := range emitted.unknown {
		t.Errorf("%s stands for a reason: make it a constant or a literal, or teach this test what it is", unknown)
	}
	for reason, where := range emitted.found {
		if notEmitted[reason] != "" {
			continue
		}
		switch cells := rows[reason]; {
		case cells == nil:
			t.Errorf("%s: %s has no row for the reason %s", where, reasonsPage, reason)
		case len(cells) != 3 || cells[1] == "" || cells[2] == "":
			t.Errorf("%s: the row of %s has to be: reason, meaning, what to do: %q", reasonsPage, reason, cells)
		}
	}
	for reason := range rows {
		if emitted.found[reason] == "" && !slices.Contains(ofOthers, reason) {
			t.Errorf("%s: nothing gives the reason %s", reasonsPage, reason)
		}
	}
	for reason, why := range notEmitted {
		if emitted.found[reason] == "" || rows[reason] != nil {
			t.Errorf("%s (%s) is gone, or documented: take it from the exceptions", reason, why)
		}
	}
}
