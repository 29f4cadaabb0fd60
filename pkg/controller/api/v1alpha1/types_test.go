// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"
)

// properties is what the test looks at of a JSONSchemaProps.
type properties struct {
	Type       string                `json:"type"`
	Format     string                `json:"format"`
	Properties map[string]properties `json:"properties"`
	Required   []string              `json:"required"`
	Items      *properties           `json:"items"`
	Pattern    string                `json:"pattern"`
	MaxLength  *int64                `json:"maxLength"`
	MaxItems   *int64                `json:"maxItems"`
	Minimum    *int64                `json:"minimum"`
	Rules      []any                 `json:"x-kubernetes-validations"`
}

func readSchema(t *testing.T) properties {
	t.Helper()
	data, err := os.ReadFile("../../../../packaging/kubernetes/crd.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var crd struct {
		Spec struct {
			Group    string `json:"group"`
			Versions []struct {
				Name   string `json:"name"`
				Schema struct {
					Root properties `json:"openAPIV3Schema"`
				} `json:"schema"`
				Selectable []struct {
					JSONPath string `json:"jsonPath"`
				} `json:"selectableFields"`
			} `json:"versions"`
		} `json:"spec"`
	}
	if err := yaml.Unmarshal(data, &crd); err != nil {
		t.Fatal(err)
	}
	if len(crd.Spec.Versions) != 1 || crd.Spec.Group != GroupVersion.Group || crd.Spec.Versions[0].Name != GroupVersion.Version {
		t.Fatalf("the CRD is not of one version %s: %s %+v", GroupVersion, crd.Spec.Group, crd.Spec.Versions)
	}
	var selectable []string
	for _, field := range crd.Spec.Versions[0].Selectable {
		selectable = append(selectable, strings.TrimPrefix(field.JSONPath, "."))
	}
	if want := []string{FieldCluster, FieldNodeName, FieldMachine, FieldEK, FieldRequestUID}; !slices.Equal(selectable, want) {
		t.Errorf("fields to select by: %v, want %v", selectable, want)
	}
	return crd.Spec.Versions[0].Schema.Root
}

// The API server keeps exactly the fields that Go writes. A field that only one of them has would
// be lost without an error, or never set.
func TestSchemaAndTypesAgree(t *testing.T) {
	root := readSchema(t)
	agree(t, "spec", reflect.TypeFor[NodeAttestationSpec](), root.Properties["spec"])
	agree(t, "status", reflect.TypeFor[NodeAttestationStatus](), root.Properties["status"])
	if got := slices.Sorted(maps.Keys(root.Properties)); !slices.Equal(got, []string{"apiVersion", "kind", "metadata", "spec", "status"}) {
		t.Errorf("at the root: %v", got)
	}
}

func agree(t *testing.T, path string, goType reflect.Type, s properties) {
	t.Helper()
	if goType.Kind() == reflect.Pointer {
		goType = goType.Elem()
	}
	switch {
	case goType == reflect.TypeFor[metav1.Time]():
		if s.Type != "string" || s.Format != "date-time" {
			t.Errorf("%s: a time is a %s %s", path, s.Type, s.Format)
		}
	case goType == reflect.TypeFor[metav1.Condition]():
		// Kubernetes' own schema, without a pattern for the message
		if message := s.Properties["message"]; message.MaxLength == nil || len(s.Properties) != goType.NumField() {
			t.Errorf("%s: not a condition of bounded length: %+v", path, s)
		}
	case goType.Kind() == reflect.Struct:
		agreeOnFields(t, path, goType, s)
	case goType.Kind() == reflect.Slice:
		if s.Type != "array" || s.Items == nil || s.MaxItems == nil {
			t.Fatalf("%s: not an array of bounded length", path)
		}
		agree(t, path+"[]", goType.Elem(), *s.Items)
	case goType.Kind() == reflect.String:
		if s.Type != "string" || s.MaxLength == nil || !strings.HasPrefix(s.Pattern, "^") || !strings.HasSuffix(s.Pattern, "$") {
			t.Errorf("%s: not a string with a limit and a pattern: %+v", path, s)
		}
	case goType.Kind() == reflect.Bool:
		if s.Type != "boolean" {
			t.Errorf("%s: a bool is a %s", path, s.Type)
		}
	case goType.Kind() == reflect.Uint32, goType.Kind() == reflect.Uint64, goType.Kind() == reflect.Int64:
		if s.Type != "integer" || s.Format != "int64" || s.Minimum == nil || *s.Minimum != 0 {
			t.Errorf("%s: not an integer from 0: %+v", path, s)
		}
	default:
		t.Errorf("%s: the test knows no %s", path, goType)
	}
}

func agreeOnFields(t *testing.T, path string, goType reflect.Type, s properties) {
	t.Helper()
	if s.Type != "object" {
		t.Errorf("%s: a struct is a %s", path, s.Type)
	}
	var names, required []string
	for i := range goType.NumField() {
		name, options, _ := strings.Cut(goType.Field(i).Tag.Get("json"), ",")
		names = append(names, name)
		if options == "" {
			required = append(required, name)
		}
		property, ok := s.Properties[name]
		if !ok {
			t.Errorf("%s.%s: not in the schema", path, name)
			continue
		}
		agree(t, path+"."+name, goType.Field(i).Type, property)
	}
	for name := range s.Properties {
		if !slices.Contains(names, name) {
			t.Errorf("%s.%s: not in Go", path, name)
		}
	}
	slices.Sort(required)
	if want := slices.Sorted(slices.Values(s.Required)); !slices.Equal(required, want) {
		t.Errorf("%s: Go always writes %v, the schema requires %v", path, required, want)
	}
}

// What ties a machine to a node cannot be changed, and cannot be left out in order to change it.
func TestImmutableFieldsAreRequired(t *testing.T) {
	spec := readSchema(t).Properties["spec"]
	for _, name := range []string{"cluster", "machine", "nodeName"} {
		if len(spec.Properties[name].Rules) != 1 || !slices.Contains(spec.Required, name) {
			t.Errorf("%s: %d rules, required %v", name, len(spec.Properties[name].Rules), spec.Required)
		}
	}
}

func TestDeepCopySharesNothing(t *testing.T) {
	full := &NodeAttestation{}
	counter := 0
	fill(reflect.ValueOf(full).Elem(), &counter)
	list := &NodeAttestationList{Items: []NodeAttestation{*full}}
	for _, original := range []runtime.Object{full, list} {
		copied := original.DeepCopyObject()
		if !reflect.DeepEqual(original, copied) {
			t.Errorf("the copy differs:\n%+v\n%+v", original, copied)
		}
		if path := shared(reflect.ValueOf(original), reflect.ValueOf(copied), ""); path != "" {
			t.Errorf("%T and its copy share %s", original, path)
		}
	}
	for _, nothing := range []runtime.Object{(*NodeAttestation)(nil), (*NodeAttestationList)(nil)} {
		if nothing.DeepCopyObject() != nil {
			t.Errorf("the copy of no %T is something", nothing)
		}
	}
}

// fill sets every field to something of its own.
func fill(v reflect.Value, counter *int) {
	*counter++
	switch {
	case v.Type() == reflect.TypeFor[metav1.Time]():
		v.Set(reflect.ValueOf(metav1.NewTime(time.Unix(int64(*counter), 0).UTC())))
	case v.Kind() == reflect.Struct:
		for i := range v.NumField() {
			if v.Field(i).CanSet() {
				fill(v.Field(i), counter)
			}
		}
	case v.Kind() == reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), counter)
	case v.Kind() == reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range v.Len() {
			fill(v.Index(i), counter)
		}
	case v.Kind() == reflect.Map:
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(key, counter)
		fill(value, counter)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, value)
	case v.Kind() == reflect.String:
		v.SetString(fmt.Sprint(*counter))
	case v.Kind() == reflect.Bool:
		v.SetBool(true)
	case v.CanInt():
		v.SetInt(int64(*counter))
	case v.CanUint():
		v.SetUint(uint64(*counter % 256))
	}
}

// shared returns where two values point to the same thing.
func shared(a, b reflect.Value, path string) string {
	switch {
	case a.Type() == reflect.TypeFor[metav1.Time]():
		return ""
	case a.Kind() == reflect.Struct:
		for i := range a.NumField() {
			if found := shared(a.Field(i), b.Field(i), path+"."+a.Type().Field(i).Name); found != "" {
				return found
			}
		}
	case a.Kind() == reflect.Pointer, a.Kind() == reflect.Slice, a.Kind() == reflect.Map:
		if a.IsNil() || b.IsNil() {
			return ""
		}
		if a.UnsafePointer() == b.UnsafePointer() {
			return path
		}
		if a.Kind() == reflect.Pointer {
			return shared(a.Elem(), b.Elem(), path)
		}
		if a.Kind() == reflect.Slice {
			for i := range a.Len() {
				if found := shared(a.Index(i), b.Index(i), fmt.Sprintf("%s[%d]", path, i)); found != "" {
					return found
				}
			}
		}
	}
	return ""
}
