// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
)

const testSigner = "example.test/signer"

// TestControlPlane walks through everything a control plane offers, on one
// instance as starting takes seconds, and then looks that nothing is left.
func TestControlPlane(t *testing.T) {
	components := buildForTest(t)
	begun := time.Now()
	cp, err := Start(t.Context(), Options{Components: &components})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("control plane ready after %s", time.Since(begun).Round(time.Millisecond))
	t.Cleanup(func() { stopAndLookAround(t, cp) })
	t.Cleanup(func() { // before that: cleanups run last in, first out
		if t.Failed() {
			t.Log(cp.Logs())
		}
	})

	if err := cp.BindKubeadmBootstrap(t.Context()); err != nil {
		t.Fatal(err)
	}
	token, err := cp.CreateBootstrapToken(t.Context(), time.Hour)
	if err != nil {
		t.Fatal(err)
	}

	t.Run("bootstrap token", func(t *testing.T) { testBootstrapToken(t, cp, token) })
	t.Run("versions", func(t *testing.T) { testVersions(t, cp) })
	t.Run("exec kubeconfig", func(t *testing.T) { testExecKubeconfig(t, cp, token) })
	t.Run("decisions", func(t *testing.T) { testDecisions(t, cp, token) })
	t.Run("two authorities", func(t *testing.T) { testTwoAuthorities(t, cp) })
	t.Run("through the proxy", func(t *testing.T) { testLostAnswer(t, cp, token) })
	t.Run("controller manager", func(t *testing.T) { testControllerManager(t, cp, token) })
	t.Run("another on its etcd", func(t *testing.T) { testSharedEtcd(t, cp) })
	t.Run("second API server", func(t *testing.T) { testSecondAPIServer(t, cp) })
	t.Run("etcd", func(t *testing.T) { testEtcd(t, cp) })
}

// testEtcd has etcd away for a while, and compacted. What was stored is there afterwards, and its
// former versions are not.
func testEtcd(t *testing.T, cp *ControlPlane) {
	spaces := cp.Client().CoreV1().Namespaces()
	create := func(name string) error {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		_, err := spaces.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		return err
	}
	read := func(revision string) error { // the API server keeps former versions in memory
		return cp.askEtcd(t.Context(), "/v3/kv/range", `{"key":"Lw==","revision":"`+revision+`"}`, nil)
	}
	before, err := spaces.List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := cp.StartEtcd(t.Context()); err == nil {
		t.Error("it was started twice")
	}
	for range 2 {
		if err := cp.StopEtcd(); err != nil {
			t.Fatal(err)
		}
	}
	if err := create("without-etcd"); err == nil {
		t.Error("a namespace was created without etcd")
	}
	if err := cp.StartEtcd(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), startTimeout)
	defer cancel()
	if err := poll(ctx, "a write", func(context.Context) error { return create("with-etcd") }); err != nil {
		t.Fatal(err)
	}
	if err := read(before.ResourceVersion); err != nil {
		t.Errorf("before the compaction: %v", err)
	}
	if revision, err := cp.CompactEtcd(t.Context()); err != nil || revision == before.ResourceVersion {
		t.Errorf("revision %q, %v", revision, err)
	}
	if err := read(before.ResourceVersion); err == nil || !strings.Contains(err.Error(), "compacted") {
		t.Errorf("after the compaction: %v", err)
	}
	if _, err := spaces.Get(t.Context(), "with-etcd", metav1.GetOptions{}); err != nil {
		t.Error(err)
	}
}

const exampleCRD = `apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: things.example.test}
spec:
  group: example.test
  scope: Cluster
  names: {kind: Thing, listKind: ThingList, plural: things, singular: thing}
  versions:
  - {name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object}}}
`

// testSharedEtcd has a second API server that knows nothing of the first one's objects, and ends
// alone.
func testSharedEtcd(t *testing.T, cp *ControlPlane) {
	other, err := Start(t.Context(), Options{Components: &cp.components, Etcd: cp})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = other.Stop() })
	file := filepath.Join(t.TempDir(), "crd.yaml")
	if err := os.WriteFile(file, []byte(exampleCRD), 0o600); err != nil {
		t.Fatal(err)
	}
	crds, err := ReadCRDs(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := other.InstallCRDs(t.Context(), crds...); err != nil {
		t.Fatal(err)
	}
	things := func(cp *ControlPlane) error {
		return cp.client.RESTClient().Get().AbsPath("/apis/example.test/v1/things").Do(t.Context()).Error()
	}
	if err := things(other); err != nil {
		t.Error(err)
	}
	if err := things(cp); !apierrors.IsNotFound(err) {
		t.Errorf("the other one's objects: %v", err)
	}
	if err := other.Stop(); err != nil {
		t.Error(err)
	}
	if _, err := cp.client.CoreV1().Namespaces().Get(t.Context(), systemNamespace, metav1.GetOptions{}); err != nil {
		t.Errorf("without the other one: %v", err)
	}
	if _, err := ReadCRDs(filepath.Join(t.TempDir(), "*.yaml")); err == nil {
		t.Error("no files are no error")
	}
}

