// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const tableBegin, tableEnd = "<!-- table -->\n", "<!-- /table -->"

// tableRow is a row of a configuration page up to its type: a field, and what else is in that cell.
var tableRow = regexp.MustCompile("(?m)^(\\| `([^`]+)`[^|]* \\| )[^|]*\\|")

// configPage is the page of a configuration file. Its table is written by hand, except for the
// types.
type configPage struct {
	// guide is the page, and folder the package with the types.
	guide, folder string
	// defaults is the configuration with the defaults.
	defaults reflect.Value
}

// render returns the page with the types of all fields.
func (c configPage) render(repository string) (string, error) {
	comments, err := readComments(filepath.Join(repository, c.folder))
	if err != nil {
		return "", err
	}
	types := fieldTypes{kinds: map[string]string{}, comments: comments}
	if err := types.add("", c.defaults); err != nil {
		return "", err
	}
	data, err := os.ReadFile(filepath.Join(repository, c.guide)) //nolint:gosec // G703: the caller names the page
	if err != nil {
		return "", err
	}
	before, rest, ok := strings.Cut(string(data), tableBegin)
	table, after, ok2 := strings.Cut(rest, tableEnd)
	if !ok || !ok2 {
		return "", fmt.Errorf("%s has no table", c.guide)
	}
	table = tableRow.ReplaceAllStringFunc(table, func(row string) string {
		m := tableRow.FindStringSubmatch(row)
		if types.kinds[m[2]] == "" {
			err = errors.Join(err, fmt.Errorf("%s: there is no field %s", c.guide, m[2]))
		}
		return m[1] + types.kinds[m[2]] + " |"
	})
	return before + tableBegin + table + tableEnd + after, err
}

// fieldTypes has the type of each field of a configuration, by its path.
type fieldTypes struct {
	kinds    map[string]string
	comments comments
}

// add adds the fields of a struct. Each needs a comment.
func (t fieldTypes) add(prefix string, value reflect.Value) error {
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
		t.kinds[prefix+name] = kind
		if inner.IsValid() {
			if err := t.add(prefix+name+suffix+".", inner); err != nil {
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
