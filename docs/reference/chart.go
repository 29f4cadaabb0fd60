// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
)

const (
	chartFolder   = "packaging/helm/node-attestation-controller"
	schemaSource  = "packaging/helm/values.schema.yaml"
	configPackage = "pkg/controller/config"
	valuesBegin   = "<!-- values: made by `make generate` from " + schemaSource + " and values.yaml -->\n"
	valuesEnd     = "<!-- /values -->\n"
)

// setByChart are the fields of the configuration that the chart's manifests fix: namespace, ports,
// names in roles. The values cannot set them. "audit" and "revocation" follow from other values.
var setByChart = []string{"namespace", "audit", "revocation", "challengeKeySecret", "leaderElection", "metricsBindAddress", "healthBindAddress"}

// node is a part of a JSON schema, or of the values.
type node = map[string]any

// makeChart returns the generated files of the Helm chart, by file name.
func makeChart(repository string) (map[string]string, error) {
	files := os.DirFS(repository)
	var root, values node
	for path, into := range map[string]*node{schemaSource: &root, chartFolder + "/values.yaml": &values} {
		data, err := fs.ReadFile(files, path)
		if err != nil {
			return nil, err
		}
		if err := yaml.UnmarshalStrict(data, into); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
	}
	readme, err := fs.ReadFile(files, chartFolder+"/README.md")
	if err != nil {
		return nil, err
	}
	rows := &page{}
	rows.row("Value", "Default", "Description")
	rows.row("---", "---", "---")
	if err := valueRows(rows, root, "", root, values); err != nil {
		return nil, err
	}
	before, rest, begins := strings.Cut(string(readme), valuesBegin)
	_, after, ends := strings.Cut(rest, valuesEnd)
	if !begins || !ends {
		return nil, fmt.Errorf("%s/README.md has no place for the table of values", chartFolder)
	}

	made := configSchema{}
	if made.comments, err = readComments(filepath.Join(repository, configPackage)); err != nil {
		return nil, err
	}
	if made.enums, err = readEnums(filepath.Join(repository, configPackage)); err != nil {
		return nil, err
	}
	configuration := properties(root)["configuration"].(node)
	fields := made.object(reflect.TypeFor[config.Config]())
	for _, field := range setByChart {
		if _, ok := properties(fields)[field]; !ok {
			return nil, fmt.Errorf("the configuration has no field %s", field)
		}
		delete(properties(fields), field)
	}
	for _, key := range []string{"properties", "additionalProperties"} {
		configuration[key] = fields[key]
	}
	content, err := json.MarshalIndent(root, "", "  ")
	if err != nil {
		return nil, err
	}
	return map[string]string{
		"values.schema.json": string(content) + "\n",
		"chart-README.md":    before + valuesBegin + rows.String() + valuesEnd + after,
	}, nil
}

func properties(of node) node {
	found, _ := of["properties"].(node)
	return found
}

// valueRows adds a row for each value. It fails if a value has no description, or is missing in
// values.yaml or in the schema.
func valueRows(rows *page, root node, prefix string, of, values node) error {
	names := []string{}
	for name := range properties(of) {
		names = append(names, name)
	}
	for name := range values {
		if properties(of)[name] == nil {
			return fmt.Errorf("values.yaml has %s%s, which %s has not", prefix, name, schemaSource)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		value := properties(of)[name].(node)
		given, ok := values[name]
		if name == "global" && prefix == "" {
			continue
		}
		description, _ := value["description"].(string)
		if reference, ok := value["$ref"].(string); ok {
			value = root["definitions"].(node)[filepath.Base(reference)].(node)
		}
		if !ok || (description == "" && properties(value) == nil) {
			return fmt.Errorf("%s%s has no description, or is not in values.yaml", prefix, name)
		}
		inner := properties(value) != nil
		if description != "" {
			cell := ""
			if !inner {
				content, err := json.Marshal(given)
				if err != nil {
					return err
				}
				cell = code(string(content))
			}
			rows.row(code(prefix+name), cell, description)
		}
		if inner {
			below, _ := given.(node)
			if err := valueRows(rows, root, prefix+name+".", value, below); err != nil {
				return err
			}
		}
	}
	return nil
}

// configSchema makes the schema of the configuration.
type configSchema struct {
	comments comments
	// enums are the values of types that have constants.
	enums map[string][]any
}

func (c configSchema) object(of reflect.Type) node {
	fields := node{}
	for i := range of.NumField() {
		field := of.Field(i)
		if field.Anonymous { // apiVersion and kind
			continue
		}
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		value := c.value(field.Type)
		value["description"] = strings.Join(strings.Fields(c.comments[of.Name()+"."+field.Name]), " ")
		fields[name] = value
	}
	return node{"type": "object", "additionalProperties": false, "properties": fields}
}

// durations matches what time.ParseDuration accepts, without signs.
const durations = `^([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+$`

func (c configSchema) value(of reflect.Type) node {
	switch of {
	case reflect.TypeFor[metav1.Duration]():
		return node{"type": "string", "pattern": durations}
	case reflect.TypeFor[metav1.Time]():
		return node{"type": "string", "format": "date-time"}
	}
	switch of.Kind() {
	case reflect.Pointer:
		return c.value(of.Elem())
	case reflect.Slice:
		return node{"type": "array", "items": c.value(of.Elem())}
	case reflect.Map:
		return node{"type": "object", "additionalProperties": c.value(of.Elem())}
	case reflect.Struct:
		return c.object(of)
	case reflect.Bool:
		return node{"type": "boolean"}
	case reflect.Int:
		return node{"type": "integer"}
	default:
		value := node{"type": "string"}
		if enum := c.enums[of.Name()]; enum != nil {
			value["enum"] = enum
		}
		return value
	}
}

// readEnums reads the string constants of a package that have a type of its own.
func readEnums(folder string) (map[string][]any, error) {
	files, err := filepath.Glob(filepath.Join(folder, "*.go"))
	if err != nil {
		return nil, err
	}
	enums := map[string][]any{}
	for _, path := range files {
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		for _, declared := range file.Decls {
			constants, ok := declared.(*ast.GenDecl)
			if !ok || constants.Tok != token.CONST {
				continue
			}
			for _, spec := range constants.Specs {
				constant := spec.(*ast.ValueSpec)
				named, ok := constant.Type.(*ast.Ident)
				if !ok || len(constant.Values) != 1 {
					continue
				}
				if literal, ok := constant.Values[0].(*ast.BasicLit); ok && literal.Kind == token.STRING {
					text, err := strconv.Unquote(literal.Value)
					if err != nil {
						return nil, err
					}
					enums[named.Name] = append(enums[named.Name], text)
				}
			}
		}
	}
	return enums, nil
}
