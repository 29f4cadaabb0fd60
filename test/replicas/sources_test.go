// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/sources"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// setCA replaces the CA in its Secret.
func setCA(ctx context.Context, t *testing.T, ca *testbed.CA) {
	t.Helper()
	key, err := ca.KeyPEM()
	if err != nil {
		t.Fatal(err)
	}
	secrets := shared.Client().CoreV1().Secrets(controllerprocess.Namespace)
	secret, err := secrets.Get(ctx, controllerprocess.CASecret, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	secret.Data = map[string][]byte{corev1.TLSCertKey: ca.CertPEM(), corev1.TLSPrivateKeyKey: key}
	if _, err := secrets.Update(ctx, secret, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// A CA that the API server does not trust signs nothing. The log, the metrics, the condition and an
// Event report it. A ready replica stays ready. With the right CA, the waiting machine gets its
// certificate.
func TestWrongCA(t *testing.T) {
	forgetAfterwards(t)
	wrong, err := testbed.NewCA("wrong")
	if err != nil {
		t.Fatal(err)
	}
	setCA(t.Context(), t, wrong)
	t.Cleanup(func() { setCA(context.WithoutCancel(t.Context()), t, shared.ClientCA()) })
	m := newMachines(t, "wrongca", 1)[0]
	inventoried(t, m)
	r := newReplica(t, "json", func(c *config.Config) { c.LeaderElection.Enabled = false }, "--logging-format=json")
	r.ready(t)
	condition := func(status corev1.ConditionStatus, reason string) {
		t.Helper()
		harness.Eventually(t, harness.Soon, "the condition is "+string(status)+", "+reason, func() bool {
			namespace, err := shared.Client().CoreV1().Namespaces().Get(t.Context(), controllerprocess.Namespace, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range namespace.Status.Conditions {
				if c.Type == sources.ConditionUsable {
					return c.Status == status && c.Reason == reason
				}
			}
			return false
		})
	}
	gauges := func(want ...string) {
		t.Helper()
		harness.Eventually(t, harness.Soon, "there are "+strings.Join(want, ", "), func() bool {
			metrics, err := r.Metrics(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for _, line := range want {
				if !strings.Contains(metrics, "\n"+strings.ReplaceAll(line, "{", `{cluster="7f0c64de-5d1a-4b6e-9c53-30a1c1b1e9f4"`)+"\n") {
					return false
				}
			}
			return true
		})
	}
	condition(corev1.ConditionFalse, sources.ReasonCANotTrusted)
	plugged := make(chan error, 1)
	go func() {
		_, err := m.plug(t.Context())
		plugged <- err
	}()
	gauges(`node_attestation_ca_trusted{} 0`, `node_attestation_source_usable{,source="ca"} 1`, `node_attestation_waiting_requests{,reason="SignerUnavailable"} 1`)
	harness.Eventually(t, harness.Soon, "there is an Event", func() bool {
		list, err := shared.Client().EventsV1().Events(corev1.NamespaceDefault).List(t.Context(), metav1.ListOptions{
			FieldSelector: "regarding.name=" + controllerprocess.Namespace + ",reason=" + sources.ReasonCANotTrusted,
		})
		if err != nil {
			t.Fatal(err)
		}
		return len(list.Items) > 0 && strings.Contains(list.Items[0].Note, "--client-ca-file")
	})
	for _, path := range []string{"/readyz", "/readyz?verbose"} { // no detail for a stranger
		if code, body := r.probe(t, path); code != http.StatusOK || body != "ok" {
			t.Errorf("%s: %d, %s", path, code, body)
		}
	}
	select {
	case err := <-plugged:
		t.Errorf("the machine did not wait: %v", err)
	default:
	}

	setCA(t.Context(), t, shared.ClientCA())
	if err := <-plugged; err != nil {
		t.Error(err)
	}
	condition(corev1.ConditionTrue, sources.ReasonSourcesUsable)
	gauges(`node_attestation_ca_trusted{} 1`, `node_attestation_records{} 1`, `node_attestation_machines{} 1`)
	if code, body := r.probe(t, "/readyz"); code != http.StatusOK || body != "ok" {
		t.Errorf("%d, %s", code, body)
	}
	r.stops(t)
	log, err := os.ReadFile(r.LogFile())
	if err != nil {
		t.Fatal(err)
	}
	errors := 0
	for line := range bytes.Lines(log) {
		var entry struct{ Time, Level, Msg, Logger string }
		if err := json.Unmarshal(line, &entry); err != nil || entry.Time == "" || entry.Level == "" || entry.Msg == "" {
			t.Errorf("%v: %s", err, line)
		}
		if entry.Level == "ERROR" && entry.Logger == "sources" && strings.Contains(entry.Msg, "does not trust the signing CA") {
			errors++
		}
	}
	if errors != 1 {
		t.Errorf("the log has %d errors about the CA:\n%s", errors, log)
	}
}
