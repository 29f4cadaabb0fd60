// SPDX-License-Identifier: Apache-2.0

package authorizer

import (
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/reliability"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// pace is how long each fault lasts, and how often a kubelet renews its Lease meanwhile.
type pace struct {
	fault        time.Duration
	leaseSeconds int // of which the kubelet takes a quarter as the time between two renewals
}

// A kubelet renews its Lease each 10 s. In the short run it renews it each 5 s.
var (
	shortPace = pace{fault: 6 * time.Second, leaseSeconds: 20}
	longPace  = pace{fault: time.Minute, leaseSeconds: 40}
)

// longestGap is the longest time between two renewals of the Lease, whatever fails.
const longestGap = 15 * time.Second

// wrongServers are what may listen where the authorizer should.
var wrongServers = map[string]http.HandlerFunc{
	"500":     func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) },
	"garbage": func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "<html>") },
	"redirects": func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, r.URL.Path, http.StatusTemporaryRedirect)
	},
}

// listenAt serves TLS at the authorizer's address, with its certificate, until the returned
// function is called.
func listenAt(t *testing.T, address string, serving testbed.KeyPair, handler http.Handler) (end func()) {
	t.Helper()
	certificate, err := tls.X509KeyPair(serving.CertPEM, serving.KeyPEM)
	harness.Must(t, err)
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", address)
	harness.Must(t, err)
	server := &http.Server{
		Handler: handler, TLSConfig: &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS13},
		ErrorLog: log.New(io.Discard, "", 0), ReadHeaderTimeout: time.Second,
	}
	go func() { _ = server.ServeTLS(listener, "", "") }()
	return func() { harness.Must(t, server.Close()) }
}

// configOf is a client's configuration with a certificate.
func configOf(server *testbed.APIServer, pair testbed.KeyPair) *rest.Config {
	config := server.AdminConfig()
	config.CertData, config.KeyData = pair.CertPEM, pair.KeyPEM
	return config
}

// victim is a machine with an attested certificate, and without a kubelet.
type victim struct {
	*fleet.Machine
	cluster fleet.Cluster
}

// newVictim makes a machine, and has it attest at an API server of the cluster.
func (b *bed) newVictim(t *testing.T, name string, server *testbed.APIServer) *victim {
	t.Helper()
	maker, err := swtpm.NewCA()
	harness.Must(t, err)
	m, err := fleet.NewModel(name, t.TempDir(), maker)
	harness.Must(t, err)
	t.Cleanup(m.Stop)
	entry, err := fleet.Inventory(t.Context(), m)
	harness.Must(t, err)
	b.admit(t, entry)
	token, err := b.CreateBootstrapToken(t.Context(), time.Hour)
	harness.Must(t, err)
	v := &victim{m, fleet.Cluster{URL: server.URL(), CA: b.ServerCA(), Token: token, Issuer: b.ClientCA().Certificate()}}
	v.attest(t)
	return v
}

// attest gets a certificate with the one that the victim has. The controller lets it renew, whether
// its record names that certificate, or is lost.
func (v *victim) attest(t *testing.T) {
	t.Helper()
	if _, err := v.Attest(t.Context(), v.cluster); err != nil {
		t.Fatal(err)
	}
}

// credential is the victim's present certificate.
func (v *victim) credential() harness.Credential {
	return harness.Credential{Node: v.Name, Config: v.Credential(v.cluster)}
}

// try returns functions that read and write with the victim's present certificate.
func (v *victim) try(t *testing.T) (read, write func() error) {
	t.Helper()
	return try(t, v.credential())
}

// try returns functions that read and write with a certificate.
func try(t *testing.T, c harness.Credential) (read, write func() error) {
	t.Helper()
	api := c.Client(t)
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: c.Node}}
	return func() error {
			_, err := api.CoreV1().Services("").List(t.Context(), metav1.ListOptions{})
			return err
		}, func() error {
			_, err := api.CoordinationV1().Leases(corev1.NamespaceNodeLease).Create(t.Context(), lease, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			return err
		}
}

// forged returns a certificate of a node, as a thief of the CA's key makes it.
func (b *bed) forged(t *testing.T, node string, server *testbed.APIServer) harness.Credential {
	t.Helper()
	pair, err := b.ClientCA().IssueClient("system:node:"+node, []string{"system:nodes"}, time.Now().Add(-time.Minute), time.Now().Add(time.Hour))
	harness.Must(t, err)
	return harness.Credential{Node: node, Config: configOf(server, pair)}
}

