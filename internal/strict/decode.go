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
	"strings"
	"sync"

	"go.yaml.in/yaml/v3"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
)

const (
	// maxName bounds a field's name in an error, maxSyntaxError a syntax error, in bytes.
	// maxProblems is how many problems one document has: an operator mends the first ones first.
	maxName, maxSyntaxError, maxProblems = 64, 256, 20
	// maxValues and maxMerges bound what aliases can make of a small document.
	maxValues, maxMerges = 1 << 20, 100
	// maxText limits a Text, in bytes.
	maxText = 4096
)

// Text is a scalar as it is written, since a fingerprint may look like a number, and a node name
// like a boolean.
type Text struct {
	Line  int
	Value string
}

// Line is the type of a field that gets the first line of its struct.
type Line int

// decoding is the decoding of one document.
type decoding struct {
	Decoder
	problems       []*Problem
	values, merges int
}

// DecodeNode is like Decode, and returns the first problems. A yaml.Node in into gets a part of the
// document that is not examined.
func (d Decoder) DecodeNode(n *yaml.Node, into any) []*Problem {
	decoding := &decoding{Decoder: d}
	decoding.value(n, n.Line, "", reflect.ValueOf(into).Elem())
	return decoding.problems
}

func (d *decoding) refuse(line int, at, format string, arguments ...any) {
	if len(d.problems) == maxProblems {
		return
	}
	if at != "" {
		at += ": "
	}
	d.problems = append(d.problems, &Problem{line, at + fmt.Sprintf(format, arguments...)})
}

// value decodes a node. line is that of the field, and at is the path to the field.
func (d *decoding) value(n *yaml.Node, line int, at string, into reflect.Value) {
	target := into.Addr().Interface()
	if raw, ok := target.(*yaml.Node); ok {
		*raw = *n
		return
	}
	if !d.accepts(n, line, at) {
		return
	}
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	written, isText := target.(*Text)
	_, isOpaque := target.(json.Unmarshaler)
	kind, t := into.Kind(), into.Type()
	switch {
	case isText && n.Kind == yaml.ScalarNode && len(n.Value) <= maxText:
		*written = Text{n.Line, n.Value}
	case isText && n.Kind == yaml.ScalarNode:
		d.refuse(line, at, "is longer than %d bytes", maxText)
	case isText:
		d.refuse(line, at, "must be a string, not %s", kindOf(n))
	case isOpaque || isNull(n):
		d.leaf(n, line, at, target)
	case kind == reflect.Pointer:
		if into.IsNil() {
			into.Set(reflect.New(t.Elem()))
		}
		d.value(n, line, at, into.Elem())
	case kind == reflect.Slice && n.Kind == yaml.SequenceNode:
		list := reflect.MakeSlice(t, len(n.Content), len(n.Content))
		for i, item := range n.Content {
			d.value(item, item.Line, fmt.Sprintf("%s[%d]", at, i), list.Index(i))
		}
		into.Set(list)
	case kind == reflect.Map && n.Kind == yaml.MappingNode:
		if into.IsNil() {
			into.Set(reflect.MakeMap(t))
		}
		d.fields(n, at, map[string]int{}, func(name, path string, line int, value *yaml.Node) {
			element := reflect.New(t.Elem()).Elem()
			d.value(value, line, path, element)
			into.SetMapIndex(reflect.ValueOf(name).Convert(t.Key()), element)
		})
	case kind == reflect.Struct && n.Kind == yaml.MappingNode:
		d.object(n, at, into)
	default: // a scalar, or a value that does not fit
		d.leaf(n, line, at, target)
	}
}

// counts counts a value, and reports whether the document may have it.
func (d *decoding) counts(line int, at string) bool {
	d.values++
	if d.values == maxValues+1 {
		d.refuse(line, at, "the document has more than %d values", maxValues)
	}
	return d.values <= maxValues
}

// accepts checks a node by itself.
func (d *decoding) accepts(n *yaml.Node, line int, at string) bool {
	switch {
	case !d.counts(line, at):
	case d.Plain && (n.Kind == yaml.AliasNode || n.Anchor != ""):
		d.refuse(n.Line, at, "anchors and aliases are not allowed")
	case d.Plain && n.Style&yaml.TaggedStyle != 0:
		d.refuse(n.Line, at, "tags are not allowed")
	case d.Plain && isNull(n):
		d.refuse(line, at, "has no value")
	default:
		return len(d.problems) < maxProblems
	}
	return false
}

// object decodes a mapping into a struct.
func (d *decoding) object(n *yaml.Node, at string, into reflect.Value) {
	known := fieldsOf(into.Type())
	if known.line != nil {
		into.FieldByIndex(known.line).SetInt(int64(n.Line))
	}
	d.fields(n, at, map[string]int{}, func(name, path string, line int, value *yaml.Node) {
		index, isKnown := known.byName[name]
		instead, wasRemoved := d.Removed[path]
		switch {
		case isKnown:
			d.value(value, line, path, into.FieldByIndex(index))
		case wasRemoved:
			d.refuse(line, path, "was removed; %s", instead)
		default:
			d.refuse(line, path, "unknown field%s", text.DidYouMean(name, "", slices.Sorted(maps.Keys(known.byName))))
		}
	})
}

