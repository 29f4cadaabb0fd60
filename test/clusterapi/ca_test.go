// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"encoding/json"
	"encoding/pem"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/sources"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// caInterval is how soon another CA is used.
const caInterval = 15 * time.Second

// While a CA is rotated, <cluster>-ca has the certificates of both. The key decides which one
// signs, whatever the order of the certificates. A key that belongs to none of them signs nothing,
// and neither does a CA that the cluster's API server does not trust. The latter is reported in the
// cluster, and on the Cluster.
func TestCARotation(t *testing.T) {
	t.Parallel()
	w := newWorld(t, shared.management)
	c := w.newCluster(t, "workload", nil)
	w.start(t, nil)
	m := c.newMachine(t, "m", nil)
	m.attests(t)
	before := c.workload.ClientCA()
	m.signedBy(t, before)
	after, err := testbed.NewCA("after")
	if err != nil {
		t.Fatal(err)
	}
	set := func(signer *testbed.CA, certificates ...*testbed.CA) {
		t.Helper()
		key, err := signer.KeyPEM()
		if err != nil {
			t.Fatal(err)
		}
		var bundle []byte
		for _, ca := range certificates {
			bundle = append(bundle, ca.CertPEM()...)
		}
		update(t, c.client, c.ca, func(ca *corev1.Secret) {
			ca.Data = map[string][]byte{secret.TLSCrtDataName: bundle, secret.TLSKeyDataName: key}
		})
	}
	again := func() *attempt {
		m.certificate = nil // also where it may be of the CA that is next
		return m.begins(t)
	}
	stranger, err := testbed.NewCA("stranger")
	if err != nil {
		t.Fatal(err)
	}
	set(stranger, stranger)
	time.Sleep(time.Second)                // the CA is half a second old at most
	other := c.newMachine(t, "other", nil) // each machine has a rate
	waiting := other.begins(t)
	harness.Eventually(t, harness.Soon, "the condition says that the CA is not trusted", func() bool {
		condition := conditionOf(t, c.workload.client, sources.ConditionUsable)
		return condition.Status == corev1.ConditionFalse && condition.Reason == sources.ReasonCANotTrusted
	})
	harness.Eventually(t, harness.Soon, "an Event on the Cluster says so", func() bool {
		list := &eventsv1.EventList{}
		if err := w.client.List(t.Context(), list, client.InNamespace(w.namespace)); err != nil {
			t.Fatal(err)
		}
		return slices.ContainsFunc(list.Items, func(e eventsv1.Event) bool {
			return e.Regarding.Kind == "Cluster" && e.Reason == sources.ReasonCANotTrusted
		})
	})
	waiting.waits(t, 0)
	set(before, before)
	waiting.ends(t)
	other.signedBy(t, before)
	harness.Eventually(t, harness.Soon, "the condition says that it is", func() bool {
		return conditionOf(t, c.workload.client, sources.ConditionUsable).Status == corev1.ConditionTrue
	})
	c.workload.trusts(t, before, after)
	for _, step := range []struct {
		what         string
		signer       *testbed.CA
		certificates []*testbed.CA
	}{
		{"the new one behind the old one", after, []*testbed.CA{before, after}},
		{"back, the old one behind the new one", before, []*testbed.CA{after, before}},
		{"the new one in front of the old one", after, []*testbed.CA{after, before}},
		{"the new one alone", after, []*testbed.CA{after}},
	} {
		t.Run(step.what, func(t *testing.T) {
			set(step.signer, step.certificates...)
			since := time.Now()
			harness.Eventually(t, caInterval, "it signs", func() bool {
				again().ends(t)
				return m.issuer(t) == step.signer.Certificate().Subject.CommonName
			})
			t.Logf("after %s", time.Since(since).Round(time.Millisecond))
			m.signedBy(t, step.signer)
		})
	}
	// With the key of another CA, the last known good pair is used.
	set(before, after)
	time.Sleep(caInterval) // it is read meanwhile, and not used
	again().ends(t)
	m.signedBy(t, after)
	set(before, before)
	harness.Eventually(t, caInterval, "it signs", func() bool {
		again().ends(t)
		return m.issuer(t) == before.Certificate().Subject.CommonName
	})
	m.signedBy(t, before)
}

