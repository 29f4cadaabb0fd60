// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// newPreparedMachine returns one that is set up by "prepare" and a configuration file, to which
// extra is added. Its first credential is the static one.
func (c *cluster) newPreparedMachine(t *testing.T, name, extra string) *machine {
	t.Helper()
	m := c.newMachine(t, name)
	m.args = []string{"--config=" + filepath.Join(m.dir, "config.yaml")}
	m.configure(t, extra)
	m.putBootstrap(t)
	return m
}

// configure writes the plugin's configuration file.
func (m *machine) configure(t *testing.T, extra string) {
	t.Helper()
	content := fmt.Sprintf(`apiVersion: authenticator.cluster.x-k8s.io/v1alpha1
kind: KubeletAuthenticatorConfiguration
provider: tpm
tpmDevice: %s
providerID: test://machine-of-%s
nodeName: %s
certDir: %s
runtimeDir: %s
kubeletKubeconfig: %s
kubeletBootstrapKubeconfig: %s
`, m.tpm.Socket(), filepath.Base(filepath.Dir(m.tpm.Socket())), m.name, m.certs.Path(), filepath.Join(m.dir, "run"), m.kubeletConf(), m.bootstrapFile())
	if err := os.WriteFile(filepath.Join(m.dir, "config.yaml"), []byte(content+extra), 0o600); err != nil {
		t.Fatal(err)
	}
}

func (m *machine) kubeletConf() string   { return filepath.Join(m.dir, "kubelet.conf") }
func (m *machine) bootstrapFile() string { return filepath.Join(m.dir, "bootstrap-kubelet.conf") }

// putBootstrap puts the bootstrap kubeconfig where kubeadm puts it.
func (m *machine) putBootstrap(t *testing.T) {
	t.Helper()
	if err := os.WriteFile(m.bootstrapFile(), m.staticKubeconfig(t), 0o600); err != nil {
		t.Fatal(err)
	}
}

// prepare is what the kubelet's unit does before the kubelet. It must not fail.
func (m *machine) prepare(t *testing.T) {
	t.Helper()
	code, _, stderr := m.plugin(t, "prepare", "--env-file="+filepath.Join(m.dir, "kubelet-env", "kubelet.env"), "--manifests="+filepath.Join(m.dir, "manifests"))
	if code != 0 {
		t.Fatalf("prepare exits with %d: %s", code, stderr)
	}
}

