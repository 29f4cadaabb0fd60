// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// configPage is the page of a configuration file.
type configPage struct {
	title, version string
	// guide is the document that says how to use it, and folder the package with its types.
	guide, folder string
	// defaults is the configuration with the defaults.
	defaults reflect.Value
}

func (c configPage) render(repository string) (string, error) {
	comments, err := readComments(filepath.Join(repository, c.folder))
	if err != nil {
		return "", err
	}
	introduction := fmt.Sprintf("Of version `%s`. [%s](../%s) says how to use it, and which fields are required.", c.version, c.guide, c.guide)
	table := configTable{page: newPage(c.folder, c.title, introduction, "Field", "Type", "Default", "Description"), comments: comments}
	err = table.fields("", c.defaults)
	return table.String(), err
}

// configTable has a row for each field of a configuration.
type configTable struct {
	*page
	comments comments
}

func (t configTable) fields(prefix string, value reflect.Value) error {
	for i := range value.NumField() {
		field := value.Type().Field(i)
		if field.Anonymous { // apiVersion and kind
			continue
		}
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		comment := t.comments[value.Type().Name()+"."+field.Name]
		inner, kind, suffix := structIn(value.Field(i))
		if comment == "" && inner.IsValid() {
			comment = t.comments[inner.Type().Name()]
		}
		if comment == "" {
			return fmt.Errorf("%s.%s has no comment", value.Type(), field.Name)
		}
		t.row(code(prefix+name), kind, defaultOf(value.Field(i)), comment)
		if inner.IsValid() {
			if err := t.fields(prefix+name+suffix+".", inner); err != nil {
				return err
			}
		}
	}
	return nil
}

// structIn returns the struct that a field holds, and the name of the field's type. In the names of
// the struct's fields, suffix follows the name of the field.
func structIn(value reflect.Value) (inner reflect.Value, kind, suffix string) {
	goType := value.Type()
	switch {
	case goType == reflect.TypeFor[metav1.Duration]():
		return reflect.Value{}, "duration", ""
	case goType == reflect.TypeFor[metav1.Time]():
		return reflect.Value{}, "time", ""
	}
	switch goType.Kind() {
	case reflect.Pointer:
		if value.IsNil() {
			value = reflect.New(goType.Elem())
		}
		return structIn(value.Elem())
	case reflect.Slice:
		inner, kind, _ = structIn(reflect.Zero(goType.Elem()))
		return inner, "list of " + kind, "[]"
	case reflect.Map:
		inner, kind, _ = structIn(reflect.Zero(goType.Elem()))
		return inner, "map of " + kind, "." + "*"
	case reflect.Struct:
		return value, "object", ""
	}
	return reflect.Value{}, goType.Kind().String(), ""
}

// wholeUnits shortens a duration, such as "168h0m0s".
var wholeUnits = strings.NewReplacer("h0m0s ", "h", "m0s ", "m", " ", "")

// defaultOf returns the default, nothing for a field without one and for objects.
func defaultOf(value reflect.Value) string {
	if value.Kind() == reflect.Bool {
		return code(fmt.Sprint(value.Bool()))
	}
	if value.IsZero() {
		return ""
	}
	switch v := value.Interface().(type) {
	case metav1.Duration:
		return code(wholeUnits.Replace(v.Duration.String() + " "))
	case fmt.Stringer:
		return code(v.String())
	}
	switch value.Kind() {
	case reflect.Struct, reflect.Pointer, reflect.Slice, reflect.Map:
		return ""
	}
	return code(fmt.Sprint(value.Interface()))
}

// comments are those of types, and of fields behind the type's name and a dot.
type comments map[string]string

// readComments reads the comments of the structs of a package.
func readComments(folder string) (comments, error) {
	files, err := filepath.Glob(filepath.Join(folder, "*.go"))
	if err != nil {
		return nil, err
	}
	all := comments{}
	for _, path := range files {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		for _, declared := range file.Decls {
			if types, ok := declared.(*ast.GenDecl); ok && types.Tok == token.TYPE {
				all.add(types)
			}
		}
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("%w: types in %s", os.ErrNotExist, folder)
	}
	return all, nil
}

func (c comments) add(declared *ast.GenDecl) {
	for _, spec := range declared.Specs {
		named := spec.(*ast.TypeSpec)
		c[named.Name.Name] = declared.Doc.Text()
		structure, ok := named.Type.(*ast.StructType)
		if !ok {
			continue
		}
		previous := ""
		for _, field := range structure.Fields.List {
			if text := field.Doc.Text(); text != "" {
				previous = text // one comment for several fields stands above the first
			}
			for _, name := range field.Names {
				c[named.Name.Name+"."+name.Name] = previous
			}
		}
	}
}
