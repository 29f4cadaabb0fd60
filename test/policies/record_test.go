// SPDX-License-Identifier: Apache-2.0

package policies

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

var hash = strings.Repeat("0123456789abcdef", 4)

// fullRecord has every field.
func fullRecord(name string) *v1alpha1.NodeAttestation {
	later := metav1.NewTime(time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC).Local())
	now := metav1.NewTime(time.Now().Truncate(time.Second))
	return &v1alpha1.NodeAttestation{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "NodeAttestation"},
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace},
		Spec: v1alpha1.NodeAttestationSpec{
			Cluster:    "5a0c4be2-4c51-4f3c-9a44-1a3d7e0c7c11",
			Machine:    v1alpha1.MachineReference{Source: "inventory", Name: "rack-1:slot/2", UID: "0b3f"},
			Provider:   "tpm",
			ProviderID: "metal://4c4c4544-0042-3010-8057-b7c04f4b4e32",
			NodeName:   nodeName + ".example.com",
			EK:         &v1alpha1.EndorsementKey{Fingerprint: hash, Template: "ecc-p256"},
			AKName:     "000b" + hash,
		},
		Status: v1alpha1.NodeAttestationStatus{
			Conditions: []metav1.Condition{{
				Type: v1alpha1.ConditionAttested, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonAttested, ObservedGeneration: 1, LastTransitionTime: now, Message: "m",
			}},
			Expires:      &later,
			LastAttested: &now,
			Boot:         &v1alpha1.BootCounters{Resets: 1<<32 - 1, Restarts: 0, Clock: 1<<63 - 1},
			Hello:        &v1alpha1.HelloReference{Name: "node-csr-a", UID: "a"},
			Request:      &v1alpha1.RequestReference{Name: "node-csr-b", UID: "b", SHA256: hash},

			FirstRequestUID: "c",
			Certificates: []v1alpha1.IssuedCertificate{
				{SHA256: strings.Repeat("0", 64), Serial: "ff", NotAfter: now, RequestUID: "c", Noted: true},
				{SHA256: hash, Serial: strings.Repeat("f", 32), NotAfter: later, RequestUID: "b", Noted: false},
			},
		},
	}
}

func records(t *testing.T) dynamic.ResourceInterface {
	t.Helper()
	client, err := dynamic.NewForConfig(shared.controllerConfig)
	if err != nil {
		t.Fatal(err)
	}
	return client.Resource(v1alpha1.Resource).Namespace(namespace)
}

func toUnstructured(t *testing.T, record *v1alpha1.NodeAttestation) *unstructured.Unstructured {
	t.Helper()
	object, err := runtime.DefaultUnstructuredConverter.ToUnstructured(record)
	if err != nil {
		t.Fatal(err)
	}
	return &unstructured.Unstructured{Object: object}
}

func fromUnstructured(t *testing.T, object *unstructured.Unstructured) *v1alpha1.NodeAttestation {
	t.Helper()
	record := &v1alpha1.NodeAttestation{}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(object.Object, record, true); err != nil {
		t.Fatal(err)
	}
	return record
}

const strict = metav1.FieldValidationStrict

func create(t *testing.T, record *v1alpha1.NodeAttestation, dryRun []string) (*unstructured.Unstructured, error) {
	t.Helper()
	return records(t).Create(t.Context(), toUnstructured(t, record), metav1.CreateOptions{FieldValidation: strict, DryRun: dryRun})
}

// The controller, with its own rights, writes a record with every field, reads back the same, and
// writes spec and status at once.
func TestRecordRoundTrip(t *testing.T) {
	record := fullRecord("full")
	stored, err := create(t, record, nil)
	if err != nil {
		t.Fatal(err)
	}
	read := fromUnstructured(t, stored)
	if !apiequality.Semantic.DeepEqual(record.Spec, read.Spec) || !apiequality.Semantic.DeepEqual(record.Status, read.Status) {
		t.Errorf("stored:\n%+v\nread:\n%+v", record, read)
	}

	read.Spec.AKName = "000c" + hash + hash[:32]
	read.Status.Request = nil
	read.Status.Certificates[1].Noted = true
	updated, err := records(t).Update(t.Context(), toUnstructured(t, read), metav1.UpdateOptions{FieldValidation: strict})
	if err != nil {
		t.Fatal(err)
	}
	if got := fromUnstructured(t, updated); !apiequality.Semantic.DeepEqual(got.Spec, read.Spec) || !apiequality.Semantic.DeepEqual(got.Status, read.Status) {
		t.Errorf("written:\n%+v\nread:\n%+v", read, got)
	}
	// The exactly-once lock: an update from an earlier read fails.
	if _, err := records(t).Update(t.Context(), toUnstructured(t, read), metav1.UpdateOptions{}); !apierrors.IsConflict(err) {
		t.Errorf("a stale update: %v", err)
	}
	if _, err := records(t).UpdateStatus(t.Context(), updated, metav1.UpdateOptions{}); !apierrors.IsForbidden(err) && !apierrors.IsNotFound(err) {
		t.Errorf("there is a subresource status: %v", err)
	}

	out, err := shared.RunKubectl(t.Context(), shared.adminKubeconfig, "get", "natt", "-n", namespace, "full", "--output=wide")
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(out, "\n")
	if want := []string{"NAME", "NODE", "MACHINE", "CLUSTER", "PROVIDER", "EXPIRES", "AGE", "EK", "LAST", "ATTESTED"}; strings.Join(strings.Fields(lines[0]), " ") != strings.Join(want, " ") {
		t.Errorf("columns: %s", lines[0])
	}
	for _, part := range []string{nodeName + ".example.com", "rack-1:slot/2", hash, "2030-01-02T"} {
		if !strings.Contains(lines[1], part) {
			t.Errorf("no %s in: %s", part, lines[1])
		}
	}
	if strings.Contains(out, "<") {
		t.Errorf("a column is not there: %s", lines[1])
	}
}

