// SPDX-License-Identifier: Apache-2.0

package strict

import (
	"errors"
	"fmt"

	goyaml "go.yaml.in/yaml/v2"
)

// node is a part of a YAML document with its line. The decoder tells lines only in its errors. So
// lineOf decodes each key into a type that no YAML fits, and reads the line from the error.
type node struct {
	line   int // 0 if it is not known
	fields map[string]*node
	items  []*node
}

// parseLines returns the nodes of a document, an empty node if it does not parse.
func parseLines(data []byte) *node {
	n := &node{}
	if goyaml.Unmarshal(data, n) != nil {
		return &node{}
	}
	return n
}

// key is a field's name and its line.
type key struct {
	name string
	line int
}

// UnmarshalYAML implements goyaml.Unmarshaler.
func (k *key) UnmarshalYAML(unmarshal func(any) error) error {
	var name any
	if err := unmarshal(&name); err != nil {
		return err
	}
	k.name, k.line = fmt.Sprint(name), lineOf(unmarshal)
	return nil
}

// UnmarshalYAML implements goyaml.Unmarshaler.
func (n *node) UnmarshalYAML(unmarshal func(any) error) error {
	n.line = lineOf(unmarshal)
	var fields map[key]*node
	if unmarshal(&fields) == nil {
		n.fields = make(map[string]*node, len(fields))
		for k, field := range fields {
			if field == nil { // its value is null
				field = &node{}
			}
			field.line = k.line
			n.fields[k.name] = field
		}
		return nil
	}
	var items []*node
	if unmarshal(&items) == nil {
		n.items = items
	}
	return nil
}

// lineOf returns the line that the decoder names in a type error.
func lineOf(unmarshal func(any) error) (line int) {
	var unfit chan struct{}
	var mismatch *goyaml.TypeError
	if errors.As(unmarshal(&unfit), &mismatch) && len(mismatch.Errors) > 0 {
		_, _ = fmt.Sscanf(mismatch.Errors[0], "line %d:", &line)
	}
	return line
}

// at returns the line of what a path leads to, or of the nearest known node on the way.
func (n *node) at(p path) int {
	line := 0
	for _, step := range p {
		switch {
		case !step.isItem:
			n = n.fields[step.name]
		case step.index < len(n.items):
			n = n.items[step.index]
		default:
			n = nil
		}
		if n == nil {
			return line
		}
		if n.line > 0 {
			line = n.line
		}
	}
	return line
}