// testSecondAPIServer has two API servers with the same objects, users and tokens. One of them
// stops and starts again where it was. Both are left running, for Stop to stop.
func testSecondAPIServer(t *testing.T, cp *ControlPlane) {
	second, err := cp.AddAPIServer(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if second.URL() == cp.ServerURL() || second.PID() == cp.APIServer().PID() {
		t.Fatal("it is the first one")
	}
	accounts := second.Client().CoreV1().ServiceAccounts(systemNamespace)
	if _, err := accounts.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "second"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	// The first has the object, and takes the second's token.
	token, err := accounts.CreateToken(t.Context(), "second", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	whoAmI := func(client kubernetes.Interface) error {
		_, err := client.AuthenticationV1().SelfSubjectReviews().Create(t.Context(), &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
		return err
	}
	user := TokenUser(token.Status.Token)
	if err := whoAmI(clientFrom(t, cp.Kubeconfig(user))); err != nil {
		t.Errorf("the second's token at the first: %v", err)
	}
	url, pid := second.URL(), second.PID()
	if err := second.Stop(); err != nil {
		t.Fatal(err)
	}
	if err := whoAmI(clientFrom(t, second.Kubeconfig(user))); err == nil || second.PID() != 0 || running(pid) {
		t.Error("it runs on")
	}
	if err := whoAmI(clientFrom(t, cp.Kubeconfig(user))); err != nil {
		t.Errorf("the first without the second: %v", err)
	}
	if err := second.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := whoAmI(clientFrom(t, second.Kubeconfig(user))); err != nil || second.URL() != url {
		t.Errorf("started again at %s: %v", second.URL(), err)
	}
	if err := second.Start(t.Context()); err == nil {
		t.Error("it is started twice")
	}
}

func stopAndLookAround(t *testing.T, cp *ControlPlane) {
	processes := []*Process{cp.etcd, cp.controllerManager}
	for _, s := range cp.apiServers {
		processes = append(processes, s.process)
	}
	begun := time.Now()
	if err := cp.Stop(); err != nil {
		t.Error(err)
	}
	t.Logf("stopped after %s", time.Since(begun).Round(time.Millisecond))
	for _, p := range processes {
		if p != nil && running(p.PID()) {
			t.Errorf("%s is still running", p.name)
		}
	}
	if _, err := os.Stat(cp.Dir()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the temporary folder is still there: %v", err)
	}
}

func testBootstrapToken(t *testing.T, cp *ControlPlane, token string) {
	mark, err := cp.AuditMark()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "bootstrap.kubeconfig")
	if err := cp.WriteKubeconfig(path, TokenUser(token)); err != nil {
		t.Fatal(err)
	}
	out, err := cp.RunKubectl(t.Context(), path, "auth", "whoami", "-o", "yaml")
	if err != nil {
		t.Fatal(err)
	}
	if user := "username: system:bootstrap:" + token[:6]; !strings.Contains(out, user) || !strings.Contains(out, BootstrapGroup) {
		t.Errorf("whoami lacks %q or %q:\n%s", user, BootstrapGroup, out)
	}

	events, err := cp.AwaitAudit(t.Context(), mark, func(events []AuditEvent) bool { return len(events) > 0 })
	if err != nil {
		t.Fatal(err)
	}
	event := events[0]
	if len(events) != 1 || event.Verb != "create" || event.Resource != "selfsubjectreviews" ||
		event.User != "system:bootstrap:"+token[:6] || event.Code != 201 || event.Stage != StageResponseComplete ||
		!strings.HasPrefix(event.UserAgent, "kubectl/") || !strings.HasPrefix(event.RequestURI, "/apis/authentication.k8s.io/") {
		t.Errorf("audit events of one whoami: %+v", events)
	}
}

func testVersions(t *testing.T, cp *ControlPlane) {
	path := filepath.Join(t.TempDir(), "admin.kubeconfig")
	if err := cp.WriteKubeconfig(path, cp.AdminUser()); err != nil {
		t.Fatal(err)
	}
	out, err := cp.RunKubectl(t.Context(), path, "version")
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(out, cp.components.KubernetesVersion); n != 2 {
		t.Errorf("client and server are not both %s:\n%s", cp.components.KubernetesVersion, out)
	}
}

// The plugin is a shell script: what is tested is the kubeconfig.
func testExecKubeconfig(t *testing.T, cp *ControlPlane, token string) {
	dir := t.TempDir()
	plugin := filepath.Join(dir, "plugin")
	script := `#!/bin/sh
case $KUBERNETES_EXEC_INFO in *'"server":"` + cp.ServerURL() + `"'*) ;; *) exit 3 ;; esac
printf '{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential","status":{"token":"%s"}}' "$1.$SECRET"
`
	if err := os.WriteFile(plugin, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	id, secret, _ := strings.Cut(token, ".")
	user := ExecUser("client.authentication.k8s.io/v1", plugin, []string{id}, map[string]string{"SECRET": secret}, true)
	path := filepath.Join(dir, "kubeconfig")
	if err := cp.WriteKubeconfig(path, user); err != nil {
		t.Fatal(err)
	}
	out, err := cp.RunKubectl(t.Context(), path, "auth", "whoami")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out, "system:bootstrap:"+id) {
		t.Errorf("whoami does not name the token's user:\n%s", out)
	}
}

func testDecisions(t *testing.T, cp *ControlPlane, token string) {
	client := clientFrom(t, cp.BootstrapKubeconfig(token))
	tests := []struct {
		name   string
		decide func(ctx context.Context, name string) error
		want   certificatesv1.RequestConditionType
	}{
		{"approve", cp.Approve, certificatesv1.CertificateApproved},
		{"deny", func(ctx context.Context, name string) error { return cp.Deny(ctx, name, "No", "never") }, certificatesv1.CertificateDenied},
		{"fail", func(ctx context.Context, name string) error { return cp.Fail(ctx, name, "No", "broken") }, certificatesv1.CertificateFailed},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			csr, _, err := fileCSR(t, client, testSigner)
			if err != nil {
				t.Fatal(err)
			}
			if err := test.decide(t.Context(), csr.Name); err != nil {
				t.Fatal(err)
			}
			got := getCSR(t, cp, csr.Name)
			if len(got.Status.Conditions) != 1 || got.Status.Conditions[0].Type != test.want {
				t.Errorf("conditions %+v, want one %s", got.Status.Conditions, test.want)
			}
		})
	}

	t.Run("issue", func(t *testing.T) {
		csr, key, err := fileCSR(t, client, testSigner)
		if err != nil {
			t.Fatal(err)
		}
		if err := cp.Approve(t.Context(), csr.Name); err != nil {
			t.Fatal(err)
		}
		der, _ := pem.Decode(csr.Spec.Request)
		now := time.Now()
		issued, err := cp.ClientCA().SignCSR(der.Bytes, now.Add(-time.Minute), now.Add(time.Hour))
		if err != nil {
			t.Fatal(err)
		}
		if err := cp.SetCertificate(t.Context(), csr.Name, issued); err != nil {
			t.Fatal(err)
		}
		pair := KeyPair{CertPEM: getCSR(t, cp, csr.Name).Status.Certificate, KeyPEM: key}
		wantNode(t, cp, pair)
	})
}

