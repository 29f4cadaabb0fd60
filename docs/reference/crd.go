// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

// schema is what the page shows of a JSONSchemaProps.
type schema struct {
	Type        string            `json:"type"`
	Format      string            `json:"format"`
	Description string            `json:"description"`
	Properties  map[string]schema `json:"properties"`
	Required    []string          `json:"required"`
	Items       *schema           `json:"items"`
	Enum        []string          `json:"enum"`
	Pattern     string            `json:"pattern"`
	MinLength   *int64            `json:"minLength"`
	MaxLength   *int64            `json:"maxLength"`
	MinItems    *int64            `json:"minItems"`
	MaxItems    *int64            `json:"maxItems"`
	Minimum     *int64            `json:"minimum"`
	Maximum     *int64            `json:"maximum"`
	Rules       []struct {
		Message string `json:"message"`
	} `json:"x-kubernetes-validations"`
}

const (
	objectsPage  = "objects.md"
	objectsBegin = "<!-- Made by `make generate` from pkg/controller/api/v1alpha1. -->\n\n# Fields of the API objects\n\n" +
		"For operators and authors of tools who read or write the project's objects: each field, its type and its limits.\n" +
		"A field in bold is required, in the object that has it.\n"
)

// renderCRDs returns a section for each CRD of a file.
func renderCRDs(path string) (string, error) {
	data, err := os.ReadFile(path) //nolint:gosec // G703: the command line names the CRD
	if err != nil {
		return "", err
	}
	var sections strings.Builder
	for document := range strings.SplitSeq(string(data), "\n---\n") {
		section, err := renderCRD([]byte(document))
		if err != nil {
			return "", err
		}
		if section != "" {
			sections.WriteString("\n" + section)
		}
	}
	return sections.String(), nil
}

// guides are the pages that say how to use a kind. The controller alone reads and writes
// RevocationSlices, so the page has no section about them.
var guides = map[string]string{
	"NodeAttestation": "[records.md](../records.md) says how to use it.",
	"NodeRevocation":  "[cluster-setup.md](../cluster-setup.md#revocation) says how to switch revocation on.",
	"NodeSuspension":  "[cluster-setup.md](../cluster-setup.md#revocation) says how to switch revocation on.",
	"RevocationSlice": "",
}

// renderCRD returns the section of a CRD with one version.
func renderCRD(data []byte) (string, error) {
	var crd struct {
		Spec struct {
			Group string `json:"group"`
			Names struct {
				Kind string `json:"kind"`
			} `json:"names"`
			Versions []struct {
				Name   string `json:"name"`
				Schema struct {
					Root schema `json:"openAPIV3Schema"`
				} `json:"schema"`
			} `json:"versions"`
		} `json:"spec"`
	}
	if err := yaml.Unmarshal(data, &crd); err != nil {
		return "", err
	}
	guide, known := guides[crd.Spec.Names.Kind]
	if len(crd.Spec.Versions) != 1 || !known {
		return "", errors.New("this section is for one version of a kind in guides")
	}
	if guide == "" {
		return "", nil
	}
	version := crd.Spec.Versions[0]
	root := version.Schema.Root
	introduction := fmt.Sprintf("%s\n\nOf version `%s/%s`. %s",
		root.Description, crd.Spec.Group, version.Name, guide)
	p := newSection(crd.Spec.Names.Kind, introduction, "Field", "Type", "Limits", "Description")
	for _, name := range []string{"spec", "status"} {
		if part, there := root.Properties[name]; there {
			p.schemaRows(name, part, slices.Contains(root.Required, name))
		}
	}
	return p.String(), nil
}

// schemaRows adds the rows of a property and of what is in it.
func (p *page) schemaRows(name string, s schema, required bool) {
	shown := code(name)
	if required {
		shown = "**" + shown + "**"
	}
	kind, of := s.Type, s
	if s.Items != nil {
		kind, of = "list of "+s.Items.Type, *s.Items
		name += "[]"
	}
	if s.Format == "date-time" {
		kind = "time"
	}
	if strings.HasSuffix(name, "conditions[]") { // Kubernetes describes its own type
		kind, of = "list of Kubernetes' Condition", schema{}
	}
	p.row(shown, kind, limitsOf(s), withoutName(s.Description))
	for _, field := range slices.Sorted(maps.Keys(of.Properties)) {
		p.schemaRows(name+"."+field, of.Properties[field], slices.Contains(of.Required, field))
	}
}

// withoutName returns a Go comment without the name that it begins with: the row has the name.
func withoutName(comment string) string {
	_, meaning, _ := strings.Cut(strings.Join(strings.Fields(comment), " "), " ")
	return strings.TrimPrefix(strings.TrimPrefix(meaning, "is "), "are ")
}

// limitsOf returns what the API server checks of a value.
func limitsOf(s schema) string {
	var limits []string
	if s.Format != "date-time" { // whose length follows from its format
		limits = append(limits, between(s.MinLength, s.MaxLength, "characters"))
	}
	limits = append(limits, between(s.MinItems, s.MaxItems, "items"), between(s.Minimum, s.Maximum, ""), code(s.Pattern))
	for _, value := range s.Enum {
		limits = append(limits, code(value))
	}
	if s.Items != nil && s.Items.Type != "object" {
		limits = append(limits, "each "+limitsOf(*s.Items))
	}
	for _, rule := range s.Rules {
		limits = append(limits, rule.Message)
	}
	return strings.Join(slices.DeleteFunc(limits, func(l string) bool { return l == "" }), ", ")
}

// between returns a range, such as "1 to 8 items".
func between(least, most *int64, unit string) string {
	text := ""
	switch {
	case least == nil && most == nil:
		return ""
	case most == nil:
		text = fmt.Sprintf("%d or more", *least)
	case least == nil:
		text = fmt.Sprintf("at most %d", *most)
	case *least == *most:
		text = fmt.Sprint(*least)
	default:
		text = fmt.Sprintf("%d to %d", *least, *most)
	}
	return strings.TrimSpace(text + " " + unit)
}
