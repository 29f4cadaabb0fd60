// SPDX-License-Identifier: Apache-2.0

// Package hostiletext puts an attacker's text into API objects, and finds the parts of that text
// that reach an output without escapes. It is for tests.
package hostiletext

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
)

const (
	// forgedEntry is the beginning of an entry in klog's text format. forgedItem is the beginning
	// of an item in a YAML list.
	forgedEntry, forgedItem = `I1126 12:00:00.000000       1 report.go:118] "decided"`, "- nodeName: injected"
	// forgedField ends a quoted value, and begins another field of a log entry.
	forgedField = `" outcome="Sign`
	// maxDepth limits how deep Plant makes values of types that contain themselves.
	maxDepth = 10
)

// For returns hostile text that names its place. It has line ends, followed by text that would
// forge a log entry, a field or a list item. It also has characters that a terminal acts on, hides
// or reorders.
func For(place string) string {
	return place + "\x1b]0;owned\a\x1b[2J\u009b31m\x00\u202e\u2066\u200f\u200b\ufeff\u2028\u2029\u0085\u00a0\u3164\u115f\u2800\ufe0f\u0301\U000e0041א" +
		forgedField + "\n" + forgedEntry + "\r" + forgedEntry + "\r\n---\n" + forgedItem + "\n\v\f\b\x7f"
}

// Plant writes For(path) into each string that object points to. It makes missing pointers, slices
// and maps, so that it leaves out no field. A map gets one more hostile key and value. A path is
// like "Spec.Usages[0]". Plant does not change the paths in keep and all below them.
func Plant(object any, keep ...string) {
	planter{true, keep, func(path, _ string) string { return For(path) }}.plant(reflect.ValueOf(object).Elem(), "", maxDepth)
}

// Change replaces each string that object points to by the result of text, which gets the path and
// the string. It makes nothing, and changes no keys of maps and no bytes.
func Change(object any, text func(path, value string) string) {
	planter{false, nil, text}.plant(reflect.ValueOf(object).Elem(), "", maxDepth)
}

// planter changes the strings of a value. Values with unexported fields, such as times, stay.
type planter struct {
	// makes is true for Plant, and false for Change.
	makes bool
	keep  []string
	text  func(path, value string) string
}

func (p planter) plant(v reflect.Value, path string, depth int) {
	if depth == 0 || slices.Contains(p.keep, path) {
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(p.text(path, v.String()))
	case reflect.Pointer:
		if v.IsNil() && p.makes {
			v.Set(reflect.New(v.Type().Elem()))
		}
		if !v.IsNil() {
			p.plant(v.Elem(), path, depth-1)
		}
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			if p.makes {
				v.SetBytes([]byte(For(path)))
			}
			return
		}
		if v.Len() == 0 && p.makes {
			v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		}
		for i := range v.Len() {
			p.plant(v.Index(i), fmt.Sprintf("%s[%d]", path, i), depth-1)
		}
	case reflect.Map:
		for _, key := range v.MapKeys() {
			p.plantEntry(v, key, v.MapIndex(key), fmt.Sprintf("%s[%s]", path, key), depth)
		}
		if p.makes {
			if v.IsNil() {
				v.Set(reflect.MakeMap(v.Type()))
			}
			key := reflect.New(v.Type().Key()).Elem()
			p.plant(key, path+"[key]", depth-1)
			p.plantEntry(v, key, reflect.Zero(v.Type().Elem()), path+"[value]", depth)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			field := v.Type().Field(i)
			switch at := strings.TrimPrefix(path+"."+field.Name, "."); {
			case !field.IsExported():
			case field.Anonymous:
				p.plant(v.Field(i), path, depth-1)
			default:
				p.plant(v.Field(i), at, depth-1)
			}
		}
	default: // a number or a boolean
	}
}

// plantEntry sets a map's value to a changed copy of old.
func (p planter) plantEntry(v, key, old reflect.Value, path string, depth int) {
	value := reflect.New(old.Type()).Elem()
	value.Set(old)
	p.plant(value, path, depth-1)
	v.SetMapIndex(key, value)
}

// Find returns the lines of an output with a problem: a character that is not visible, or planted
// text at the beginning. In the output, "\n" ends a line.
func Find(output string) (problems []string) {
	for line := range strings.Lines(output) {
		line = strings.TrimSuffix(line, "\n")
		start := strings.TrimSpace(line)
		switch at := strings.IndexFunc(line, func(r rune) bool { return !text.Visible(r) }); {
		case strings.ToValidUTF8(line, "") != line:
			problems = append(problems, fmt.Sprintf("not UTF-8: %.300q", line))
		case at >= 0:
			problems = append(problems, fmt.Sprintf("%+q in %.300q", line[at:min(len(line), at+4)], line[max(0, at-100):]))
		case strings.HasPrefix(start, forgedEntry), strings.HasPrefix(start, forgedItem):
			problems = append(problems, fmt.Sprintf("a forged line: %.300q", line))
		}
	}
	return problems
}

// FindUnquoted is Find for an output that quotes values, such as a log. It also returns the lines
// with a forged field.
func FindUnquoted(output string) []string {
	problems := Find(output)
	for line := range strings.Lines(output) {
		before, _, forged := strings.Cut(line, forgedField)
		if forged && !strings.HasSuffix(before, `\`) {
			problems = append(problems, fmt.Sprintf("a forged field: %.300q", line[max(0, len(before)-100):]))
		}
	}
	return problems
}