func TestSmallestRecord(t *testing.T) {
	record := fullRecord("smallest")
	record.Spec.Machine.UID, record.Spec.ProviderID, record.Spec.EK, record.Spec.AKName = "", "", nil, ""
	record.Status = v1alpha1.NodeAttestationStatus{}
	_, err := create(t, record, dryRun)
	want(t, err)
}

func TestRecordRefuses(t *testing.T) {
	rows := map[string]func(*v1alpha1.NodeAttestation){
		"no cluster":              func(r *v1alpha1.NodeAttestation) { r.Spec.Cluster = "" },
		"cluster with a space":    func(r *v1alpha1.NodeAttestation) { r.Spec.Cluster = "a b" },
		"cluster too long":        func(r *v1alpha1.NodeAttestation) { r.Spec.Cluster = strings.Repeat("a", 254) },
		"no machine":              func(r *v1alpha1.NodeAttestation) { r.Spec.Machine.Name = "" },
		"machine on two lines":    func(r *v1alpha1.NodeAttestation) { r.Spec.Machine.Name = "a\nb" },
		"source in capitals":      func(r *v1alpha1.NodeAttestation) { r.Spec.Machine.Source = "Inventory" },
		"UID with a slash":        func(r *v1alpha1.NodeAttestation) { r.Spec.Machine.UID = "a/b" },
		"no provider":             func(r *v1alpha1.NodeAttestation) { r.Spec.Provider = "" },
		"provider is no label":    func(r *v1alpha1.NodeAttestation) { r.Spec.Provider = "tpm.v1" },
		"provider ID with space":  func(r *v1alpha1.NodeAttestation) { r.Spec.ProviderID = "a b" },
		"provider ID too long":    func(r *v1alpha1.NodeAttestation) { r.Spec.ProviderID = strings.Repeat("a", 1025) },
		"node name in capitals":   func(r *v1alpha1.NodeAttestation) { r.Spec.NodeName = "Node" },
		"node name ends in a dot": func(r *v1alpha1.NodeAttestation) { r.Spec.NodeName = "node." },
		"node name and a line":    func(r *v1alpha1.NodeAttestation) { r.Spec.NodeName = "node\n" },
		"fingerprint too short":   func(r *v1alpha1.NodeAttestation) { r.Spec.EK.Fingerprint = hash[1:] },
		"fingerprint in capitals": func(r *v1alpha1.NodeAttestation) { r.Spec.EK.Fingerprint = strings.ToUpper(hash) },
		"template in capitals":    func(r *v1alpha1.NodeAttestation) { r.Spec.EK.Template = "ECC-P256" },
		"first request's UID":     func(r *v1alpha1.NodeAttestation) { r.Status.FirstRequestUID = "a/b" },
		"AK of another hash":      func(r *v1alpha1.NodeAttestation) { r.Spec.AKName = "0004" + hash },
		"AK too short":            func(r *v1alpha1.NodeAttestation) { r.Spec.AKName = "000c" + hash },
		"clock beyond int64":      func(r *v1alpha1.NodeAttestation) { r.Status.Boot.Clock = 1 << 63 },
		"hello without UID":       func(r *v1alpha1.NodeAttestation) { r.Status.Hello.UID = "" },
		"request without hash":    func(r *v1alpha1.NodeAttestation) { r.Status.Request.SHA256 = "" },
		"request with a slash":    func(r *v1alpha1.NodeAttestation) { r.Status.Request.Name = "a/b" },
		"one certificate twice":   func(r *v1alpha1.NodeAttestation) { r.Status.Certificates[1].SHA256 = r.Status.Certificates[0].SHA256 },
		"serial is not hex":       func(r *v1alpha1.NodeAttestation) { r.Status.Certificates[0].Serial = "0x1" },
		"too many certificates": func(r *v1alpha1.NodeAttestation) {
			for i := range 63 {
				c := r.Status.Certificates[0]
				c.SHA256 = fmt.Sprintf("%064x", i+1)
				r.Status.Certificates = append(r.Status.Certificates, c)
			}
		},
	}
	for name, spoil := range rows {
		t.Run(name, func(t *testing.T) {
			record := fullRecord("bad")
			spoil(record)
			tooLate := record.Status.Boot.Clock == 1<<63
			if tooLate { // the converter refuses it, too
				record.Status.Boot.Clock = 0
			}
			object := toUnstructured(t, record)
			if tooLate {
				if err := unstructured.SetNestedField(object.Object, float64(1<<63), "status", "boot", "clock"); err != nil {
					t.Fatal(err)
				}
			}
			_, err := records(t).Create(t.Context(), object, metav1.CreateOptions{FieldValidation: strict, DryRun: dryRun})
			if !apierrors.IsInvalid(err) {
				t.Errorf("not refused as invalid: %v", err)
			}
		})
	}
	object := toUnstructured(t, fullRecord("bad"))
	if err := unstructured.SetNestedField(object.Object, "x", "spec", "unknown"); err != nil {
		t.Fatal(err)
	}
	if _, err := records(t).Create(t.Context(), object, metav1.CreateOptions{FieldValidation: strict, DryRun: dryRun}); err == nil {
		t.Error("an unknown field is taken")
	}
}

