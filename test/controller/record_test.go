// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// kubectl runs it as an administrator, in the fleet's namespace.
func (f *fleet) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := f.RunKubectl(t.Context(), f.adminConfig, append(args, "--namespace="+f.namespace)...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// A record serves people and tools: columns, category, label, conditions that kubectl waits for,
// and Events. Conditions cost no write: a first certificate takes two, as before.
func TestRecordForPeopleAndTools(t *testing.T) {
	f := newFleet(t, nil)
	m := f.newMachine(t, "shown")
	f.inventoried(t, m)
	p := f.newPeer(t, m.chip, f.asToken(m.token), m.name, m.name)
	_, proof := p.attests(t)
	certificate := f.issued(t, proof, m.name)
	node := f.newPeer(t, m.chip, f.asNode(certificate, p.keyPEM), m.name, m.name)
	const resource = "nodeattestation/shown"
	waits := func(condition string) {
		t.Helper()
		f.kubectl(t, "wait", resource, "--for=condition="+condition, "--timeout=20s")
	}
	summarized := func(what string, generation int64) *v1alpha1.NodeAttestation {
		t.Helper()
		record := f.record(t, m.name)
		if record.Generation != generation {
			t.Errorf("%s: %d writes, want %d", what, record.Generation, generation)
		}
		for _, c := range record.Status.Conditions {
			if c.ObservedGeneration != generation {
				t.Errorf("%s: %s observed generation %d of %d", what, c.Type, c.ObservedGeneration, generation)
			}
		}
		newest := record.Status.Certificates[len(record.Status.Certificates)-1]
		if record.Status.Expires == nil || !record.Status.Expires.Equal(&newest.NotAfter) {
			t.Errorf("%s: expires %s, and the certificate ends %s", what, record.Status.Expires, newest.NotAfter)
		}
		return record
	}

	waits("Attested")
	waits("CertificateIssued")
	record := summarized("first certificate", 2)
	expires := record.Status.Expires.UTC().Format(time.RFC3339)
	for _, resources := range []string{"nodeattestations", "natt", "cluster-api"} {
		table := f.kubectl(t, "get", resources, "--selector="+v1alpha1.LabelCluster+"="+f.cluster)
		lines := strings.Split(strings.TrimSpace(table), "\n")
		if got := strings.Join(strings.Fields(lines[0]), " "); got != "NAME NODE MACHINE CLUSTER PROVIDER EXPIRES AGE" {
			t.Errorf("%s: columns %s", resources, got)
		}
		row := strings.Fields(lines[len(lines)-1])
		if got, want := strings.Join(row[:6], " "), fmt.Sprintf("shown shown shown %s tpm %s", f.cluster, expires); len(lines) != 2 || got != want {
			t.Errorf("%s: %s, want %s", resources, got, want)
		}
	}
	if wide := f.kubectl(t, "get", "natt", "--output=wide"); !strings.Contains(wide, record.Spec.EK.Fingerprint) {
		t.Errorf("there is no EK in\n%s", wide)
	}

	// A replica of an older release knows neither conditions nor expiry, and its update drops them.
	record.Status.Conditions, record.Status.Expires = nil, nil
	if err := f.client.Update(t.Context(), record); err != nil {
		t.Fatal(err)
	}
	_, proof = node.attests(t)
	f.issued(t, proof, m.name)
	summarized("renewal", 5)
	waits("CertificateIssued")

	// The inventory names another EK, and then the machine's again.
	f.names(t, map[string]string{m.name: strange("shown")})
	waits("Attested=false")
	summarized("replaced EK", 6)
	harness.Eventually(t, harness.Soon, "an Event on the record about the EK, and none about certificates", func() bool {
		list := &eventsv1.EventList{}
		if err := f.client.List(t.Context(), list, client.InNamespace(f.namespace)); err != nil {
			t.Fatal(err)
		}
		var reasons []string
		for _, e := range list.Items {
			if e.Regarding.UID == record.UID {
				reasons = append(reasons, e.Reason)
			}
		}
		return slices.Equal(reasons, []string{"EKChangeAccepted"})
	})
	f.inventoried(t, m)
	waits("Attested")
	if c := meta.FindStatusCondition(summarized("named again", 7).Status.Conditions, v1alpha1.ConditionAttested); c.Reason != v1alpha1.ReasonAttested {
		t.Errorf("%+v", c)
	}
}