// An authorizer is down, hangs, or another program answers in its place: none of that takes a node
// down. While there is no authorizer, a revoked certificate reads. After a restart it does not,
// also where the authorizer cannot read the API server, and its list is a day old.
func TestNodeOutlivesItsAuthorizer(t *testing.T) {
	t.Parallel()
	at := reliability.Size(t, "authorizer", shortPace, longPace)
	server, authorizer := shared.servers[2], shared.authorizers[2]
	v := shared.newVictim(t, "victim", server)
	stolen, stolenWrite := v.try(t)
	harness.Must(t, errors.Join(stolen(), stolenWrite()))
	harness.NextSecond()
	revoke(t, v.Name)
	harness.Eventually(t, refusedIn, "the stolen certificate is refused", func() bool { return harness.IsRefused(stolen(), attestation.MessageRevoked) })

	const name = "outlives"
	pair, err := shared.ClientCA().IssueClient("system:node:"+name, []string{"system:nodes"}, time.Now().Add(-time.Minute), time.Now().Add(time.Hour))
	harness.Must(t, err)
	kubelet, err := testbed.StartKubelet(t.Context(), testbed.KubeletOptions{
		Components: built.Kubelet, NodeName: name, Kubeconfig: server.Kubeconfig(testbed.CertificateUser(pair)),
		Config: fmt.Sprintf("nodeLeaseDurationSeconds: %d\n", at.leaseSeconds),
	})
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, kubelet.Remove()) })
	p := harness.WatchNode(t, server.Client(), name)
	harness.Eventually(t, time.Minute, "the node is ready, and has a Lease", func() bool {
		why, err := harness.NotReady(t.Context(), server.Client(), name)
		return err == nil && why == "" && p.Count() > 0
	})
	p.Stop()
	p = harness.WatchNode(t, server.Client(), name) // it was not ready at first

	// 1. It accepts connections, and does not answer.
	harness.Must(t, authorizer.Pause())
	time.Sleep(at.fault)
	harness.Must(t, authorizer.Resume())

	// 2. It is down. Only the policies refuse the thief then.
	harness.Must(t, authorizer.Kill())
	if err := stolen(); err != nil {
		t.Errorf("while the authorizer is down, the stolen certificate may read: %v", err)
	}
	if err := stolenWrite(); !harness.IsRefused(err, attestation.MessageRevoked) {
		t.Errorf("while the authorizer is down, the policies do not refuse the stolen certificate: %v", err)
	}
	time.Sleep(at.fault)

	// 3. Another program answers. The API server tries again after 500, for 4.5 s.
	own := harness.Credential{Node: name, Config: configOf(server, pair)}.Client(t)
	for what, handler := range wrongServers {
		end := listenAt(t, authorizer.Addr(), authorizer.Serving, handler)
		began := time.Now()
		_, err := own.CoreV1().Nodes().Get(t.Context(), name, metav1.GetOptions{})
		harness.Must(t, err)
		t.Logf("a read of the node, while another program answers (%s): %s", what, time.Since(began).Round(time.Millisecond))
		if what == "500" {
			time.Sleep(at.fault)
		}
		end()
	}

	// 4. It starts again with a list of a day ago. It cannot reach the API server.
	age(t, authorizer.StateFile(), 24*time.Hour)
	nobody, err := testbed.TakePort()
	harness.Must(t, err)
	defer nobody.Free()
	cutOff := shared.Kubeconfig(testbed.CertificateUser(pair), testbed.WithServer("https://"+nobody.Addr()))
	harness.Must(t, authorizer.Start(t.Context(), cutOff))
	if err := stolen(); !harness.IsRefused(err, attestation.MessageRevoked) {
		t.Errorf("with a list of a day ago, the stolen certificate is not refused: %v", err)
	}
	metrics, err := authorizer.Metrics(t.Context())
	harness.Must(t, err)
	_, after, _ := strings.Cut(metrics, "\nnode_attestation_authorizer_list_age_seconds ")
	value, _, _ := strings.Cut(after, "\n")
	if seconds, err := strconv.ParseFloat(value, 64); err != nil || seconds < (24*time.Hour).Seconds() {
		t.Errorf("the metrics say that the list is %q seconds old, which is not a day (%v)", value, err)
	}
	// The victim comes back meanwhile. Its new certificate is in no list that this authorizer has.
	v.attest(t)
	read, write := v.try(t)
	if err := errors.Join(read(), write()); err != nil {
		t.Errorf("the certificate with which the node came back: %v", err)
	}
	if err := stolen(); !harness.IsRefused(err, attestation.MessageRevoked) {
		t.Errorf("after the node is back, the stolen certificate is not refused: %v", err)
	}
	time.Sleep(at.fault)

	// 5. It reaches the API server again.
	harness.Must(t, authorizer.Kill())
	harness.Must(t, shared.startAuthorizer(t.Context(), 2))
	if err := errors.Join(read(), write()); err != nil {
		t.Errorf("the certificate with which the node came back: %v", err)
	}
	if err := stolen(); !harness.IsRefused(err, attestation.MessageRevoked) {
		t.Errorf("after the last restart, the stolen certificate is not refused: %v", err)
	}
	p.Stop()
	p.Steady(t, longestGap, time.Now())
}

// age has a state file say that its lists were read some time earlier.
func age(t *testing.T, file string, by time.Duration) {
	t.Helper()
	content, err := os.ReadFile(file)
	harness.Must(t, err)
	var fields map[string]json.RawMessage
	harness.Must(t, json.Unmarshal(content, &fields))
	var upToDateAt time.Time
	harness.Must(t, json.Unmarshal(fields["upToDateAt"], &upToDateAt))
	fields["upToDateAt"], err = json.Marshal(upToDateAt.Add(-by))
	harness.Must(t, err)
	content, err = json.Marshal(fields)
	harness.Must(t, err)
	harness.WriteFile(t, file, content)
}
