// SPDX-License-Identifier: Apache-2.0

package decisionlog

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"log/slog"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2/textlogger"
	"k8s.io/kube-openapi/pkg/validation/spec"
	"k8s.io/kube-openapi/pkg/validation/strfmt"
	"k8s.io/kube-openapi/pkg/validation/validate"
)

var update = flag.Bool("update", false, "write the schema, the table of fields and the golden record anew")

const (
	docs       = "../../../docs/"
	schemaFile = docs + "decision-record.schema.json"
	page       = docs + "decision-record.md"
	golden     = "testdata/issued.json"
	tableBegin = "<!-- table -->\n| Field | Present | What it is |\n| --- | --- | --- |\n"
	tableEnd   = "<!-- /table -->"
)

// comments returns the comments of the fields of this package's structs, by Type.Field, as one line.
func comments(t *testing.T) map[string]string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "record.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	ast.Inspect(file, func(n ast.Node) bool {
		declared, ok := n.(*ast.TypeSpec)
		if !ok {
			return true
		}
		if fields, ok := declared.Type.(*ast.StructType); ok {
			for _, field := range fields.Fields.List {
				for _, name := range field.Names {
					text := strings.Join(strings.Fields(field.Doc.Text()), " ")
					_, text, ok := strings.Cut(text, name.Name)
					if !ok || !strings.HasSuffix(text, ".") {
						t.Errorf("%s.%s: its comment does not begin with its name, or is no sentence", declared.Name, name)
					}
					found[declared.Name.Name+"."+name.Name] = name.Name + text
				}
			}
		}
		return true
	})
	return found
}

// schemaOf returns the JSON Schema of a type, and appends a row for each field of its structs.
func schemaOf(t *testing.T, of reflect.Type, path string, comments map[string]string, rows *[]string) map[string]any {
	t.Helper()
	switch of {
	case reflect.TypeFor[Time]():
		return map[string]any{"type": "string", "format": "date-time", "pattern": `^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{9}Z$`}
	case reflect.TypeFor[Digest]():
		return map[string]any{"type": "string", "pattern": "^[0-9a-f]{64}$"}
	case reflect.TypeFor[Outcome]():
		return map[string]any{"type": "string", "enum": []any{Issued, Approved, Denied, Failed}}
	case reflect.TypeFor[[]byte]():
		return map[string]any{"type": "string", "contentEncoding": "base64"}
	case reflect.TypeFor[*certificatesv1.CertificateSigningRequest]():
		return map[string]any{"type": "object"} // its schema is that of Kubernetes
	}
	switch of.Kind() {
	case reflect.Pointer:
		return schemaOf(t, of.Elem(), path, comments, rows)
	case reflect.String:
		return map[string]any{"type": "string"}
	case reflect.Int:
		return map[string]any{"type": "integer", "minimum": 0}
	case reflect.Bool:
		return map[string]any{"type": "boolean"}
	case reflect.Slice:
		return map[string]any{"type": "array", "items": schemaOf(t, of.Elem(), path+"[]", comments, rows)}
	case reflect.Struct:
	default:
		t.Fatalf("%s: a %s", path, of)
	}
	properties, required := map[string]any{}, []any{}
	for field := range of.Fields() {
		name, options, _ := strings.Cut(field.Tag.Get("json"), ",")
		comment := comments[of.Name()+"."+field.Name]
		if name == "" || comment == "" {
			t.Fatalf("%s.%s has no name in JSON, or no comment", of.Name(), field.Name)
		}
		_, meaning, _ := strings.Cut(comment, " ")
		meaning = strings.TrimPrefix(strings.TrimPrefix(meaning, "is "), "are ")
		present, at := "optional", strings.TrimPrefix(path+"."+name, ".")
		if options == "" {
			present = "always"
			required = append(required, name)
		}
		*rows = append(*rows, fmt.Sprintf("| `%s` | %s | %s |", at, present, strings.ReplaceAll(meaning, "|", `\|`)))
		schema := schemaOf(t, field.Type, at, comments, rows)
		schema["description"] = comment
		properties[name] = schema
	}
	schema := map[string]any{"type": "object", "properties": properties, "additionalProperties": false}
	if len(required) > 0 {
		schema["required"] = required
	}
	return schema
}

