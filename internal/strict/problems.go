// SPDX-License-Identifier: Apache-2.0

package strict

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"

	kjson "sigs.k8s.io/json"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
)

// step leads to a field, or to an item of a list.
type step struct {
	name   string
	index  int
	isItem bool
}

// path leads from the document to a value in it.
type path []step

func (p path) String() string {
	var out strings.Builder
	for i, s := range p {
		switch {
		case s.isItem:
			out.WriteString("[" + strconv.Itoa(s.index) + "]")
		case i > 0:
			out.WriteString("." + text.Line(s.name, maxName))
		default:
			out.WriteString(text.Line(s.name, maxName))
		}
	}
	return out.String()
}

const (
	// maxName bounds a field's name in an error, in bytes, and maxProblems how many problems one
	// error has: an operator mends the first ones first.
	maxName, maxProblems = 64, 20
)

// with returns the path that is one step longer.
func (p path) with(s step) path { return append(slices.Clone(p), s) }

// problem is the error in one field.
type problem struct {
	line int // 0 if it is not known
	text string
}

// describe returns one error for all refused fields: for each its line, its name and its problem.
// document is the whole as decoded JSON.
func describe(data []byte, document any, into reflect.Type, removed Removed, cause error) error {
	f := finder{into: into, removed: removed, lines: parseLines(data)}
	f.search(nil, document)
	if len(f.problems) == 0 {
		return errors.New(strings.TrimPrefix(oneLine(cause.Error()), "json: "))
	}
	slices.SortStableFunc(f.problems, func(a, b problem) int { return cmp.Compare(a.line, b.line) })
	all := make([]string, 0, len(f.problems))
	for _, p := range f.problems {
		if p.line > 0 {
			p.text = fmt.Sprintf("line %d: %s", p.line, p.text)
		}
		all = append(all, p.text)
	}
	return errors.New(strings.Join(all, "; "))
}

// finder finds the fields that a decoder refuses, by decoding each value separately.
type finder struct {
	into     reflect.Type
	removed  Removed
	lines    *node
	problems []problem
}

// search examines a value and, if that is accepted, the values in it.
func (f *finder) search(at path, value any) {
	if len(f.problems) == maxProblems {
		return
	}
	if err := f.decode(at, hull(value)); err != nil {
		f.problems = append(f.problems, problem{f.lines.at(at), f.explain(at, err)})
		return
	}
	switch value := value.(type) {
	case map[string]any:
		for _, name := range slices.Sorted(maps.Keys(value)) {
			f.search(at.with(step{name: name}), value[name])
		}
	case []any:
		for i, item := range value {
			f.search(at.with(step{index: i, isItem: true}), item)
		}
	}
}

// hull returns an empty object for an object, an empty list for a list, and any other value as it
// is.
func hull(value any) any {
	switch value.(type) {
	case map[string]any:
		return map[string]any{}
	case []any:
		return []any{}
	}
	return value
}

// decode decodes a document that has only one value, the one at the path.
func (f *finder) decode(at path, value any) error {
	for _, s := range slices.Backward(at) {
		if s.isItem {
			value = []any{value}
		} else {
			value = map[string]any{s.name: value}
		}
	}
	document, err := json.Marshal(value)
	if err != nil {
		return err
	}
	strict, err := kjson.UnmarshalStrict(document, reflect.New(f.into).Interface())
	return errors.Join(append(strict, err)...)
}

// explain names the field and the problem of its value.
func (f *finder) explain(at path, err error) string {
	name := at.String()
	if name != "" {
		name += ": "
	}
	var mismatch *json.UnmarshalTypeError
	var field kjson.FieldError
	switch {
	case errors.As(err, &mismatch):
		return fmt.Sprintf("%smust be %s, not %s", name, expected(mismatch.Type), got(mismatch.Value))
	case errors.As(err, &field) && len(at) > 0:
		if instead, ok := f.removed[at.String()]; ok {
			return name + "was removed; " + instead
		}
		last := len(at) - 1
		return name + "unknown field" + text.DidYouMean(at[last].name, "", fieldsAt(f.into, at[:last]))
	}
	return name + strings.TrimPrefix(strings.TrimPrefix(oneLine(err.Error()), "json: "), "time: ")
}

// expected describes the values that fit a type.
func expected(t reflect.Type) string {
	switch t.Kind() {
	case reflect.String:
		return "a string"
	case reflect.Bool:
		return "true or false"
	case reflect.Slice, reflect.Array:
		return "a list"
	case reflect.Struct, reflect.Map:
		return "an object"
	case reflect.Float32, reflect.Float64:
		return "a number"
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64,
		reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return "a whole number in range"
	}
	return "a value of type " + t.String()
}

// got describes a value in encoding/json's words, such as "number 1.5", "array" and "bool".
func got(value string) string {
	switch value {
	case "array":
		return "a list"
	case "object":
		return "an object"
	case "bool":
		return "true or false"
	}
	return "a " + value
}

// fieldsAt returns the names of the fields that the struct at a path has, none if it is no struct.
func fieldsAt(t reflect.Type, at path) []string {
	for i := 0; ; {
		for t.Kind() == reflect.Pointer {
			t = t.Elem()
		}
		if i == len(at) {
			break
		}
		next := at[i]
		i++
		switch kind := t.Kind(); {
		case next.isItem && (kind == reflect.Slice || kind == reflect.Array), !next.isItem && kind == reflect.Map:
			t = t.Elem()
		case !next.isItem && kind == reflect.Struct:
			field, ok := jsonFields(t)[next.name]
			if !ok {
				return nil
			}
			t = field
		default:
			return nil
		}
	}
	if t.Kind() != reflect.Struct {
		return nil
	}
	return slices.Sorted(maps.Keys(jsonFields(t)))
}

// jsonFields returns the types of a struct's fields by their names in JSON.
func jsonFields(t reflect.Type) map[string]reflect.Type {
	fields := map[string]reflect.Type{}
	for i := range t.NumField() {
		f := t.Field(i)
		name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case name == "-":
		case f.Anonymous && name == "" || options == "inline":
			maps.Copy(fields, jsonFields(f.Type))
		case f.IsExported():
			fields[cmp.Or(name, f.Name)] = f.Type
		}
	}
	return fields
}
