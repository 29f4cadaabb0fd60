// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/decisionlog"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// A replica starts without its inputs, and logs what is missing. When it has them, it is ready,
// decides, and writes a decision record. It ends on a signal, and releases the Lease.
func TestOneReplica(t *testing.T) {
	forgetAfterwards(t)
	ca := without(t)
	decisions := filepath.Join(t.TempDir(), "decisions.jsonl")
	r := newReplica(t, "first", func(c *config.Config) { c.DecisionLog = config.DecisionLog{File: decisions, Archive: true} })
	r.start(t)
	harness.Eventually(t, harness.Soon, "it is healthy", func() bool { code, _ := r.probe(t, "/healthz"); return code == http.StatusOK })
	lacks := func(missing ...string) {
		t.Helper()
		harness.Eventually(t, harness.Soon, "not ready, for want of "+strings.Join(missing, ", "), func() bool {
			code, body := r.probe(t, "/readyz")
			if code == http.StatusOK {
				return len(missing) == 0 && body == "ok"
			}
			return body == "not ready\n" && slices.Equal(r.blocking(t), missing)
		})
	}
	secrets := shared.Client().CoreV1().Secrets(controllerprocess.Namespace)
	lacks("ca", "challenge-keys", "inventory")
	if _, err := secrets.Create(t.Context(), ca, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	lacks("challenge-keys", "inventory")
	m := newMachines(t, "one", 1)[0]
	inventoried(t, m)
	lacks("challenge-keys")
	setKeys(t.Context(), t, nil)
	lacks()

	// A counter exists from the first decision on.
	if counted := r.decisions(t); counted != "" {
		t.Errorf("decisions were counted before there was one: %s", counted)
	}
	o := observe(t)
	if _, err := m.plug(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := `node_attestation_decisions_total{class="first",cluster="7f0c64de-5d1a-4b6e-9c53-30a1c1b1e9f4",outcome="Approve",reason="Attested",signer="` + tpm.SignerName + `"} 1`
	if counted := r.decisions(t); !strings.Contains(counted, want+"\n") {
		t.Errorf("no %s in:\n%s", want, counted)
	}
	if n := eachHasOneRecord(t, []*machine{m}, o.eachSignedOnce(t)); n != 0 {
		t.Errorf("%d certificates are noted that nobody has", n)
	}

	// The controller writes the decision's record after it has published the certificate.
	written := "node_attestation_decision_records_written_total{sink=\"file\"} 1\n"
	harness.Eventually(t, time.Second, "it counts "+written, func() bool {
		metrics, err := r.Metrics(t.Context())
		return err == nil && strings.Contains(metrics, written)
	})
	r.stops(t)
	line, err := os.ReadFile(decisions)
	if err != nil {
		t.Fatal(err)
	}
	record, err := decisionlog.Parse(line)
	if err != nil {
		t.Fatal(err)
	}
	if record.Outcome != decisionlog.Issued || record.Node.Name != m.Name || record.Cluster.UID != "7f0c64de-5d1a-4b6e-9c53-30a1c1b1e9f4" || record.Archive == nil ||
		record.Controller.Version == "" || record.Controller.Identity == "" {
		t.Errorf("%+v", record)
	}
	if who := holder(t); who != "" {
		t.Errorf("the Lease is %s's", who)
	}

	// A standby replica takes over at its next check of the Lease.
	r.ready(t)
	harness.Eventually(t, harness.Soon, "it leads", func() bool { return r.leads(t.Context()) })
	second := newReplica(t, "second", nil)
	second.ready(t)
	harness.Never(t, time.Second, "both lead", func() bool { return second.leads(t.Context()) })
	r.stops(t)
	began := time.Now()
	took, err := m.attest(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("the next one led after %s", took)
	if took > takeover || !second.leads(t.Context()) {
		t.Errorf("a renewal took %s after the leader had stopped; the second one leads: %t", time.Since(began), second.leads(t.Context()))
	}
	second.stops(t)
}

// takeover is the time until a standby replica leads after the Lease was released.
// The replica looks every 2 to 4.4 s (client-go's leader election: RetryPeriod, and JitterFactor
// 1.2 beside it). The rest is slack for a busy machine. A Lease that was not given back costs 15 s
// from its last renewal, and up to the next look.
const takeover = 14 * time.Second

// without removes the CA and the inventory, and makes the challenge keys invalid. It restores all
// of them after the test. It returns the CA.
func without(t *testing.T) *corev1.Secret {
	t.Helper()
	core := shared.Client().CoreV1()
	secrets, maps := core.Secrets(controllerprocess.Namespace), core.ConfigMaps(controllerprocess.Namespace)
	found, err := secrets.Get(t.Context(), controllerprocess.CASecret, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ca := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: found.Name}, Type: found.Type, Data: found.Data}
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		if _, err := secrets.Get(ctx, ca.Name, metav1.GetOptions{}); err != nil {
			if _, err := secrets.Create(ctx, ca, metav1.CreateOptions{}); err != nil {
				t.Error(err)
			}
		}
		setKeys(ctx, t, nil)
	})
	if err := errors.Join(
		secrets.Delete(t.Context(), ca.Name, metav1.DeleteOptions{}),
		maps.Delete(t.Context(), controllerprocess.Inventory, metav1.DeleteOptions{}),
	); err != nil {
		t.Fatal(err)
	}
	setKeys(t.Context(), t, map[string][]byte{"current": []byte("none")})
	return ca
}

// setKeys replaces the content of the Secret with the challenge keys. Of nil the controller makes a
// key.
func setKeys(ctx context.Context, t *testing.T, data map[string][]byte) {
	t.Helper()
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: keySecret}, Data: data}
	if _, err := shared.Client().CoreV1().Secrets(controllerprocess.Namespace).Update(ctx, secret, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// stops ends the replica as a pod is ended.
func (r *replica) stops(t *testing.T) {
	t.Helper()
	began := time.Now()
	if err := r.Stop(); err != nil { // the exit code counts, too
		t.Fatalf("replica %s: %v", r.name, err)
	}
	took := time.Since(began)
	t.Logf("replica %s stopped within %s", r.name, took)
	if took > 5*time.Second {
		t.Error("that is too long")
	}
}

// blocking are the checks that end readiness, by the log's newest entry about them.
func (r *replica) blocking(t *testing.T) []string {
	t.Helper()
	log, err := os.ReadFile(r.LogFile())
	if err != nil {
		t.Fatal(err)
	}
	_, names, _ := strings.Cut(string(log[max(0, bytes.LastIndex(log, []byte(`"readiness" `))):]), ` blocking=["`)
	names, _, _ = strings.Cut(names, `"]`)
	return strings.Split(names, `","`)
}

// probe sends a kubelet's probe.
func (r *replica) probe(t *testing.T, path string) (code int, body string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, strings.TrimSuffix(r.ReadyURL(), "/readyz")+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, err.Error()
	}
	defer func() { _ = answer.Body.Close() }()
	content, err := io.ReadAll(answer.Body)
	if err != nil {
		return 0, err.Error()
	}
	return answer.StatusCode, string(content)
}

// decisions returns the counters of decisions.
func (r *replica) decisions(t *testing.T) string {
	t.Helper()
	metrics, err := r.Metrics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var counters strings.Builder
	for line := range strings.Lines(metrics) {
		if strings.HasPrefix(line, "node_attestation_decisions_total{") {
			counters.WriteString(line)
		}
	}
	return counters.String()
}
