// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// shortLived makes certificates valid for ten minutes from now, and backdates them by an hour. A
// seventh of the 70 minutes is left, so more than half of the certificates are due at once.
func shortLived(file map[string]any) {
	file["lifetimes"] = map[string]any{"default": "10m", "min": "10m", "max": "10m", "backdate": "1h"}
	file["rates"] = map[string]any{"perMachine": map[string]any{"every": "100ms", "burst": 100}}
}

// onInfra puts the EK into the annotation of the infrastructure machine, and not of the Machine.
func onInfra(m *machine) {
	m.object.Annotations = nil
	m.infra.SetAnnotations(map[string]string{attestation.AnnotationEK: "sha256:" + m.ek})
}

// The plugin gets its first certificate, and uses it to renew. In the workload cluster, the
// controller does everything as the user that the policies there name. It does nothing as the
// administrator, although it was given the administrator's credential.
func TestEnrolmentAndRenewal(t *testing.T) {
	t.Parallel()
	w := newWorld(t, shared.management)
	c := w.newCluster(t, "workload", nil)
	mark, err := c.workload.AuditMark()
	if err != nil {
		t.Fatal(err)
	}
	controller := w.start(t, shortLived)
	for name, annotated := range map[string]func(*machine){"on-machine": nil, "on-infra": onInfra} {
		t.Run(name, func(t *testing.T) {
			m := c.newMachine(t, name, annotated)
			r := m.enrols(t)
			m.remembered(t)
			m.registered(t)
			// If renewal is not due, the plugin loses its certificate and requests another one.
			for n := 1; nodestate.RenewAt(r.Leaf).After(time.Now()); n++ {
				if n == 20 {
					t.Fatal("no certificate of 20 is due")
				}
				m.removeState(t)
				r = m.enrols(t)
			}
			first := r.Leaf
			harness.Eventually(t, harness.Soon, "the renewed certificate is printed", func() bool {
				return !bytes.Equal(first.Raw, m.enrols(t).Leaf.Raw)
			})
			if n := len(c.renewals(t, name)); n != 1 {
				t.Errorf("%d proofs were filed with the node's own certificate", n)
			}
			m.reported(t, m.remembered(t))
		})
	}
	served, err := controller.Metrics(t.Context())
	if err != nil || !strings.Contains(served, "\nnode_attestation_controller_build_info{") || !strings.Contains(served, `node_attestation_records{cluster="`+w.namespace+`/workload"} 2`) {
		t.Errorf("%v\n%s", err, served)
	}
	c.actedAsUser(t, mark)
	c.operated(t, "on-machine", "on-infra")
}

// renewals returns the issued proofs that were filed with a node's own certificate.
func (c *cluster) renewals(t *testing.T, node string) (names []string) {
	t.Helper()
	for _, r := range c.requests(t) {
		if r.Spec.SignerName != attestation.HelloSignerName && r.Spec.Username == "system:node:"+node && len(r.Status.Certificate) > 0 {
			names = append(names, r.Name)
		}
	}
	return names
}

// remembered checks the machine's record.
func (m *machine) remembered(t *testing.T) *v1alpha1.NodeAttestation {
	t.Helper()
	record := m.record(t, m.name)
	if record == nil {
		t.Fatalf("%s has no record", m.name)
	}
	owner := []metav1.OwnerReference{m.owner()}
	if !slices.EqualFunc(record.OwnerReferences, owner, func(a, b metav1.OwnerReference) bool {
		return a.APIVersion == b.APIVersion && a.Kind == b.Kind && a.Name == b.Name && a.UID == b.UID
	}) {
		t.Errorf("the record of %s is owned by %+v, not by its Machine %s", m.name, record.OwnerReferences, m.object.UID)
	}
	if record.Labels[clusterv1.ClusterNameLabel] != m.cluster.name {
		t.Errorf("the record of %s has the labels %v", m.name, record.Labels)
	}
	s := record.Spec
	if s.Cluster != m.identity(t) || s.NodeName != m.name || s.ProviderID != m.providerID || s.EK == nil || s.EK.Fingerprint != m.ek ||
		s.Machine != (v1alpha1.MachineReference{Source: "cluster-api", Name: m.name}) || len(record.Status.Certificates) == 0 {
		t.Errorf("record of %s: %+v", m.name, record)
	}
	return record
}

// reported waits for the Events about two certificates or more, on the Machine and not on the
// record.
func (m *machine) reported(t *testing.T, record *v1alpha1.NodeAttestation) {
	t.Helper()
	issued := "issued a certificate for node " + m.name + " to machine " + m.name + ", "
	harness.Eventually(t, harness.Soon, "Events on the Machine", func() bool {
		list := &eventsv1.EventList{}
		if err := m.client.List(t.Context(), list, client.InNamespace(m.namespace)); err != nil {
			t.Fatal(err)
		}
		about := map[types.UID]int{}
		for _, e := range list.Items {
			if strings.Contains(e.Note, issued) {
				about[e.Regarding.UID]++
			}
		}
		return about[record.UID] == 0 && about[m.object.UID] >= 2
	})
}

// identity returns the UID of the cluster that the controller has stored.
func (c *cluster) identity(t *testing.T) string {
	t.Helper()
	keys := &corev1.Secret{}
	if err := c.client.Get(t.Context(), client.ObjectKey{Namespace: c.namespace, Name: secret.Name(c.name, "node-attestation")}, keys); err != nil {
		t.Fatal(err)
	}
	if keys.Type != clusterv1.ClusterSecretType || len(keys.OwnerReferences) != 1 || keys.OwnerReferences[0].UID != c.object.UID ||
		keys.Labels[clusterv1.ClusterNameLabel] != c.name {
		t.Errorf("%s: %s of type %s, labels %v, owned by %+v", c, keys.Name, keys.Type, keys.Labels, keys.OwnerReferences)
	}
	return keys.Annotations["attestation.cluster.x-k8s.io/cluster-uid"]
}

// actedAsUser checks who did what in the workload cluster, as its API server saw it.
func (c *cluster) actedAsUser(t *testing.T, since testbed.AuditMark) {
	t.Helper()
	events, err := c.workload.AuditSince(since)
	if err != nil {
		t.Fatal(err)
	}
	approvals, certificates := 0, 0
	for _, e := range events {
		if e.User == administrator && e.ImpersonatedUser != controllerUser {
			t.Errorf("as %q: %s %s", e.ImpersonatedUser, e.Verb, e.RequestURI)
		}
		if e.Resource != "certificatesigningrequests" || e.Verb != "update" && e.Verb != "patch" || e.Code >= 300 {
			continue
		}
		if e.ImpersonatedUser != controllerUser {
			t.Errorf("%s as %q: %s %s", e.User, e.ImpersonatedUser, e.Verb, e.RequestURI)
		}
		switch e.Subresource {
		case "approval":
			approvals++
		case "status":
			certificates++
		}
	}
	if approvals == 0 || certificates == 0 {
		t.Errorf("in the audit log are %d approvals and %d certificates", approvals, certificates)
	}
}
