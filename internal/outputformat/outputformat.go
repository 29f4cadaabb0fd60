// SPDX-License-Identifier: Apache-2.0

// Package outputformat encodes what a command prints with --output.
package outputformat

import (
	"encoding/json"

	"sigs.k8s.io/yaml"
)

// The formats for programs.
const (
	JSON = "json"
	YAML = "yaml"
)

// Valid reports whether Encode knows the format.
func Valid(format string) bool { return format == JSON || format == YAML }

// Encode returns a value as YAML, or else as JSON. Both end in a newline.
func Encode(format string, value any) ([]byte, error) {
	if format == YAML {
		return yaml.Marshal(value)
	}
	out, err := json.MarshalIndent(value, "", "  ")
	return append(out, '\n'), err
}
