// SPDX-License-Identifier: Apache-2.0

// Package outputformat encodes what a command prints with --output.
package outputformat

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
)

// The formats for programs.
const (
	JSON = "json"
	YAML = "yaml"
)

// Valid reports whether Encode knows the format.
func Valid(format string) bool { return format == JSON || format == YAML }

// Encode returns a value as YAML, or else as JSON. Both end in a newline. Peers may have written
// the strings in the value. So characters that are not visible become escapes: a terminal shows
// them, and a decoder returns the original.
//
// The YAML encoder refuses some of these characters, and does not escape others. So YAML with such
// characters has the style of JSON.
func Encode(format string, value any) ([]byte, error) {
	if format == YAML {
		if out, err := yaml.Marshal(value); err == nil && escapeLines(string(out)) == string(out) {
			return out, nil
		}
	}
	out, err := json.MarshalIndent(value, "", "  ")
	if format == YAML {
		out = supplementary.ReplaceAllFunc(out, func(r []byte) []byte { return fmt.Appendf(nil, `\U%08x`, []rune(string(r))[0]) })
	}
	return []byte(escapeLines(string(out) + "\n")), err
}

// supplementary are the characters that JSON escapes as a surrogate pair. YAML has no such pairs.
var supplementary = regexp.MustCompile(`[\x{10000}-\x{10FFFF}]`)

// escapeLines escapes characters that are not visible, but keeps the line ends.
func escapeLines(document string) string {
	lines := strings.Split(document, "\n")
	for i, line := range lines {
		lines[i] = text.Escape(line)
	}
	return strings.Join(lines, "\n")
}