// generate returns the JSON Schema, and the table of fields.
func generate(t *testing.T) (schema []byte, table string) {
	t.Helper()
	var rows []string
	made := schemaOf(t, reflect.TypeFor[Record](), "", comments(t), &rows)
	made["$schema"], made["title"] = "http://json-schema.org/draft-07/schema#", "Decision record of node-attestation-controller"
	properties := made["properties"].(map[string]any)
	properties["apiVersion"].(map[string]any)["enum"] = []any{APIVersion}
	properties["kind"].(map[string]any)["enum"] = []any{Kind}
	schema, err := json.MarshalIndent(made, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	return append(schema, '\n'), strings.Join(rows, "\n") + "\n"
}

// The JSON Schema and the page have each field, with the comment that it has in record.go. Write them
// anew with -update.
func TestEachFieldIsDocumented(t *testing.T) {
	schema, table := generate(t)
	before, after, ok := strings.Cut(read(t, page), tableBegin)
	_, after, ends := strings.Cut(after, tableEnd)
	if !ok || !ends {
		t.Fatalf("%s has no table", page)
	}
	whole := before + tableBegin + table + tableEnd + after
	if *update {
		overwrite(t, schemaFile, string(schema))
		overwrite(t, page, whole)
	}
	if read(t, schemaFile) != string(schema) {
		t.Errorf("%s is not what -update writes", schemaFile)
	}
	if read(t, page) != whole {
		t.Errorf("the table of %s is not what -update writes", page)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func overwrite(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func at(text string) Time {
	when, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		panic(err)
	}
	return Time{when}
}

// fullRecord has every field.
func fullRecord() *Record {
	object := &certificatesv1.CertificateSigningRequest{
		TypeMeta:   metav1.TypeMeta{APIVersion: "certificates.k8s.io/v1", Kind: "CertificateSigningRequest"},
		ObjectMeta: metav1.ObjectMeta{Name: "node-csr-1", UID: "uid-1", CreationTimestamp: metav1.NewTime(at("2026-03-01T10:00:01Z").Time)},
		Spec:       certificatesv1.CertificateSigningRequestSpec{SignerName: "example.com/tpm", Request: []byte("request"), Username: "system:bootstrap:abcdef"},
	}
	digest := DigestOf([]byte("request"))
	return &Record{
		APIVersion: APIVersion, Kind: Kind, ID: "uid-1/Issued", Time: at("2026-03-01T10:00:02.123456789Z"), Audit: true, Recovered: true,
		Outcome: Issued, Reason: "Attested", Message: "m", Class: "first",
		Controller: Controller{"v1.2.3", "abcdef", "pod_uid"}, Cluster: Cluster{"cluster-uid", "ns/name"},
		Request:     Request{"node-csr-1", "uid-1", "example.com/tpm", at("2026-03-01T10:00:01Z"), digest},
		Requester:   Requester{"system:bootstrap:abcdef", []string{"system:bootstrappers"}, "X509SHA256=ab"},
		Hello:       &Request{"node-csr-0", "uid-0", "example.com/hello", at("2026-03-01T10:00:00Z"), digest},
		Node:        &Node{"worker-1", "test://worker-1"},
		Machine:     &Machine{"cluster-api", "machine-1", "uid-of-machine-1"},
		Evidence:    &Evidence{"tpm", "tpm/v1", true, &EK{string(digest), "ecc-p256", "Inventory"}, "000b" + string(digest), &PCRs{"sha256", []PCR{{0, string(digest)}, {7, string(digest)}}}},
		Certificate: &Certificate{digest, "1f", at("2026-03-01T09:55:00Z"), at("2026-03-08T10:00:00Z")},
		Refusals:    []Finding{{"A", "a"}}, Warnings: []Finding{{"B", "b"}}, Unrecorded: 3,
		Archive: &Archive{object, object, []byte("certificate")},
	}
}

// validator validates by the shipped schema.
func validator(t *testing.T) *validate.SchemaValidator {
	t.Helper()
	schema := &spec.Schema{}
	if err := json.Unmarshal([]byte(read(t, schemaFile)), schema); err != nil {
		t.Fatal(err)
	}
	return validate.NewSchemaValidator(schema, nil, "", strfmt.Default)
}

// The golden record has every field: nothing in it may change within a version. It is valid by the
// schema, and so is one with the required fields alone.
func TestGoldenRecord(t *testing.T) {
	full := fullRecord()
	line, err := json.MarshalIndent(full, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	line = append(line, '\n')
	if *update {
		overwrite(t, golden, string(line))
	}
	if string(line) != read(t, golden) {
		t.Errorf("the record changes:\n%s", line)
	}
	parsed, err := Parse(line)
	if err != nil {
		t.Fatal(err)
	}
	again, err := json.MarshalIndent(parsed, "", "  ")
	if err != nil || !bytes.Equal(append(again, '\n'), line) {
		t.Errorf("%v: parsed and written again:\n%s", err, again)
	}
	checkFull(t, reflect.ValueOf(*full), "Record")
	least := &Record{APIVersion: APIVersion, Kind: Kind, ID: "u/Denied", Time: full.Time, Outcome: Denied}
	for _, record := range []*Record{full, least} {
		if err := valid(t, record, nil); err != nil {
			t.Error(err)
		}
	}
}

// checkFull fails the test for a field of this package's structs that is zero.
func checkFull(t *testing.T, value reflect.Value, path string) {
	t.Helper()
	if value.Kind() == reflect.Pointer {
		value = value.Elem()
	}
	if value.Kind() != reflect.Struct || value.Type() == reflect.TypeFor[Time]() || value.Type() == reflect.TypeFor[certificatesv1.CertificateSigningRequest]() {
		return
	}
	for i := range value.NumField() {
		field := value.Field(i)
		if field.IsZero() {
			t.Errorf("%s.%s is not in the golden record", path, value.Type().Field(i).Name)
			continue
		}
		checkFull(t, field, path+"."+value.Type().Field(i).Name)
	}
}

// valid validates a record, after a change of its JSON.
func valid(t *testing.T, record *Record, change func(map[string]any)) error {
	t.Helper()
	line, err := json.Marshal(record)
	if err != nil {
		t.Fatal(err)
	}
	var document map[string]any
	if err := json.Unmarshal(line, &document); err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(document)
	}
	return validator(t).Validate(document).AsError()
}

// The schema and Parse refuse what is no record.
func TestSchemaRefuses(t *testing.T) {
	for name, change := range map[string]func(map[string]any){
		"another kind":     func(d map[string]any) { d["kind"] = "Other" },
		"another version":  func(d map[string]any) { d["apiVersion"] = "v2" },
		"no outcome":       func(d map[string]any) { delete(d, "outcome") },
		"another outcome":  func(d map[string]any) { d["outcome"] = "Maybe" },
		"an unknown field": func(d map[string]any) { d["extra"] = 1 },
		"a local time":     func(d map[string]any) { d["time"] = "2026-03-01T10:00:02+02:00" },
		"a short digest":   func(d map[string]any) { d["request"].(map[string]any)["sha256"] = "ab" },
		"a nested field":   func(d map[string]any) { d["evidence"].(map[string]any)["ek"].(map[string]any)["x"] = 1 },
	} {
		if err := valid(t, fullRecord(), change); err == nil {
			t.Errorf("%s is valid", name)
		}
	}
	line, err := json.Marshal(fullRecord())
	if err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string][2]string{
		"another kind": {`"kind":"Decision"`, `"kind":"Other"`}, "an unknown field": {`{"apiVersion"`, `{"x":1,"apiVersion"`},
		"a doubled field": {`"outcome":"Issued"`, `"outcome":"Issued","outcome":"Denied"`}, "another case": {`"outcome"`, `"Outcome"`},
	} {
		if _, err := Parse(bytes.Replace(line, []byte(spoil[0]), []byte(spoil[1]), 1)); err == nil {
			t.Errorf("%s is parsed", name)
		}
	}
}

// A record in a line of the process log is JSON, in both formats of the log.
func TestRecordInTheProcessLog(t *testing.T) {
	record := fullRecord()
	want, err := json.Marshal(record)
	if err != nil {
		t.Fatal(err)
	}
	var text, inJSON bytes.Buffer
	textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&text))).Info("decided", "request", "r", "record", record)
	if !strings.HasSuffix(text.String(), " record="+string(want)+"\n") {
		t.Errorf("%s", &text)
	}
	logr.FromSlogHandler(slog.NewJSONHandler(&inJSON, nil)).Info("decided", "record", record)
	var line struct{ Record json.RawMessage }
	if err := json.Unmarshal(inJSON.Bytes(), &line); err != nil || !bytes.Equal(line.Record, want) {
		t.Errorf("%v: %s", err, &inJSON)
	}
}
