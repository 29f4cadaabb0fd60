// SPDX-License-Identifier: Apache-2.0

package decisionlog

import (
	"bytes"
	"encoding/json"
	"flag"
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

var update = flag.Bool("update", false, "write the schemas and the golden records")

const docs = "../../../docs/"

// document is a kind of line.
type document struct {
	of                          reflect.Type
	kind, title, schema, golden string
	full, least                 any
	parse                       func([]byte) (any, error)
}

func documents() []document {
	when := fullRecord().Time
	return []document{
		{
			reflect.TypeFor[Record](), Kind, "Decision record of node-attestation-controller", docs + "decision-record.schema.json", "testdata/issued.json",
			fullRecord(), &Record{APIVersion: APIVersion, Kind: Kind, ID: "u/Denied", Time: when, Outcome: Denied},
			func(line []byte) (any, error) { return Parse(line) },
		},
		{
			reflect.TypeFor[Revocation](), KindRevocation, "Revocation record of node-attestation-controller", docs + "revocation-record.schema.json", "testdata/suspended.json",
			fullRevocation(), &Revocation{APIVersion: APIVersion, Kind: KindRevocation, ID: "u/1/Resumed", Time: when, Action: Resumed},
			func(line []byte) (any, error) { return ParseRevocation(line) },
		},
	}
}

// comments returns the comments of the fields of this package's structs, by Type.Field, as one
// line.
func comments(t *testing.T) map[string]string {
	t.Helper()
	found := map[string]string{}
	for _, name := range []string{"record.go", "revocation.go"} {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		addComments(t, file, found)
	}
	return found
}

func addComments(t *testing.T, file *ast.File, found map[string]string) {
	t.Helper()
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
}

// schemaOf returns the JSON Schema of a type.
func schemaOf(t *testing.T, of reflect.Type, comments map[string]string) map[string]any {
	t.Helper()
	switch of {
	case reflect.TypeFor[Time]():
		return map[string]any{"type": "string", "format": "date-time", "pattern": `^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{9}Z$`}
	case reflect.TypeFor[Digest]():
		return map[string]any{"type": "string", "pattern": "^[0-9a-f]{64}$"}
	case reflect.TypeFor[Outcome]():
		return map[string]any{"type": "string", "enum": []any{Issued, Approved, Denied, Failed}}
	case reflect.TypeFor[Action]():
		return map[string]any{"type": "string", "enum": []any{Revoked, Suspended, Resumed}}
	case reflect.TypeFor[[]byte]():
		return map[string]any{"type": "string", "contentEncoding": "base64"}
	case reflect.TypeFor[*certificatesv1.CertificateSigningRequest]():
		return map[string]any{"type": "object"} // its schema is that of Kubernetes
	}
	switch of.Kind() {
	case reflect.Pointer:
		return schemaOf(t, of.Elem(), comments)
	case reflect.String:
		return map[string]any{"type": "string"}
	case reflect.Int:
		return map[string]any{"type": "integer", "minimum": 0}
	case reflect.Bool:
		return map[string]any{"type": "boolean"}
	case reflect.Slice:
		return map[string]any{"type": "array", "items": schemaOf(t, of.Elem(), comments)}
	case reflect.Struct:
	default:
		t.Fatalf("%s has no schema", of)
	}
	properties, required := map[string]any{}, []any{}
	for field := range of.Fields() {
		name, options, _ := strings.Cut(field.Tag.Get("json"), ",")
		comment := comments[of.Name()+"."+field.Name]
		if name == "" || comment == "" {
			t.Fatalf("%s.%s has no name in JSON, or no comment", of.Name(), field.Name)
		}
		if options == "" {
			required = append(required, name)
		}
		schema := schemaOf(t, field.Type, comments)
		schema["description"] = comment
		properties[name] = schema
	}
	schema := map[string]any{"type": "object", "properties": properties, "additionalProperties": false}
	if len(required) > 0 {
		schema["required"] = required
	}
	return schema
}

// generate returns the JSON Schema of a kind.
func generate(t *testing.T, d document) string {
	t.Helper()
	made := schemaOf(t, d.of, comments(t))
	made["$schema"], made["title"] = "http://json-schema.org/draft-07/schema#", d.title
	properties := made["properties"].(map[string]any)
	properties["apiVersion"].(map[string]any)["enum"] = []any{APIVersion}
	properties["kind"].(map[string]any)["enum"] = []any{d.kind}
	schema, err := json.MarshalIndent(made, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	return string(schema) + "\n"
}

// The JSON Schemas have each field, with the comment that it has in the code. Write them with
// -update.
func TestEachFieldIsDocumented(t *testing.T) {
	for _, d := range documents() {
		schema := generate(t, d)
		if *update {
			overwrite(t, d.schema, schema)
		}
		if read(t, d.schema) != schema {
			t.Errorf("%s is not what -update writes", d.schema)
		}
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
		Evidence:    &Evidence{"tpm", "tpm/v1", true, &EK{string(digest), "ecc-p256", "Inventory"}, "000b" + string(digest), &PCRs{"sha256", []PCR{{0, string(digest)}, {7, string(digest)}}, []int{7}}},
		Certificate: &Certificate{digest, "1f", at("2026-03-01T09:55:00Z"), at("2026-03-08T10:00:00Z")},
		Refusals:    []Finding{{"A", "a"}}, Warnings: []Finding{{"B", "b"}}, Unrecorded: 3,
		Archive: &Archive{object, object, []byte("certificate")},
	}
}

// fullRevocation has every field.
func fullRevocation() *Revocation {
	digest := DigestOf([]byte("certificate"))
	return &Revocation{
		APIVersion: APIVersion, Kind: KindRevocation, ID: "uid-1/42/Suspended", Time: at("2026-03-01T10:00:02.123456789Z"),
		Action: Suspended, Reason: "machine stolen, ticket 17", Object: "ek-" + string(digest),
		Controller: Controller{"v1.2.3", "abcdef", "pod_uid"}, Cluster: Cluster{"cluster-uid", "ns/name"},
		Node: Node{"worker-1", "test://worker-1"}, Machine: Machine{"cluster-api", "machine-1", "uid-of-machine-1"}, EK: string(digest),
		Certificates: []RevokedCertificate{{digest, "1f", at("2026-03-08T10:00:00Z")}},
	}
}

// validator validates by the shipped schema of a kind.
func validator(t *testing.T, d document) *validate.SchemaValidator {
	t.Helper()
	schema := &spec.Schema{}
	if err := json.Unmarshal([]byte(read(t, d.schema)), schema); err != nil {
		t.Fatal(err)
	}
	return validate.NewSchemaValidator(schema, nil, "", strfmt.Default)
}

// The golden documents have every field: nothing in them may change within a version. They are
// valid by their schemas, and so are those with the required fields alone.
func TestGoldenRecord(t *testing.T) {
	for _, d := range documents() {
		line, err := json.MarshalIndent(d.full, "", "  ")
		if err != nil {
			t.Fatal(err)
		}
		line = append(line, '\n')
		if *update {
			overwrite(t, d.golden, string(line))
		}
		if string(line) != read(t, d.golden) {
			t.Errorf("%s changes:\n%s", d.golden, line)
		}
		parsed, err := d.parse(line)
		if err != nil {
			t.Fatal(err)
		}
		again, err := json.MarshalIndent(parsed, "", "  ")
		if err != nil || !bytes.Equal(append(again, '\n'), line) {
			t.Errorf("%v: parsed and written again:\n%s", err, again)
		}
		checkFull(t, reflect.ValueOf(d.full), d.kind)
		for _, valued := range []any{d.full, d.least} {
			if err := valid(t, d, valued, nil); err != nil {
				t.Error(err)
			}
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

// valid validates a document by the schema of a kind, after a change of its JSON.
func valid(t *testing.T, d document, valued any, change func(map[string]any)) error {
	t.Helper()
	line, err := json.Marshal(valued)
	if err != nil {
		t.Fatal(err)
	}
	var fields map[string]any
	if err := json.Unmarshal(line, &fields); err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(fields)
	}
	return validator(t, d).Validate(fields).AsError()
}

// The schemas and the parsers refuse what is no document of their kind.
func TestSchemaRefuses(t *testing.T) {
	all := documents()
	both := map[string]func(map[string]any){
		"another kind":     func(d map[string]any) { d["kind"] = "Other" },
		"another version":  func(d map[string]any) { d["apiVersion"] = "v2" },
		"an unknown field": func(d map[string]any) { d["extra"] = 1 },
		"a local time":     func(d map[string]any) { d["time"] = "2026-03-01T10:00:02+02:00" },
		"no ID":            func(d map[string]any) { delete(d, "id") },
		"a nested field":   func(d map[string]any) { d["machine"].(map[string]any)["x"] = 1 },
	}
	decisions := map[string]func(map[string]any){
		"no outcome":      func(d map[string]any) { delete(d, "outcome") },
		"another outcome": func(d map[string]any) { d["outcome"] = "Maybe" },
		"a short digest":  func(d map[string]any) { d["request"].(map[string]any)["sha256"] = "ab" },
		"a nested field":  func(d map[string]any) { d["evidence"].(map[string]any)["ek"].(map[string]any)["x"] = 1 },
	}
	revocations := map[string]func(map[string]any){
		"no action":      func(d map[string]any) { delete(d, "action") },
		"another action": func(d map[string]any) { d["action"] = "Deleted" },
		"a short digest": func(d map[string]any) { d["certificates"].([]any)[0].(map[string]any)["sha256"] = "ab" },
	}
	for i, more := range []map[string]func(map[string]any){decisions, revocations} {
		for _, changes := range []map[string]func(map[string]any){both, more} {
			for name, change := range changes {
				if err := valid(t, all[i], all[i].full, change); err == nil {
					t.Errorf("%s: %s is valid", all[i].kind, name)
				}
			}
		}
		if err := valid(t, all[i], all[1-i].full, nil); err == nil {
			t.Errorf("a %s is a valid %s", all[1-i].kind, all[i].kind)
		}
	}
	for i, spoiled := range []map[string][2]string{{
		"another kind": {`"kind":"Decision"`, `"kind":"Other"`}, "an unknown field": {`{"apiVersion"`, `{"x":1,"apiVersion"`},
		"a doubled field": {`"outcome":"Issued"`, `"outcome":"Issued","outcome":"Denied"`}, "another case": {`"outcome"`, `"Outcome"`},
	}, {
		"another kind": {`"kind":"Revocation"`, `"kind":"Decision"`}, "another version": {`v1alpha1`, `v2`}, "an unknown field": {`{"apiVersion"`, `{"x":1,"apiVersion"`},
		"a doubled field": {`"action":"Suspended"`, `"action":"Suspended","action":"Resumed"`}, "another case": {`"action"`, `"Action"`},
	}} {
		line, err := json.Marshal(all[i].full)
		if err != nil {
			t.Fatal(err)
		}
		for name, spoil := range spoiled {
			if _, err := all[i].parse(bytes.Replace(line, []byte(spoil[0]), []byte(spoil[1]), 1)); err == nil {
				t.Errorf("%s: %s is parsed", all[i].kind, name)
			}
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