type visitor func(name, path string, line int, value *yaml.Node)

// fields visits the fields of a mapping. seen has the lines of those that were visited before.
func (d *decoding) fields(n *yaml.Node, at string, seen map[string]int, visit visitor) {
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value, line := n.Content[i], n.Content[i+1], n.Content[i].Line
		if !d.accepts(key, line, at) {
			return
		}
		if key.Kind == yaml.AliasNode {
			key = key.Alias
		}
		if key.ShortTag() == "!!merge" && !d.Plain {
			d.merge(value, line, at, seen, visit)
			continue
		}
		name, err := d.name(key)
		if err != nil {
			d.refuse(line, at, "%s", problemOf(err))
			continue
		}
		path := strings.TrimPrefix(at+"."+text.Line(name, maxName), ".")
		if before, twice := seen[name]; twice {
			d.refuse(line, path, "comes a second time, after line %d", before)
			continue
		}
		seen[name] = line
		visit(name, path, line, value)
	}
}

// name returns the name of a field. It is converted to a string, as JSON has it.
func (d *decoding) name(key *yaml.Node) (string, error) {
	if key.Kind != yaml.ScalarNode || isNull(key) {
		return "", fmt.Errorf("the name of a field must be a string, not %s", kindOf(key))
	}
	if d.Plain {
		return key.Value, nil
	}
	name, err := valueOf(key)
	return fmt.Sprint(name), err
}

// merge visits the fields of the objects that << merges into another object.
func (d *decoding) merge(from *yaml.Node, line int, at string, seen map[string]int, visit visitor) {
	d.merges++
	defer func() { d.merges-- }()
	all := []*yaml.Node{from}
	if from.Kind == yaml.SequenceNode {
		all = from.Content
	}
	for _, n := range all {
		if n.Kind == yaml.AliasNode {
			n = n.Alias
		}
		if n.Kind != yaml.MappingNode || d.merges > maxMerges {
			d.refuse(line, at, "<< takes objects that do not contain themselves")
			return
		}
		if !d.counts(line, at) { // an object without fields costs a step, too
			return
		}
		d.fields(n, at, seen, visit)
	}
}

// leaf decodes a value as encoding/json does.
func (d *decoding) leaf(n *yaml.Node, line int, at string, into any) {
	value, err := valueOf(n)
	var data []byte
	if err == nil {
		data, err = json.Marshal(value)
	}
	if err == nil {
		err = json.Unmarshal(data, into)
	}
	var mismatch *json.UnmarshalTypeError
	switch {
	case errors.As(err, &mismatch):
		d.refuse(line, at, "must be %s, not %s", expected(mismatch.Type), kindOf(n))
	case err != nil:
		d.refuse(line, at, "%s", problemOf(err))
	}
}

func problemOf(err error) string {
	s := text.Line(err.Error(), maxSyntaxError)
	for _, prefix := range []string{"yaml: ", "unmarshal errors: ", "json: ", "time: "} {
		s = strings.TrimPrefix(s, prefix)
	}
	return s
}

// yaml11 has the booleans of YAML 1.1 that YAML 1.2 does not have.
var yaml11 = map[string]bool{
	"y": true, "Y": true, "yes": true, "Yes": true, "YES": true, "on": true, "On": true, "ON": true,
	"n": false, "N": false, "no": false, "No": false, "NO": false, "off": false, "Off": false, "OFF": false,
}

// valueOf returns a value as it is in JSON. It has the booleans of YAML 1.1, as kubectl and the
// kubelet have them.
func valueOf(n *yaml.Node) (value any, err error) {
	word, isWord := yaml11[n.Value]
	switch tag := n.ShortTag(); {
	case n.Kind == yaml.ScalarNode && isWord && (n.Style == 0 || tag == "!!bool"):
		return word, nil
	case n.Kind == yaml.ScalarNode && tag == "!!timestamp":
		return n.Value, nil
	}
	err = n.Decode(&value)
	return value, err
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" }

// kindOf describes a value.
func kindOf(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "an object"
	case yaml.SequenceNode:
		return "a list"
	}
	switch value, _ := valueOf(n); value.(type) {
	case nil:
		return "null"
	case bool:
		return "true or false"
	case string:
		return "a string"
	}
	return "the number " + text.Line(n.Value, maxName)
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

// structFields are the fields of a struct, by their names in JSON. line is its field of type Line.
type structFields struct {
	byName map[string][]int
	line   []int
}

// structs has the structFields of each reflect.Type. An inventory has tens of thousands of structs:
// without this, decoding takes a third longer, and half as much memory again.
var structs sync.Map

func fieldsOf(t reflect.Type) structFields {
	if known, ok := structs.Load(t); ok {
		return known.(structFields)
	}
	fields := structFields{byName: map[string][]int{}}
	for _, f := range reflect.VisibleFields(t) {
		name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case f.Type == reflect.TypeFor[Line]():
			fields.line = f.Index
		case name == "-" || !f.IsExported() || f.Anonymous && (name == "" || options == "inline"):
		default:
			fields.byName[cmp.Or(name, f.Name)] = f.Index
		}
	}
	structs.Store(t, fields)
	return fields
}