// plugin runs it as a person would.
func (m *machine) plugin(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(t.Context(), built.plugin, append(args, m.args...)...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

// becomeNode prepares the machine and starts its kubelet, and, as kubeadm does, takes the bootstrap
// kubeconfig away when it is ready.
func (m *machine) becomeNode(t *testing.T) {
	t.Helper()
	m.prepare(t)
	kubeconfig, err := os.ReadFile(m.kubeletConf())
	if err != nil {
		t.Fatal(err)
	}
	m.startKubeletWith(t, kubeconfig, "")
	harness.Eventually(t, time.Minute, "the node is ready", func() bool { return m.ready(t.Context()) == "" })
	if err := os.Remove(m.bootstrapFile()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
}

const keepCredential = "keepBootstrapCredential: true\n"

// Certificates that have not expired and are of no use any more. The way back is the static
// credential.
func TestCertificateIsOfNoUse(t *testing.T) {
	t.Parallel()
	c := newCluster(t, allowStatic)
	// One after the other: the first ends the controller, the second replaces the cluster's CA.
	t.Run("renamed", func(t *testing.T) { testRenamed(t, c) })
	t.Run("client-ca-replaced", func(t *testing.T) { testClientCAReplaced(t, c) })
}

// A machine that gets another name becomes another node, once its operator agrees.
func testRenamed(t *testing.T, c *cluster) {
	before := c.newPreparedMachine(t, "before", keepCredential)
	identity := before.identity(t)
	c.admit(t, identity)
	before.becomeNode(t)
	if err := before.kubelet.Stop(); err != nil {
		t.Fatal(err)
	}
	if err := c.controller.Kill(); err != nil {
		t.Fatal(err)
	}

	after := *before
	after.name = "after"
	after.configure(t, keepCredential)
	harness.Eventually(t, 30*time.Second, "the plugin waits for the signer", func() bool {
		code, stdout, stderr := after.plugin(t, "--wait-timeout=2s")
		if code == 0 || stdout != "" {
			t.Fatalf("exit code %d, and on standard output %d bytes: %s", code, len(stdout), stderr)
		}
		return code == reason.WaitingForSigner.Code()
	})

	c.dismiss(t, identity)
	c.admit(t, after.identity(t))
	c.deleteRecord(t, before.name)
	c.startController(t)
	after.becomeNode(t)
	if leaf := after.leaf(t); leaf.Subject.CommonName != "system:node:after" {
		t.Errorf("the certificate is for %s", leaf.Subject.CommonName)
	}
	if hellos, proofs := after.requests(t); len(hellos) != 1 || len(proofs) != 1 || proofs[0].Spec.Username != staticUser {
		t.Errorf("%d hellos and %d proofs", len(hellos), len(proofs))
	}
}

// deleteRecord is the administrator's reset.
func (c *cluster) deleteRecord(t *testing.T, name string) {
	t.Helper()
	record := &v1alpha1.NodeAttestation{ObjectMeta: metav1.ObjectMeta{Namespace: controllerprocess.Namespace, Name: name}}
	if err := c.records(t).Delete(t.Context(), record); err != nil {
		t.Fatal(err)
	}
}

// The API server's client CA becomes another overnight. The kubelet lives on, and so does its node.
func testClientCAReplaced(t *testing.T, c *cluster) {
	const limit = time.Minute
	m := c.newPreparedMachine(t, "rejected", keepCredential)
	c.admit(t, m.identity(t))
	m.becomeNode(t)
	p := m.watch(t)
	harness.Eventually(t, 45*time.Second, "the node has a Lease", func() bool { return p.Count() > 0 })
	hellosBefore, proofsBefore := m.requests(t)

	began := time.Now()
	ca := c.replaceClientCA(t)
	harness.Eventually(t, limit, "the node has a certificate of the new CA", func() bool { return m.leaf(t).CheckSignatureFrom(ca.Certificate()) == nil })
	t.Logf("a new certificate after %s", time.Since(began).Round(100*time.Millisecond))
	seen := p.Count()
	harness.Eventually(t, time.Until(began.Add(limit)), "the Lease is renewed with it", func() bool { return p.Count() > seen })
	t.Logf("the Lease is renewed after %s", time.Since(began).Round(100*time.Millisecond))
	hellos, proofs := m.requests(t)
	if len(hellos) != len(hellosBefore)+1 || len(proofs) != len(proofsBefore)+1 {
		t.Errorf("%d hellos and %d proofs more", len(hellos)-len(hellosBefore), len(proofs)-len(proofsBefore))
	}
	for _, r := range append(hellos, proofs...) {
		if r.Spec.Username != staticUser {
			t.Errorf("%s: by %s", r.Name, r.Spec.Username)
		}
	}
}

// replaceClientCA has controller and API server use another CA. The administrator's certificate, of
// the old one, is trusted by itself.
func (c *cluster) replaceClientCA(t *testing.T) *testbed.CA {
	t.Helper()
	ca, err := testbed.NewCA("replaced-client-ca")
	if err != nil {
		t.Fatal(err)
	}
	key, err := ca.KeyPEM()
	if err != nil {
		t.Fatal(err)
	}
	secrets := c.Client().CoreV1().Secrets(controllerprocess.Namespace)
	secret, err := secrets.Get(t.Context(), controllerprocess.CASecret, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	secret.Data = map[string][]byte{corev1.TLSCertKey: ca.CertPEM(), corev1.TLSPrivateKeyKey: key}
	if _, err := secrets.Update(t.Context(), secret, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(c.Dir(), "client-ca.crt")
	if err := os.WriteFile(file+".new", slices.Concat(ca.CertPEM(), c.AdminConfig().CertData), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(file+".new", file); err != nil {
		t.Fatal(err)
	}
	return ca
}

// Two nodes are off until their certificates have expired. One kept a credential with which it
// comes back by itself, the other says what it lacks.
func TestCertificateExpiresWhileOff(t *testing.T) {
	t.Parallel()
	const lifetime = 30 * time.Second
	c := newCluster(t, func(c *config.Config) { approveOnly(c); allowStatic(c) })
	c.newSigner(t, lifetime)
	const extra = "signerName: " + builtinSigner + "\n"
	kept, forgotten := c.newPreparedMachine(t, "kept", extra+keepCredential), c.newPreparedMachine(t, "forgotten", extra)
	for _, m := range []*machine{kept, forgotten} {
		c.admit(t, m.identity(t))
	}
	before := map[*machine][]certificatesv1.CertificateSigningRequest{}
	for m, keeps := range map[*machine]bool{kept: true, forgotten: false} {
		m.becomeNode(t)
		if err := m.kubelet.Stop(); err != nil {
			t.Fatal(err)
		}
		harness.KillWorker(t, m.certs)
		before[m] = m.allRequests(t)
		if _, err := os.Stat(m.certs.File(cache.BootstrapFile)); (err == nil) != keeps {
			t.Errorf("%s: its copy of the bootstrap kubeconfig: %v", m.name, err)
		}
	}
	for m := range before {
		// only time lets a certificate expire
		time.Sleep(time.Until(m.leaf(t).NotAfter.Add(time.Second)))
	}

	for m := range before {
		m.prepare(t) // lets the kubelet start, with or without a certificate
		if err := m.kubelet.Start(); err != nil {
			t.Fatal(err)
		}
	}
	t.Run("kept", func(t *testing.T) {
		began := time.Now()
		p := kept.watch(t)
		harness.Eventually(t, time.Minute, "the Lease is renewed", func() bool { return p.Count() > 1 })
		t.Logf("back after %s", time.Since(began).Round(100*time.Millisecond))
		added := kept.allRequests(t)[len(before[kept]):]
		if len(added) < 2 || added[0].Spec.Username != staticUser || added[1].Spec.Username != staticUser {
			t.Errorf("%d requests more", len(added))
		}
	})
	t.Run("forgotten", func(t *testing.T) {
		code, stdout, stderr := forgotten.plugin(t)
		if code != reason.NoBootstrap.Code() || stdout != "" || !strings.Contains(stderr, "\nhint: ") {
			t.Errorf("exit code %d, and on standard output %d bytes: %s", code, len(stdout), stderr)
		}
		want := fmt.Sprintf(`rest_client_exec_plugin_call_total{call_status="plugin_execution_error",code="%d"}`, code)
		harness.Eventually(t, 30*time.Second, "the kubelet has a metric "+want, func() bool {
			metrics, err := forgotten.kubelet.Metrics(t.Context())
			return err == nil && strings.Contains(metrics, want)
		})
		if n := len(forgotten.allRequests(t)) - len(before[forgotten]); n > 0 {
			t.Errorf("%d requests more", n)
		}
		// What the hint says.
		forgotten.putBootstrap(t)
		p := forgotten.watch(t)
		harness.Eventually(t, time.Minute, "the Lease is renewed", func() bool { return p.Count() > 1 })
	})
}

// allRequests returns the machine's requests, oldest first.
func (m *machine) allRequests(t *testing.T) []certificatesv1.CertificateSigningRequest {
	t.Helper()
	hellos, proofs := m.requests(t)
	all := append(hellos, proofs...)
	slices.SortStableFunc(all, func(a, b certificatesv1.CertificateSigningRequest) int {
		return a.CreationTimestamp.Compare(b.CreationTimestamp.Time)
	})
	return all
}
