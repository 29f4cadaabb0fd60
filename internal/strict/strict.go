// SPDX-License-Identifier: Apache-2.0

// Package strict decodes what an operator wrote in YAML or JSON. It refuses mistyped fields instead
// of ignoring them, and says in which line they are.
package strict

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"

	goyaml "go.yaml.in/yaml/v2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

// Removed has the fields that a kind of document had in earlier versions: by their paths, such as
// a.b, what to do instead.
type Removed map[string]string

// Decode decodes one document over the present content of into, which points to a struct. Unknown,
// doubled and differently-cased fields are errors, and so is a second document. An error is one
// line of text. For each wrong field it has the line in the document, the field's name, and the
// problem.
func Decode(data []byte, into any) error { return Removed(nil).Decode(data, into) }

// Decode is like the function Decode. Its error about a removed field says what to do instead.
func (r Removed) Decode(data []byte, into any) error {
	if severalDocuments(data) {
		return errors.New("holds more than one document")
	}
	asJSON, err := yaml.YAMLToJSONStrict(data)
	if err != nil {
		return errors.New(bareYAML(oneLine(err.Error())))
	}
	strict, err := kjson.UnmarshalStrict(asJSON, into)
	if err = errors.Join(append(strict, err)...); err == nil {
		return nil
	}
	var document any
	if json.Unmarshal(asJSON, &document) != nil {
		return errors.New(oneLine(err.Error()))
	}
	return describe(data, document, reflect.TypeOf(into).Elem(), r, err)
}

// bareYAML drops what the YAML library writes before the line: its name, and that it failed.
func bareYAML(s string) string {
	for _, prefix := range []string{"error converting YAML to JSON: ", "yaml: ", "unmarshal errors: "} {
		s = strings.TrimPrefix(s, prefix)
	}
	return s
}

// CheckKind returns an error unless a document is of this kind.
func CheckKind(is metav1.TypeMeta, apiVersion, kind string) error {
	if is.APIVersion != apiVersion || is.Kind != kind {
		return fmt.Errorf("is %.64q of %.64q, not %s of %s", is.Kind, is.APIVersion, kind, apiVersion)
	}
	return nil
}

// severalDocuments reports whether a second document follows. The strict parser would ignore it.
func severalDocuments(data []byte) bool {
	if !bytes.Contains(data, []byte("---")) && !bytes.Contains(data, []byte("...")) && !bytes.ContainsAny(data, "{[") {
		return false // there is no other way to begin or to end one
	}
	decoder := goyaml.NewDecoder(bytes.NewReader(data))
	for first := true; ; first = false {
		var next any
		err := decoder.Decode(&next)
		switch {
		case errors.Is(err, io.EOF), first && err != nil:
			// the strict parser reports problems of the first document
			return false
		case err != nil, !first && next != nil:
			return true
		}
	}
}

// oneLine makes one line of an error of several lines.
func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }
