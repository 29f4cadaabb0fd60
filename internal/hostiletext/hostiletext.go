// SPDX-License-Identifier: Apache-2.0

// Package hostiletext plants text of an attacker into API objects, and finds what of it gets into
// an output as it is. It is for tests.
package hostiletext

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
)

const (
	// forgedEntry is how an entry of klog's text format begins, forgedItem how an item of a YAML
	// list does.
	forgedEntry, forgedItem = `I1126 12:00:00.000000       1 report.go:118] "decided"`, "- nodeName: injected"
	// forgedField ends a quoted value, and begins another field of a log entry.
	forgedField = `" outcome="Sign`
	// maxDepth limits how deep Plant makes values of types that contain themselves.
	maxDepth = 10
)

// For returns hostile text that names its place: line ends, what would forge a log entry, a field
// or a list item after them, and characters that a terminal acts on, hides or reorders.
func For(place string) string {
	return place + "\x1b]0;owned\a\x1b[2J\u009b31m\x00\u202e\u2066\u200f\u200b\ufeff\u2028\u2029\u0085\u00a0\u3164\u115f\u2800\ufe0f\u0301\U000e0041א" +
		forgedField + "\n" + forgedEntry + "\r" + forgedEntry + "\r\n---\n" + forgedItem + "\n\v\f\b\x7f"
}

// Plant writes For(path) into each string that object points to, and makes missing pointers, slices
// and maps, so that no field is left out. A map gets one hostile key and value more. Paths are like
// "Spec.Usages[0]"; Plant leaves the paths in keep and all below them as they are. Values with
// unexported fields, such as times, stay, too.
func Plant(object any, keep ...string) {
	plant(reflect.ValueOf(object).Elem(), "", keep, maxDepth)
}

func plant(v reflect.Value, path string, keep []string, depth int) {
	if depth == 0 || slices.Contains(keep, path) {
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(For(path))
	case reflect.Pointer:
		if v.IsNil() {
			v.Set(reflect.New(v.Type().Elem()))
		}
		plant(v.Elem(), path, keep, depth-1)
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			v.SetBytes([]byte(For(path)))
			return
		}
		if v.Len() == 0 {
			v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		}
		for i := range v.Len() {
			plant(v.Index(i), fmt.Sprintf("%s[%d]", path, i), keep, depth-1)
		}
	case reflect.Map:
		if v.IsNil() {
			v.Set(reflect.MakeMap(v.Type()))
		}
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		plant(key, path+"[key]", keep, depth-1)
		plant(value, path+"[value]", keep, depth-1)
		v.SetMapIndex(key, value)
	case reflect.Struct:
		for i := range v.NumField() {
			field := v.Type().Field(i)
			switch at := strings.TrimPrefix(path+"."+field.Name, "."); {
			case !field.IsExported():
			case field.Anonymous:
				plant(v.Field(i), path, keep, depth-1)
			default:
				plant(v.Field(i), at, keep, depth-1)
			}
		}
	default: // a number or a boolean
	}
}

// Find returns what is wrong with an output: each line with a character that is not visible, with a
// forged field, or that planted text begins. In the output, "\n" ends a line.
func Find(output string) (problems []string) {
	for line := range strings.Lines(output) {
		line = strings.TrimSuffix(line, "\n")
		before, _, forged := strings.Cut(line, forgedField)
		switch at := strings.IndexFunc(line, func(r rune) bool { return !text.Visible(r) }); {
		case strings.ToValidUTF8(line, "") != line:
			problems = append(problems, fmt.Sprintf("not UTF-8: %.300q", line))
		case at >= 0:
			problems = append(problems, fmt.Sprintf("%+q in %.300q", line[at:min(len(line), at+4)], line[max(0, at-100):]))
		case strings.HasPrefix(strings.TrimSpace(line), forgedEntry), strings.HasPrefix(strings.TrimSpace(line), forgedItem):
			problems = append(problems, fmt.Sprintf("a forged line: %.300q", line))
		case forged && !strings.HasSuffix(before, `\`):
			problems = append(problems, fmt.Sprintf("a forged field: %.300q", line[max(0, len(before)-100):]))
		}
	}
	return problems
}
