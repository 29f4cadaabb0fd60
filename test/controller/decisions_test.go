// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"bytes"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-logr/logr"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/kube-openapi/pkg/validation/spec"
	"k8s.io/kube-openapi/pkg/validation/strfmt"
	"k8s.io/kube-openapi/pkg/validation/validate"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/decisionlog"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// decisions is the decision log of a fleet.
type decisions struct {
	*fleet
	path string
	log  *decisionlog.Log
}

// recordDecisions makes a fleet's controller write decision records with archives to a file. Call
// it before the controller starts.
func (f *fleet) recordDecisions(t *testing.T) *decisions {
	t.Helper()
	d := &decisions{fleet: f, path: filepath.Join(t.TempDir(), "decisions.jsonl")}
	d.log = decisionlog.New(logr.Discard(), nil, decisionlog.NewFile(d.path))
	f.config.Decisions = decisionlog.Config{
		Log: d.log, Archive: true, Controller: decisionlog.Controller{Version: "test", Identity: t.Name()}, Cluster: decisionlog.Cluster{UID: f.cluster},
	}
	return d
}

// stopped stops the controller, and returns the decision records. Each line is valid by the schema.
func (d *decisions) stopped(t *testing.T) (all []*decisionlog.Record) {
	t.Helper()
	d.stop()
	d.log.Close()
	text, err := os.ReadFile("../../docs/decision-record.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	schema := &spec.Schema{}
	if err := json.Unmarshal(text, schema); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(d.path)
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(data) {
		var document map[string]any
		if err := json.Unmarshal(line, &document); err != nil {
			t.Fatal(err)
		}
		if err := validate.NewSchemaValidator(schema, nil, "", strfmt.Default).Validate(document).AsError(); err != nil {
			t.Errorf("%v: %s", err, line)
		}
		record, err := decisionlog.Parse(line)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, record)
	}
	return all
}

// agrees compares a decision record with the objects in the API server.
func (d *decisions) agrees(t *testing.T, record *decisionlog.Record, m *machine, reason string) {
	t.Helper()
	object := d.get(t, record.Request.Name)
	if record.Reason != reason || string(object.UID) != record.Request.UID || record.Request.SHA256 != decisionlog.DigestOf(object.Spec.Request) ||
		record.ID != string(object.UID)+"/"+string(record.Outcome) || record.Requester.Username != object.Spec.Username || record.Node.Name != m.name ||
		record.Cluster.UID != d.cluster || record.Controller.Identity != t.Name() || record.Archive == nil {
		t.Errorf("%s: %+v", object.Name, record)
	}
	if record.Evidence == nil || record.Evidence.EK == nil || record.Evidence.EK.Template != "ecc-p256" || record.Evidence.Version != "tpm/v1" {
		t.Fatalf("%+v", record.Evidence)
	}
	if record.Outcome != decisionlog.Issued {
		if record.Evidence.Proven || record.Certificate != nil || len(record.Refusals) == 0 || record.Refusals[0].Reason != reason {
			t.Errorf("%+v", record)
		}
		return
	}
	fingerprint, err := signing.Fingerprint(object.Status.Certificate)
	if err != nil || string(record.Certificate.SHA256) != fingerprint {
		t.Errorf("certificate %+v, not %s (%v)", record.Certificate, fingerprint, err)
	}
	hello, attested := d.get(t, record.Hello.Name), d.record(t, m.name)
	if record.Hello.UID != string(hello.UID) || record.Hello.SHA256 != decisionlog.DigestOf(hello.Spec.Request) {
		t.Errorf("hello %+v", record.Hello)
	}
	e := record.Evidence
	if !e.Proven || e.EK.Fingerprint != attested.Spec.EK.Fingerprint || e.EK.Source != attested.Spec.EK.Source || e.AKName != attested.Spec.AKName ||
		record.Machine.Name != attested.Spec.Machine.Name || record.Machine.Source != attested.Spec.Machine.Source || record.Node.ProviderID != attested.Spec.ProviderID {
		t.Errorf("%+v, and the NodeAttestation has %+v", record, attested.Spec)
	}
	if e.PCRs == nil || e.PCRs.Bank != "sha256" || len(e.PCRs.Values) != 8 || len(e.PCRs.Values[0].Value) != 64 {
		t.Errorf("PCRs %+v", e.PCRs)
	}
}

// verify runs verify on the log in its present state, with the fleet's inventory and challenge
// keys.
func (d *decisions) verify(t *testing.T) (code int, output string) {
	t.Helper()
	dir := t.TempDir()
	file := func(name string, content []byte) string {
		path := filepath.Join(dir, name)
		harness.WriteFile(t, path, content)
		return path
	}
	pemOf := func(c *x509.Certificate) []byte {
		return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw})
	}
	roots, intermediates := file("roots.pem", pemOf(d.maker.Root)), file("intermediates.pem", pemOf(d.maker.Intermediate))
	config := file("config.yaml", fmt.Appendf(nil, `apiVersion: controller.attestation.cluster.x-k8s.io/v1alpha1
kind: NodeAttestationControllerConfiguration
clusterUID: %s
signing: {mode: Sign, secretName: ca}
inventory: {file: %s}
tpm: {rootsFile: %s, intermediatesFile: %s, pcrs: {bank: sha256, indexes: [0, 1, 2, 3, 4, 5, 6, 7]}}
`, d.cluster, d.inventory, roots, intermediates))
	secret, err := json.Marshal(&corev1.Secret{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Secret"}, Data: map[string][]byte{"current": []byte("k1"), "k1": d.key},
	})
	if err != nil {
		t.Fatal(err)
	}
	// a process of its own, since a program sets the logger of its whole process
	cmd := exec.CommandContext(t.Context(), shared.controller, "verify", "--config", config, "--challenge-keys", file("secret.json", secret), d.path)
	out, err := cmd.CombinedOutput()
	var exited *exec.ExitError
	if err != nil && !errors.As(err, &exited) {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), string(out)
}

// provesItself checks that verify accepts the log after all requests are deleted. It must refuse a
// log in which an admission was replaced by another one.
func (d *decisions) provesItself(t *testing.T, admissions int) {
	t.Helper()
	if err := d.client.DeleteAllOf(t.Context(), &certificatesv1.CertificateSigningRequest{}); err != nil {
		t.Fatal(err)
	}
	if code, out := d.verify(t); code != 0 || strings.Count(out, "outcome Approve") != admissions {
		t.Errorf("exit code %d:\n%s", code, out)
	}
	data, err := os.ReadFile(d.path)
	if err != nil {
		t.Fatal(err)
	}
	var changed bytes.Buffer
	for line := range bytes.Lines(data) {
		record, err := decisionlog.Parse(line)
		if err != nil {
			t.Fatal(err)
		}
		if record.Outcome == decisionlog.Issued { // under a name that it was not proven for
			record.Request.Name, record.Archive.Request.Name = "other", "other"
		}
		if err := json.NewEncoder(&changed).Encode(record); err != nil {
			t.Fatal(err)
		}
	}
	harness.WriteFile(t, d.path, changed.Bytes())
	if code, out := d.verify(t); code != 21 || strings.Count(out, "AttestationQuoteMAC") != admissions {
		t.Errorf("it was tampered with: exit code %d:\n%s", code, out)
	}
}
