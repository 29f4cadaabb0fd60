// SPDX-License-Identifier: Apache-2.0

package records

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// Conditions and expiry follow from the rest of the record, in each write.
func TestConditions(t *testing.T) {
	began := time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)
	now := began
	object := &v1alpha1.NodeAttestation{}
	issue := func(serial string, lifetime time.Duration) {
		object.Status.Certificates = append(object.Status.Certificates, v1alpha1.IssuedCertificate{
			SHA256: serial, Serial: serial, RequestUID: "p", NotAfter: metav1.NewTime(now.Add(lifetime)),
		})
	}
	grant := verifier.Record{EK: "former", EKSource: verifier.EKInventory, Provider: "tpm", ProofUID: "p"}
	steps := []struct {
		name   string
		change func()
		// want has each condition with the hours since its last transition.
		want, expires, message string
	}{
		{"first grant", func() {
			SetGrant(object, grant, requestNamed("first", "p"), nil, now)
		}, "Attested=True/Attested 0, CertificateIssued=False/NotIssued 0", "", "the evidence of request first was accepted"},
		{"certificate", func() { issue("a1", 24*time.Hour) },
			"Attested=True/Attested 1, CertificateIssued=True/Issued 0", "2026-11-21T13:00:00Z", "serial a1 ends at 2026-11-21T13:00:00Z"},
		{"renewal granted", func() {
			grant.Certificates = []verifier.Certificate{{SHA256: "a1"}}
			SetGrant(object, grant, requestNamed("second", "p"), nil, now)
		}, "Attested=True/Attested 2, CertificateIssued=True/Issued 1", "2026-11-21T13:00:00Z", "the evidence of request second was accepted"},
		{"renewed, for a shorter time", func() { issue("a2", time.Hour) },
			"Attested=True/Attested 3, CertificateIssued=True/Issued 2", "2026-11-20T16:00:00Z", "serial a2 ends at 2026-11-20T16:00:00Z"},
		{"the EK is replaced", func() {
			object.Status.EKReplaced = &v1alpha1.EKReplacement{Since: metav1.NewTime(now), EKs: []string{"next"}}
		}, "Attested=False/EKReplaced 0, CertificateIssued=True/Issued 3", "2026-11-20T16:00:00Z", "since 2026-11-20T16:00:00Z the source"},
		{"a source names it again", func() { object.Status.EKReplaced = nil },
			"Attested=True/Attested 0, CertificateIssued=True/Issued 4", "2026-11-20T16:00:00Z", "request second"},
		{"an older replica wrote", func() { object.Status.Conditions, object.Status.Expires = nil, nil },
			"Attested=True/Attested 0, CertificateIssued=True/Issued 0", "2026-11-20T16:00:00Z", "request second"},
		{"another EK", func() {
			grant.EK, grant.Certificates = "next", nil
			SetGrant(object, grant, requestNamed("third", "p"), nil, began)
		}, "Attested=True/Attested 1, CertificateIssued=False/NotIssued 0", "", "no certificate was issued to this endorsement key yet"},
		{"its certificate", func() { issue("b1", time.Hour) },
			"Attested=True/Attested 2, CertificateIssued=True/Issued 0", "2026-11-20T21:00:00Z", "serial b1"},
	}
	for _, step := range steps {
		step.change()
		object.Generation++
		setConditions(object, now)
		var got, messages []string
		for _, c := range object.Status.Conditions {
			got = append(got, fmt.Sprintf("%s=%s/%s %.0f", c.Type, c.Status, c.Reason, now.Sub(c.LastTransitionTime.Time).Hours()))
			messages = append(messages, c.Message)
			if c.ObservedGeneration != object.Generation+1 {
				t.Errorf("%s: %s is of generation %d, and is written with %d", step.name, c.Type, c.ObservedGeneration, object.Generation+1)
			}
		}
		if got := strings.Join(got, ", "); got != step.want {
			t.Errorf("%s: %s, want %s", step.name, got, step.want)
		}
		expires := ""
		if e := object.Status.Expires; e != nil {
			expires = e.UTC().Format(time.RFC3339)
		}
		if expires != step.expires {
			t.Errorf("%s: expires %q, want %q", step.name, expires, step.expires)
		}
		if all := strings.Join(messages, "\n"); !strings.Contains(all, step.message) {
			t.Errorf("%s: %q lacks %q", step.name, all, step.message)
		}
		now = now.Add(time.Hour)
	}
}

// A record has its cluster's label from each write, and keeps others. A cluster's UID may be no
// value of a label.
func TestLabels(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(t)
		for cluster, want := range map[string]string{
			"0b3f7c1e-8a6d-4e52-9c47-1f6f5f0a2d3b": "0b3f7c1e-8a6d-4e52-9c47-1f6f5f0a2d3b",
			"fleet/a":                              "sha256-8e217c66956df87bc48b419ed1641510",
			strings.Repeat("c", 64):                "sha256-52b6419d27bd7f547cee3b92f8c17a90",
		} {
			record := recordNamed("r", "node-1", "")
			record.Spec.Cluster, record.Labels = cluster, map[string]string{"operator": "set", v1alpha1.LabelCluster: "forged"}
			NewStore(s, namespace, nil).label(record)
			if got := record.Labels[v1alpha1.LabelCluster]; got != want || record.Labels["operator"] != "set" {
				t.Errorf("%s: %q", cluster, record.Labels)
			}
		}
		owned := &Owned{Source: "cluster-api", Cluster: "c", Labels: map[string]string{"l": "v"}}
		store := s.start(t, owned, logr.Discard())
		for _, name := range []string{"a", "b"} {
			record := recordNamed(name, name, "")
			if err := store.Write(t.Context(), record, time.Now()); err != nil {
				t.Fatal(err)
			}
			if record.Labels["l"] != "v" || record.Labels[v1alpha1.LabelCluster] != "" {
				t.Errorf("%q", record.Labels)
			}
			record.Labels["x"] = "y" // another record's labels are its own
		}
		if len(owned.Labels) != 1 {
			t.Errorf("%q", owned.Labels)
		}
	})
}