// A client that trusted the CA of its own certificate for the server would fail. A certificate of
// the server's CA does not authenticate a client.
func testTwoAuthorities(t *testing.T, cp *ControlPlane) {
	_, err := clientFrom(t, cp.Kubeconfig(cp.AdminUser(), WithServerCA(cp.ClientCA().CertPEM()))).Discovery().ServerVersion()
	if unknown := new(x509.UnknownAuthorityError); !errors.As(err, unknown) {
		t.Errorf("trusting the client CA for the server: %v", err)
	}
	now := time.Now()
	pair, err := cp.serverCA.IssueClient("intruder", []string{"system:masters"}, now.Add(-time.Minute), now.Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	_, err = clientFrom(t, cp.Kubeconfig(CertificateUser(pair))).CoreV1().Namespaces().List(t.Context(), metav1.ListOptions{})
	if !apierrors.IsUnauthorized(err) {
		t.Errorf("a client certificate of the server's CA: %v", err)
	}
}

// An answer is lost although the request was carried out: what a client that
// files a request has to survive.
func testLostAnswer(t *testing.T, cp *ControlPlane, token string) {
	proxy, err := NewProxy(cp.ServerURL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := proxy.Close(); err != nil {
			t.Error(err)
		}
	})
	client := clientFrom(t, cp.BootstrapKubeconfig(token, WithServer(proxy.URL())))
	mark, err := cp.AuditMark()
	if err != nil {
		t.Fatal(err)
	}
	cut := proxy.CutAfterRequest(0)
	if _, _, err := fileCSR(t, client, testSigner); err == nil {
		t.Fatal("the answer was not lost")
	} else {
		t.Logf("what the client sees: %v", err)
	}
	<-cut
	isCreate := func(events []AuditEvent) bool {
		return len(events) == 1 && events[0].Verb == "create" && events[0].Code == 201
	}
	if events, err := cp.AwaitAudit(t.Context(), mark, isCreate); err != nil {
		t.Errorf("the request was not carried out: %v: %+v", err, events)
	}
	if _, _, err := fileCSR(t, client, testSigner); err != nil {
		t.Errorf("the next request: %v", err)
	}
}