// No user can turn one machine's record into another's, not even an administrator, who may delete
// it.
func TestRecordIsOfOneMachineForLife(t *testing.T) {
	stored, err := create(t, fullRecord("immutable"), nil)
	if err != nil {
		t.Fatal(err)
	}
	refused := map[string]string{
		"cluster":           `{"spec":{"cluster":"other"}}`,
		"cluster, removed":  `{"spec":{"cluster":null}}`,
		"machine's source":  `{"spec":{"machine":{"source":"other"}}}`,
		"machine's name":    `{"spec":{"machine":{"name":"other"}}}`,
		"machine's UID":     `{"spec":{"machine":{"uid":"other"}}}`,
		"UID, removed":      `{"spec":{"machine":{"uid":null}}}`,
		"machine, removed":  `{"spec":{"machine":null}}`,
		"node name":         `{"spec":{"nodeName":"other"}}`,
		"node name removed": `{"spec":{"nodeName":null}}`,
		"spec, removed":     `{"spec":null}`,
	}
	client, err := dynamic.NewForConfig(shared.AdminConfig())
	if err != nil {
		t.Fatal(err)
	}
	admin := client.Resource(v1alpha1.Resource).Namespace(namespace)
	for what, content := range refused {
		if _, err := admin.Patch(t.Context(), stored.GetName(), types.MergePatchType, []byte(content), metav1.PatchOptions{}); !apierrors.IsInvalid(err) {
			t.Errorf("%s by admin: %v", what, err)
		}
		if _, err := rewrite(t, stored, content); !apierrors.IsInvalid(err) {
			t.Errorf("%s by controller: %v", what, err)
		}
	}
	for _, content := range []string{`{"spec":{"ek":{"template":"ecc-p384"}}}`, `{"spec":{"akName":null}}`, `{"status":null}`, `{"metadata":{"labels":{"a":"b"}}}`} {
		changed, err := rewrite(t, stored, content)
		if err != nil {
			t.Fatalf("%s: %v", content, err)
		}
		stored = changed
	}
	want(t, admin.Delete(t.Context(), stored.GetName(), metav1.DeleteOptions{}))
}

// rewrite has the controller, which may not patch a record, write it with a merge patch (RFC 7396)
// applied.
func rewrite(t *testing.T, stored *unstructured.Unstructured, content string) (*unstructured.Unstructured, error) {
	t.Helper()
	var patch map[string]any
	if err := json.Unmarshal([]byte(content), &patch); err != nil {
		t.Fatal(err)
	}
	var merge func(into, from map[string]any)
	merge = func(into, from map[string]any) {
		for key, value := range from {
			inner, deep := value.(map[string]any)
			old, there := into[key].(map[string]any)
			switch {
			case value == nil:
				delete(into, key)
			case deep && there:
				merge(old, inner)
			default:
				into[key] = value
			}
		}
	}
	changed := stored.DeepCopy()
	merge(changed.Object, patch)
	return records(t).Update(t.Context(), changed, metav1.UpdateOptions{})
}
