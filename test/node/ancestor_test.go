// SPDX-License-Identifier: Apache-2.0

package node

import (
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-tpm/tpm2"
	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// ancestorVariable has the path of a gke-exec-auth-plugin, last in kubernetes/cloud-provider-gcp
// before a2b8833f0.
const ancestorVariable = "GKE_EXEC_AUTH_PLUGIN"

const (
	day = 24 * time.Hour
	// abandoned is how long nobody signs: enough for kube-controller-manager to give up a node
	// without a heartbeat (50 s, looked at each 5 s).
	abandoned = 75 * time.Second
)

// The signer is down while the certificate is due and valid for another day, and the kubelet calls
// its plugin. The ancestor waits for the new certificate, and its node is lost; ours hands out the
// old one. The kubelet is restarted to have it call: by itself it calls the ancestor each hour, for
// that is how long its answers hold.
func TestAncestorBlocks(t *testing.T) {
	t.Parallel()
	ancestor := os.Getenv(ancestorVariable)
	if ancestor == "" {
		t.Skip(ancestorVariable + " names no gke-exec-auth-plugin to compare with. It is not built here: " +
			"kubernetes/cloud-provider-gcp has removed it, and its module is not published")
	}
	c := newCluster(t, nil)
	c.watchNodes(t)
	if err := c.controller.Kill(); err != nil {
		t.Fatal(err)
	}
	t.Run("gke-exec-auth-plugin", func(t *testing.T) { t.Parallel(); testAncestorBlocks(t, c, ancestor) })
	t.Run("kubelet-authenticator", func(t *testing.T) { t.Parallel(); testOursDoesNot(t, c) })
}

func testAncestorBlocks(t *testing.T, c *cluster, ancestor string) {
	// It knows no other name for its node.
	name, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	m := c.newMachine(t, name)
	google := m.newMetadata(t)
	args := []string{"--cache-dir=" + m.certs.Path(), "--tpm-path=" + newGoogleTPM(t).Socket()}
	env := map[string]string{"GCE_METADATA_HOST": google.address}
	kubeconfig := m.ExecKubeconfig("client.authentication.k8s.io/v1beta1", ancestor, args, env, false)
	p, pair := m.restartWhenDue(t, kubeconfig, func(pair testbed.KeyPair) {
		for name, content := range map[string][]byte{"kubelet-client.crt": pair.CertPEM, "kubelet-client.key": pair.KeyPEM} {
			if err := os.WriteFile(filepath.Join(m.certs.Path(), name), content, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	})
	log, err := os.ReadFile(m.kubelet.LogFile())
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("the plugin says:\n%s", strings.Join(pluginLine.FindAllString(string(log), -1), "\n"))
	select {
	case called := <-google.asked:
		t.Logf("the plugin's first call has been hanging for %s at least", time.Since(called).Round(10*time.Millisecond))
	default:
		t.Error("the plugin did not get as far as asking for a certificate")
	}
	if total, _ := m.calls(t); total > 0 {
		t.Errorf("%d calls of the plugin have ended since the kubelet was restarted", total)
	}
	_, requests := m.requests(t)
	if len(requests) != 1 || !pending(requests[0]) {
		t.Errorf("%d requests, not one that is pending", len(requests))
	}
	gap, ready := p.Longest(time.Now()), m.ready(t.Context())
	t.Logf("no renewal of the Lease for %s; the node's condition Ready is %s", gap.Round(10*time.Millisecond), ready)
	if gap < abandoned || ready == "" {
		t.Errorf("the Lease was not renewed for %s only, and the node is %q", gap, ready)
	}
	// All the while it had a certificate that the API server takes.
	own := filepath.Join(m.dir, "own.kubeconfig")
	if err := m.WriteKubeconfig(own, testbed.CertificateUser(pair)); err != nil {
		t.Fatal(err)
	}
	if _, err := m.RunKubectl(t.Context(), own, "get", "node", m.name); err != nil {
		t.Error(err)
	}
}

// pluginLine is a line of the ancestor's in the kubelet's log.
var pluginLine = regexp.MustCompile(`(?m)^[IWEF]\d.* (cache|main|request|tpm)\.go:\d+\] .*$`)

func testOursDoesNot(t *testing.T, c *cluster) {
	m := c.newMachine(t, "ours")
	kubeconfig := m.ExecKubeconfig("client.authentication.k8s.io/v1", built.plugin, m.args, nil, true)
	p, _ := m.restartWhenDue(t, kubeconfig, func(pair testbed.KeyPair) {
		content, err := (&cache.Pair{Chain: pair.CertPEM, Key: pair.KeyPEM}).Marshal()
		if err == nil {
			err = m.certs.Write(cache.CurrentFile, content)
		}
		if err != nil {
			t.Fatal(err)
		}
	})
	p.Stop()
	p.Steady(t, maxGap, time.Now())
	total, failed := m.calls(t)
	t.Logf("%d calls of the plugin since the kubelet was restarted", total)
	if total == 0 || failed > 0 {
		t.Errorf("%d of %d calls of the plugin failed", failed, total)
	}
	hellos, proofs := m.requests(t)
	if len(hellos) != 1 || !pending(hellos[0]) || len(proofs) > 0 {
		t.Errorf("%d hellos, not one that is pending, and %d proofs", len(hellos), len(proofs))
	}
}

// restartWhenDue starts the kubelet with a certificate that is not due. When the node is ready, it
// restarts the kubelet with a certificate that both plugins would renew. The ancestor renews after
// ten days, ours in the last tenth to three tenths of the lifetime. It returns after abandoned.
func (m *machine) restartWhenDue(t *testing.T, kubeconfig []byte, install func(testbed.KeyPair)) (*harness.Pulse, testbed.KeyPair) {
	t.Helper()
	if err := m.certs.Create(); err != nil {
		t.Fatal(err)
	}
	install(m.issue(t, day, 300*day))
	m.startKubeletWith(t, kubeconfig, "")
	harness.Eventually(t, time.Minute, "the node is ready", func() bool { return m.ready(t.Context()) == "" })
	p := m.watch(t)
	harness.Eventually(t, 45*time.Second, "the Lease is renewed", func() bool { return p.Count() > 1 })
	if hellos, others := m.requests(t); len(hellos)+len(others) > 0 {
		t.Fatal("there are requests for a certificate that is not due")
	}
	if err := m.kubelet.Stop(); err != nil {
		t.Fatal(err)
	}
	due := m.issue(t, 11*day, day)
	install(due)
	if err := m.kubelet.Start(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(abandoned) // the node's pulse of this time is what is compared
	return p, due
}

// issue makes the node a certificate that is so old, and valid for so much longer.
func (m *machine) issue(t *testing.T, age, left time.Duration) testbed.KeyPair {
	t.Helper()
	now := time.Now()
	pair, err := m.ClientCA().IssueClient("system:node:"+m.name, []string{"system:nodes"}, now.Add(-age), now.Add(left))
	if err != nil {
		t.Fatal(err)
	}
	return pair
}

func pending(r certificatesv1.CertificateSigningRequest) bool {
	return len(r.Status.Conditions) == 0 && len(r.Status.Certificate) == 0
}

// metadata stands in for Google's metadata server.
type metadata struct {
	address string
	// has when the plugin first looked for the credential with which it asks for a certificate
	asked chan time.Time
}

// newMetadata serves what the ancestor asks for, until the test ends.
func (m *machine) newMetadata(t *testing.T) metadata {
	t.Helper()
	now := time.Now()
	bootstrap, err := m.ClientCA().IssueClient("kubelet", []string{testbed.BootstrapGroup}, now.Add(-time.Hour), now.Add(day))
	if err != nil {
		t.Fatal(err)
	}
	ca := filepath.Join(m.dir, "ca.crt")
	if err := os.WriteFile(ca, m.ServerCA(), 0o600); err != nil {
		t.Fatal(err)
	}
	const kubeEnv = "instance/attributes/kube-env"
	answers := map[string]string{
		"project/numeric-project-id": "1", "project/project-id": "testbed",
		"instance/zone": "projects/1/zones/nowhere", "instance/id": "1", "instance/name": m.name,
		kubeEnv: fmt.Sprintf("TPM_BOOTSTRAP_CERT: %s\nTPM_BOOTSTRAP_KEY: %s\nKUBERNETES_MASTER_NAME: %s\nCA_FILE_PATH: %s\n",
			base64.StdEncoding.EncodeToString(bootstrap.CertPEM), base64.StdEncoding.EncodeToString(bootstrap.KeyPEM),
			strings.TrimPrefix(m.ServerURL(), "https://"), ca),
	}
	asked := make(chan time.Time, 1)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		path := strings.TrimPrefix(r.URL.Path, "/computeMetadata/v1/")
		if path == kubeEnv {
			select {
			case asked <- time.Now():
			default:
			}
		}
		answer, ok := answers[path]
		if !ok {
			http.NotFound(w, r)
			return
		}
		_, _ = w.Write([]byte(answer))
	}))
	t.Cleanup(server.Close)
	return metadata{address: server.Listener.Addr().String(), asked: asked}
}

// newGoogleTPM starts a TPM as Google's machines have it: NV has the template of an attestation
// key, an RSA key.
func newGoogleTPM(t *testing.T) *swtpm.TPM {
	t.Helper()
	tpm := swtpm.Start(t, swtpm.Options{})
	key := template.AK()
	key.Type = tpm2.TPMAlgRSA
	key.Parameters = tpm2.NewTPMUPublicParms(tpm2.TPMAlgRSA, &tpm2.TPMSRSAParms{
		Scheme: tpm2.TPMTRSAScheme{
			Scheme:  tpm2.TPMAlgRSASSA,
			Details: tpm2.NewTPMUAsymScheme(tpm2.TPMAlgRSASSA, &tpm2.TPMSSigSchemeRSASSA{HashAlg: tpm2.TPMAlgSHA256}),
		},
		KeyBits: 2048,
	})
	key.Unique = tpm2.NewTPMUPublicID(tpm2.TPMAlgRSA, &tpm2.TPM2BPublicKeyRSA{Buffer: make([]byte, 256)})
	if err := tpm.WriteNV(0x01c10001, tpm2.Marshal(key)); err != nil {
		t.Fatal(err)
	}
	// The first use of a key without noDA since boot may be answered with TPM_RC_RETRY, at which
	// the ancestor gives up. So this is it.
	key.ObjectAttributes.NoDA = false
	made, err := tpm2.CreatePrimary{PrimaryHandle: tpm2.TPMRHEndorsement, InPublic: tpm2.New2B(key)}.Execute(tpm.Transport())
	if err != nil {
		t.Fatal(err)
	}
	handle := tpm2.AuthHandle{Handle: made.ObjectHandle, Name: made.Name, Auth: tpm2.PasswordAuth(nil)}
	certify := tpm2.Certify{ObjectHandle: handle, SignHandle: handle, InScheme: tpm2.TPMTSigScheme{Scheme: tpm2.TPMAlgNull}}
	if _, err := certify.Execute(tpm.Transport()); err != nil && !errors.Is(err, tpm2.TPMRCRetry) {
		t.Fatal(err)
	}
	if _, err := (tpm2.FlushContext{FlushHandle: made.ObjectHandle}).Execute(tpm.Transport()); err != nil {
		t.Fatal(err)
	}
	return tpm
}