func testControllerManager(t *testing.T, cp *ControlPlane, token string) {
	client := clientFrom(t, cp.BootstrapKubeconfig(token))
	for range 2 { // it can be restarted
		begun := time.Now()
		if err := cp.StartControllerManager(t.Context()); err != nil {
			t.Fatal(err)
		}
		t.Logf("controller manager ready after %s", time.Since(begun).Round(time.Millisecond))
		csr, key, err := fileCSR(t, client, certificatesv1.KubeAPIServerClientKubeletSignerName)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		var issued []byte
		err = poll(ctx, "a certificate", func(context.Context) error {
			if issued = getCSR(t, cp, csr.Name).Status.Certificate; len(issued) == 0 {
				return errors.New("none yet")
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("issued after %s", time.Since(begun).Round(time.Millisecond))
		wantNode(t, cp, KeyPair{CertPEM: issued, KeyPEM: key})
		if err := cp.StopControllerManager(); err != nil {
			t.Fatal(err)
		}
	}
	// Left running, for Stop to stop.
	if err := cp.StartControllerManager(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestStartReportsWhyItFailed(t *testing.T) {
	components := buildForTest(t)
	_, err := Start(t.Context(), Options{Components: &components, APIServerArgs: []string{"--no-such-flag"}})
	if err == nil || !strings.Contains(err.Error(), "unknown flag: --no-such-flag") {
		t.Errorf("the error lacks the API server's own words: %v", err)
	}
}

func buildForTest(t *testing.T) compile.Components {
	t.Helper()
	begun := time.Now()
	components, err := compile.ControlPlane(t.Context(), os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("components there after %s", time.Since(begun).Round(time.Millisecond))
	return components
}

func clientFrom(t *testing.T, kubeconfig []byte) kubernetes.Interface {
	t.Helper()
	config, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

const testNode = "system:node:testbed"

// fileCSR files a kubelet's request for a client certificate.
func fileCSR(t *testing.T, client kubernetes.Interface, signer string) (*certificatesv1.CertificateSigningRequest, []byte, error) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.CertificateRequest{Subject: pkix.Name{CommonName: testNode, Organization: []string{"system:nodes"}}}
	der, err := x509.CreateCertificateRequest(rand.Reader, template, key)
	if err != nil {
		t.Fatal(err)
	}
	csr, err := client.CertificatesV1().CertificateSigningRequests().Create(t.Context(), &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "testbed-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}),
			SignerName: signer,
			Usages:     []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth},
		},
	}, metav1.CreateOptions{})
	return csr, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}), err
}

func getCSR(t *testing.T, cp *ControlPlane, name string) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	csr, err := cp.Client().CertificatesV1().CertificateSigningRequests().Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return csr
}

func wantNode(t *testing.T, cp *ControlPlane, pair KeyPair) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "node.kubeconfig")
	if err := cp.WriteKubeconfig(path, CertificateUser(pair)); err != nil {
		t.Fatal(err)
	}
	out, err := cp.RunKubectl(t.Context(), path, "auth", "whoami", "-o", "jsonpath={.status.userInfo.username}")
	if err != nil {
		t.Fatal(err)
	}
	if out != testNode {
		t.Errorf("whoami says %q, want %q", out, testNode)
	}
}
