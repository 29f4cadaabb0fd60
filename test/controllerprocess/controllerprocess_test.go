// SPDX-License-Identifier: Apache-2.0

package controllerprocess

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/hostiletext"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// The binary starts on the rights that the manifests give it, survives a crash, and ends as told.
func TestStartKillStop(t *testing.T) {
	cp, err := testbed.Start(t.Context(), testbed.Options{Progress: os.Stderr})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cp.Stop(); err != nil {
			t.Error(err)
		}
	})
	binary := filepath.Join(t.TempDir(), "controller")
	if err := Build(t.Context(), "../..", binary); err != nil {
		t.Fatal(err)
	}
	hostile := fileHostileRequests(t, cp)
	if err := Install(t.Context(), cp, "../.."); err != nil {
		t.Fatal(err)
	}
	c, err := New(Options{ControlPlane: cp, Dir: t.TempDir(), Binary: binary, Configure: func(c *config.Config) { c.LeaderElection.Enabled = false }})
	if err != nil {
		t.Fatal(err)
	}
	start := func() {
		t.Helper()
		if err := c.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := c.Ready(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	start()
	if err := c.Start(t.Context()); err == nil {
		t.Error("it was started twice")
	}
	awaitDecisions(t, cp, hostile)
	metrics, err := c.Metrics(t.Context())
	if err != nil || !strings.Contains(metrics, "rest_client_requests_total") {
		t.Errorf("%v: %s", err, metrics)
	}
	log, err := os.ReadFile(c.LogFile())
	if err != nil || !strings.Contains(string(log), `"decided"`) {
		t.Errorf("%v: %s", err, log)
	}
	for _, problem := range append(hostiletext.Find(metrics), hostiletext.FindUnquoted(string(log))...) {
		t.Error(problem)
	}
	if err := c.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := c.Ready(t.Context()); err == nil {
		t.Error("a killed process is ready")
	}
	start()
	if err := c.Stop(); err != nil {
		t.Fatal(err)
	}
	if log, err := os.ReadFile(c.LogFile()); err != nil || strings.Count(string(log), `"starting"`) != 2 || strings.Contains(string(log), "forbidden") {
		t.Errorf("not two starts, or a right is missing: %v\n%s", err, log)
	}
	if err := os.WriteFile(c.ConfigFile(), []byte("kind: Other\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := c.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	<-c.Process().Done()
	if err := c.Stop(); err == nil || !strings.Contains(err.Error(), "exit status 10") {
		t.Errorf("an exit code of 10 is reported as %v", err)
	}
}

// fileHostileRequests files requests with hostile text wherever the API server takes it. It does so
// as a bootstrap token and before the policies are there, which refuse such names.
func fileHostileRequests(t *testing.T, cp *testbed.ControlPlane) (names []string) {
	t.Helper()
	impersonated := rest.CopyConfig(cp.AdminConfig())
	impersonated.Impersonate = rest.ImpersonationConfig{UserName: "system:bootstrap:abcdef", Groups: []string{"system:bootstrappers", "system:authenticated"}}
	clients, err := kubernetes.NewForConfig(impersonated)
	if err != nil {
		t.Fatal(err)
	}
	if err := cp.BindGroup(t.Context(), "hostile", "system:node-bootstrapper", "system:bootstrappers"); err != nil {
		t.Fatal(err)
	}
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	for _, signer := range []string{attestation.HelloSignerName, tpm.SignerName} {
		text := strings.NewReplacer("/", "", "%", "").Replace(hostiletext.For(signer)) // no name has these
		der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
			Subject: pkix.Name{CommonName: "system:node:" + text, Organization: []string{"system:nodes", text}},
		}, key)
		if err != nil {
			t.Fatal(err)
		}
		object := &certificatesv1.CertificateSigningRequest{
			ObjectMeta: metav1.ObjectMeta{Name: text, Annotations: map[string]string{attestation.AnnotationChallenge: text, attestation.AnnotationWaiting: text}},
			Spec: certificatesv1.CertificateSigningRequestSpec{
				SignerName: signer, Usages: []certificatesv1.KeyUsage{certificatesv1.UsageClientAuth},
				Request: append(pem.EncodeToMemory(&pem.Block{Type: attestation.BlockRequest, Bytes: der}), text...),
			},
		}
		if _, err := clients.CertificatesV1().CertificateSigningRequests().Create(t.Context(), object, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		names = append(names, text)
	}
	return names
}

// awaitDecisions waits until requests are denied. It looks at their conditions and Events.
func awaitDecisions(t *testing.T, cp *testbed.ControlPlane, names []string) {
	t.Helper()
	for _, name := range names {
		var conditions []certificatesv1.CertificateSigningRequestCondition
		harness.Eventually(t, harness.Soon, "a request is denied", func() bool {
			object, err := cp.Client().CertificatesV1().CertificateSigningRequests().Get(t.Context(), name, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			conditions = object.Status.Conditions
			return len(conditions) > 0
		})
		for _, c := range conditions {
			for _, problem := range hostiletext.FindUnquoted(c.Reason + " " + c.Message) {
				t.Error(problem)
			}
		}
	}
	all, err := cp.Client().EventsV1().Events("").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, event := range all.Items {
		for _, problem := range hostiletext.FindUnquoted(event.Note) {
			t.Error(problem)
		}
	}
}

// What is written is what was configured, and no more than a person would write.
func TestConfigurationFile(t *testing.T) {
	c, err := New(Options{Dir: t.TempDir(), Configure: func(c *config.Config) { c.Audit = true; c.BootCounters = "Required" }})
	if err != nil {
		t.Fatal(err)
	}
	read, err := config.Load(c.ConfigFile())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := config.New(read); err != nil {
		t.Fatal(err)
	}
	if !read.Audit || read.BootCounters != "Required" || read.HealthBindAddress != c.health.Addr() || read.WaitDeadline != config.Default().WaitDeadline {
		t.Errorf("%+v", read)
	}
	if content, err := os.ReadFile(c.ConfigFile()); err != nil || strings.Contains(string(content), "waitDeadline") {
		t.Errorf("%v:\n%s", err, content)
	}
}
