// SPDX-License-Identifier: Apache-2.0

// Package outputformat encodes what a command prints with --output.
package outputformat

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf16"

	"go.yaml.in/yaml/v3"
)

// The formats for programs.
const (
	JSON = "json"
	YAML = "yaml"
)

// Valid reports whether Encode knows the format.
func Valid(format string) bool { return format == JSON || format == YAML }

// Encode returns a value as YAML, or else as JSON. Both end in a newline. Peers may have written
// the strings in it: characters that are not printable are in the output only as escapes, so that a
// terminal shows them and a decoder returns the original.
func Encode(format string, value any) ([]byte, error) {
	out, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		return nil, err
	}
	if format == YAML {
		return encodeYAML(out)
	}
	return escape(append(out, '\n'), func(r rune) string {
		var units strings.Builder
		for _, unit := range utf16.Encode([]rune{r}) {
			_, _ = fmt.Fprintf(&units, `\u%04x`, unit)
		}
		return units.String()
	}), nil
}

// encodeYAML returns JSON as YAML. Only double quotes allow escapes (YAML 1.2.2, 5.7), so each
// scalar that is not printable gets them.
func encodeYAML(out []byte) ([]byte, error) {
	goEscape := func(r rune) string { return strings.Trim(strconv.QuoteRuneToASCII(r), "'") } // YAML has no pairs of surrogates
	var document yaml.Node
	if err := yaml.Unmarshal(escape(out, goEscape), &document); err != nil {
		return nil, err
	}
	restyle(&document)
	var quoted bytes.Buffer
	encoder := yaml.NewEncoder(&quoted)
	encoder.SetIndent(2)
	encoder.CompactSeqIndent()
	if err := encoder.Encode(&document); err != nil {
		return nil, err
	}
	return escape(quoted.Bytes(), goEscape), nil
}

// old is text that YAML 1.1 takes for a truth value or a number, and that the encoder leaves plain.
var old = regexp.MustCompile(`^(?i:y|n|yes|no|on|off|[-+]?[0-9][0-9_:.]*)$`)

// restyle replaces the style of JSON, and sorts keys.
func restyle(node *yaml.Node) {
	if isString := node.Style == yaml.DoubleQuotedStyle; !isString || printable(node.Value) && !old.MatchString(node.Value) {
		node.Style = 0
	}
	for _, child := range node.Content {
		restyle(child)
	}
	if node.Kind == yaml.MappingNode {
		pairs := slices.Collect(slices.Chunk(node.Content, 2))
		slices.SortFunc(pairs, func(a, b []*yaml.Node) int { return strings.Compare(a[0].Value, b[0].Value) })
		node.Content = slices.Concat(pairs...)
	}
}

func printable(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) })
}

// escape replaces the characters of a document, other than line ends, that a terminal may act on.
func escape(document []byte, as func(rune) string) []byte {
	var out bytes.Buffer
	for _, r := range string(document) {
		if r == '\n' || unicode.IsPrint(r) {
			out.WriteRune(r)
		} else {
			out.WriteString(as(r))
		}
	}
	return out.Bytes()
}