// trusts makes the API server trust these CAs for clients, until the test ends.
func (w *workload) trusts(t *testing.T, all ...*testbed.CA) {
	t.Helper()
	path := filepath.Join(w.Dir(), "client-ca.crt")
	write := func(all ...*testbed.CA) {
		var bundle []byte
		for _, ca := range all {
			bundle = append(bundle, ca.CertPEM()...)
		}
		if err := errors.Join(os.WriteFile(path+".new", bundle, 0o600), os.Rename(path+".new", path)); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { write(w.ClientCA()) })
	write(all...)
	last := string(all[len(all)-1].CertPEM())
	harness.Eventually(t, 90*time.Second, "the API server trusts them", func() bool {
		published, err := w.Client().CoreV1().ConfigMaps("kube-system").Get(t.Context(), "extension-apiserver-authentication", metav1.GetOptions{})
		return err == nil && strings.Contains(published.Data["client-ca-file"], strings.TrimSpace(last))
	})
}

// issuer returns the common name of the issuer of the machine's certificate.
func (m *machine) issuer(t *testing.T) string {
	t.Helper()
	_, leaf, err := csr.ParseCertificates(m.certificate)
	if err != nil {
		t.Fatal(err)
	}
	return leaf.Issuer.CommonName
}

func (m *machine) signedBy(t *testing.T, ca *testbed.CA) {
	t.Helper()
	_, leaf, err := csr.ParseCertificates(m.certificate)
	if err != nil {
		t.Fatal(err)
	}
	if err := leaf.CheckSignatureFrom(ca.Certificate()); err != nil {
		t.Error(err)
	}
}

// The key of a cluster's CA is kept elsewhere. The controller approves the requests, and another
// signer issues. The operator has added that signer to the policy. Here the controller's own user
// plays the signer. The record knows what was issued.
func TestExternalCA(t *testing.T) {
	t.Parallel()
	w := newWorld(t, shared.management)
	w.start(t, nil)
	c := w.newCluster(t, "external", func(c *cluster) { delete(c.ca.Data, secret.TLSKeyDataName) })
	other := w.newCluster(t, "internal", nil)
	m := c.newMachine(t, "m", nil)
	_, proof := m.peer(t).attests(t)
	harness.Eventually(t, harness.Soon, "it is approved", func() bool { return approved(c.get(t, proof.Name)) })
	other.newMachine(t, "other", nil).attests(t)
	time.Sleep(2 * time.Second) // nothing may be issued without a key
	if got := c.get(t, proof.Name); len(got.Status.Certificate) > 0 || reasonOf(got) != "" {
		t.Fatalf("%+v", got.Status)
	}

	config := c.workload.AdminConfig()
	config.Impersonate.UserName = controllerUser
	signer, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(proof.Spec.Request)
	certificate, err := c.workload.ClientCA().SignCSR(block.Bytes, time.Now().Add(-time.Minute), time.Now().Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	patch, err := json.Marshal(map[string]any{"status": map[string]any{"certificate": certificate}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := signer.CertificatesV1().CertificateSigningRequests().Patch(t.Context(), proof.Name, types.MergePatchType, patch, metav1.PatchOptions{}, "status"); err != nil {
		t.Fatal(err)
	}
	fingerprint, err := signing.Fingerprint(certificate)
	if err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, harness.Soon, "the certificate is noted", func() bool {
		for _, noted := range m.record(t, m.name).Status.Certificates {
			if noted.SHA256 == fingerprint && noted.Noted {
				return true
			}
		}
		return false
	})
	m.remembered(t)
}

func approved(r *certificatesv1.CertificateSigningRequest) bool {
	return slices.ContainsFunc(r.Status.Conditions, func(c certificatesv1.CertificateSigningRequestCondition) bool {
		return c.Type == certificatesv1.CertificateApproved
	})
}
