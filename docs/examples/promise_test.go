// SPDX-License-Identifier: Apache-2.0

// Package examples holds the promise to infrastructure providers: see docs/providers.md.
package examples

import (
	"bytes"
	"flag"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const (
	libraries = "github.com/kubelet-authenticator/kubelet-authenticator/pkg/"
	golden    = "promise.txt"
)

var (
	update = flag.Bool("update", false, "write "+golden)
	// documents name identifiers of the libraries, such as `controller.FromSigner`.
	documents  = []string{"../providers.md"}
	identifier = regexp.MustCompile("`(?:\\[\\]|\\*|&)?([a-z]\\w*)\\.([A-Z]\\w*)(?:\\.([A-Z]\\w*))?")
)

// promise is the API that providers build upon.
type promise struct {
	// packages are those of the libraries that the examples import, by import path.
	packages map[string]*types.Package
	// names has each exported object of those packages, fields and methods too.
	names map[types.Object]string
	lines map[string]bool
}

// What providers build upon changes on purpose only. The promise is what the examples use of pkg,
// and what the documents name. Rewrite the list with: go test ./docs/examples -update.
func TestPromise(t *testing.T) {
	p := promise{packages: map[string]*types.Package{}, names: map[types.Object]string{}, lines: map[string]bool{}}
	for _, used := range checkExamples(t) {
		p.index(used.Pkg())
		p.add(used)
	}
	for _, document := range documents {
		p.addNamed(t, document)
	}
	lines := make([]string, 0, len(p.lines))
	for line := range p.lines {
		lines = append(lines, line)
	}
	slices.Sort(lines)
	made := []byte(strings.Join(lines, "\n") + "\n")
	if *update {
		if err := os.WriteFile(golden, made, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	data, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	promised := strings.Split(strings.TrimSpace(string(data)), "\n")
	for _, line := range promised {
		if !p.lines[line] {
			t.Errorf("promised, and changed, gone, or no longer used: %s", line)
		}
	}
	for _, line := range lines {
		if !slices.Contains(promised, line) {
			t.Errorf("not promised yet: %s", line)
		}
	}
	if t.Failed() {
		t.Log("if that is meant: go test ./docs/examples -update, and say so in CHANGELOG.md")
	}
}

// checkExamples returns what the examples use of the libraries.
func checkExamples(t *testing.T) []types.Object {
	t.Helper()
	exports := map[string]string{}
	for line := range strings.Lines(goList(t, "-export", "-deps", "-f", "{{.ImportPath}}\t{{.Export}}", "./...")) {
		path, file, _ := strings.Cut(strings.TrimSpace(line), "\t")
		exports[path] = file
	}
	fset := token.NewFileSet()
	compiled := importer.ForCompiler(fset, "gc", func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) })
	var used []types.Object
	for line := range strings.Lines(goList(t, "-f", "{{.ImportPath}}\t{{.Dir}}\t{{join .GoFiles \",\"}}", "./...")) {
		fields := strings.Split(strings.TrimRight(line, "\n"), "\t")
		var files []*ast.File
		for name := range strings.SplitSeq(fields[2], ",") {
			if name == "" {
				continue
			}
			file, err := parser.ParseFile(fset, filepath.Join(fields[1], name), nil, parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			files = append(files, file)
		}
		info := types.Info{Uses: map[*ast.Ident]types.Object{}}
		config := types.Config{Importer: compiled}
		if _, err := config.Check(fields[0], fset, files, &info); err != nil {
			t.Fatal(err)
		}
		for _, object := range info.Uses {
			if object.Pkg() != nil && strings.HasPrefix(object.Pkg().Path(), libraries) && object.Exported() {
				used = append(used, object)
			}
		}
	}
	if len(used) == 0 {
		t.Fatal("the examples use nothing of the libraries")
	}
	return used
}

func goList(t *testing.T, arguments ...string) string {
	t.Helper()
	command := exec.Command("go", append([]string{"list"}, arguments...)...)
	// As in all other builds. The race detector's run sets 1, for which all packages would be
	// compiled once more, for minutes.
	command.Env = append(os.Environ(), "CGO_ENABLED=0")
	var stderr bytes.Buffer
	command.Stderr = &stderr
	out, err := command.Output()
	if err != nil {
		t.Fatalf("go list: %v: %s", err, stderr.String())
	}
	return string(out)
}

// index names all that a package exports.
func (p *promise) index(of *types.Package) {
	if p.packages[of.Path()] != nil {
		return
	}
	p.packages[of.Path()] = of
	prefix := strings.TrimPrefix(of.Path(), strings.TrimSuffix(libraries, "pkg/")) + "."
	for _, name := range of.Scope().Names() {
		object := of.Scope().Lookup(name)
		p.names[object] = prefix + name
		declared, ok := object.(*types.TypeName)
		if !ok {
			continue
		}
		if named, ok := declared.Type().(*types.Named); ok {
			for i := range named.NumMethods() {
				p.names[named.Method(i)] = prefix + name + "." + named.Method(i).Name()
			}
		}
		switch under := declared.Type().Underlying().(type) {
		case *types.Struct:
			for i := range under.NumFields() {
				p.names[under.Field(i)] = prefix + name + "." + under.Field(i).Name()
			}
		case *types.Interface:
			for i := range under.NumMethods() {
				p.names[under.Method(i)] = prefix + name + "." + under.Method(i).Name()
			}
		}
	}
}

// add adds an object. A provider may implement an interface, so each of its methods is promised,
// with its parameters and results.
func (p *promise) add(object types.Object) {
	name, typ := p.names[object], object.Type()
	line := ""
	switch o := object.(type) {
	case *types.TypeName:
		under := typ.Underlying()
		line = "type " + name
		switch u := under.(type) {
		case *types.Struct:
			line += " struct"
		case *types.Interface:
			line += " interface"
			for i := range u.NumMethods() {
				if method := u.Method(i); p.names[method] != "" {
					p.add(method)
					p.addOperands(method.Signature())
				}
			}
		default:
			line += " " + typeString(under)
		}
	case *types.Func:
		line = "func " + name + strings.TrimPrefix(typeString(typ), "func")
	case *types.Const:
		line = "const " + name + " " + typeString(typ) + " = " + o.Val().ExactString()
	case *types.Var:
		line = "var " + name + " " + typeString(typ)
		if o.IsField() {
			line = "field " + name + " " + typeString(typ)
		}
	}
	if name != "" && line != "" {
		p.lines[line] = true
	}
}

// addOperands adds the structs of the libraries that a method takes or returns, with all fields.
func (p *promise) addOperands(signature *types.Signature) {
	for _, tuple := range []*types.Tuple{signature.Params(), signature.Results()} {
		for v := range tuple.Variables() {
			p.addStructs(v.Type())
		}
	}
}

func (p *promise) addStructs(of types.Type) {
	switch t := of.(type) {
	case *types.Pointer:
		p.addStructs(t.Elem())
	case *types.Slice:
		p.addStructs(t.Elem())
	case *types.Map:
		p.addStructs(t.Key())
		p.addStructs(t.Elem())
	case *types.Named:
		fields, ok := t.Underlying().(*types.Struct)
		if pkg := t.Obj().Pkg(); !ok || pkg == nil || !strings.HasPrefix(pkg.Path(), libraries) {
			return
		}
		p.index(t.Obj().Pkg())
		p.add(t.Obj())
		for field := range fields.Fields() {
			if field.Exported() {
				p.add(field)
			}
		}
	}
}

// typeString writes a type without the names of parameters, which no caller depends on.
func typeString(t types.Type) string {
	if signature, ok := t.(*types.Signature); ok {
		t = types.NewSignatureType(nil, nil, nil, unnamed(signature.Params()), unnamed(signature.Results()), signature.Variadic())
	}
	return types.TypeString(t, func(p *types.Package) string {
		return strings.TrimPrefix(p.Path(), strings.TrimSuffix(libraries, "pkg/"))
	})
}

func unnamed(tuple *types.Tuple) *types.Tuple {
	var list []*types.Var
	for v := range tuple.Variables() {
		list = append(list, types.NewParam(token.NoPos, v.Pkg(), "", v.Type()))
	}
	return types.NewTuple(list...)
}

// addNamed adds what a document names. Packages are those that the examples import.
func (p *promise) addNamed(t *testing.T, document string) {
	t.Helper()
	text, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range identifier.FindAllStringSubmatch(string(text), -1) {
		known, found := false, false
		for _, in := range p.packages {
			if in.Name() != m[1] {
				continue
			}
			known = true
			object := in.Scope().Lookup(m[2])
			if object != nil && m[3] != "" {
				object, _, _ = types.LookupFieldOrMethod(object.Type(), true, in, m[3])
			}
			if object != nil {
				found = true
				p.add(object)
			}
		}
		if known && !found {
			t.Errorf("%s: %s is not there", document, strings.Trim(m[0], "`"))
		}
	}
}
