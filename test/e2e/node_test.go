// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientauthentication "k8s.io/client-go/pkg/apis/clientauthentication/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// node is a machine: a certificate directory, a bootstrap kubeconfig, and how its plugin is called.
type node struct {
	*bed
	name      string
	dir       cache.Dir
	runtime   string
	bootstrap string
	provider  string
	signer    string
	plugin    string
	server    string // what client-go says the server is
	bare      bool   // args are all the flags
	args      []string
	env       []string
}

// newNode returns a machine without a certificate, with a bootstrap token of its own.
func newNode(t *testing.T) *node {
	t.Helper()
	home := t.TempDir()
	n := &node{
		bed:       shared,
		name:      strings.ToLower(strings.NewReplacer("/", ".", "_", "-").Replace(t.Name())),
		dir:       cache.At(filepath.Join(home, "certs")),
		runtime:   filepath.Join(home, "run"),
		bootstrap: filepath.Join(home, "bootstrap.kubeconfig"),
		provider:  "insecure",
		signer:    builtinSigner,
		plugin:    shared.plugin,
		server:    shared.ServerURL(),
	}
	token, err := n.CreateBootstrapToken(t.Context(), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	n.write(t, n.bootstrap, n.BootstrapKubeconfig(token))
	t.Cleanup(func() { n.noWorkerIsLeft(t) })
	return n
}

// renewingNode is one whose provider may renew.
func renewingNode(t *testing.T) *node {
	t.Helper()
	n := newNode(t)
	n.provider, n.plugin = "renewing", n.testPlugin
	return n
}

// noWorkerIsLeft ends a worker that the test left behind, so that it does not write into a directory that goes away.
func (n *node) noWorkerIsLeft(t *testing.T) {
	id := n.dir.Worker()
	if !id.Alive() {
		return
	}
	if p, err := os.FindProcess(id.PID); err == nil {
		_ = p.Kill()
	}
	eventually(t, 5*time.Second, "the worker ends", func() bool { return !id.Alive() })
}

func (n *node) write(t *testing.T, path string, data []byte) {
	t.Helper()
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
}

// flags are what the kubeconfig's exec stanza gives the plugin.
func (n *node) flags() []string {
	if n.bare {
		return n.args
	}
	return append([]string{
		"--provider=" + n.provider, "--node-name=" + n.name, "--cert-dir=" + n.dir.Path(), "--runtime-dir=" + n.runtime,
		"--bootstrap-kubeconfig=" + n.bootstrap, "--signer-name=" + n.signer, "--provider-id=test://" + n.name,
	}, n.args...)
}

// result is what came of one run.
type result struct {
	code           int
	stdout, stderr string
	took           time.Duration
	credential     *clientauthentication.ExecCredential
	leaf           *x509.Certificate
}

// run calls the plugin as client-go does: /dev/null as its input, the question in its environment.
func (n *node) run(t *testing.T, extra ...string) result {
	t.Helper()
	return n.runContext(t.Context(), t, append(n.flags(), extra...))
}

func (n *node) runContext(ctx context.Context, t *testing.T, args []string) result {
	t.Helper()
	cmd := exec.CommandContext(ctx, n.plugin, args...)
	cmd.Env = append(append(os.Environ(), "KUBERNETES_EXEC_INFO="+n.ask(t)), n.env...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	began := time.Now()
	err := cmd.Run()
	r := result{stdout: stdout.String(), stderr: stderr.String(), took: time.Since(began)}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		r.code = exit.ExitCode()
	} else if err != nil {
		t.Fatalf("run plugin: %v", err)
	}
	if r.code == 0 {
		r.credential, r.leaf = parseCredential(t, r.stdout)
	} else if r.stdout != "" {
		t.Errorf("exit code %d, and on standard output: %s", r.code, r.stdout)
	}
	return r
}

// ask is KUBERNETES_EXEC_INFO with provideClusterInfo.
func (n *node) ask(t *testing.T) string {
	t.Helper()
	ask := clientauthentication.ExecCredential{Spec: clientauthentication.ExecCredentialSpec{
		Cluster: &clientauthentication.Cluster{Server: n.server, CertificateAuthorityData: n.ServerCA()},
	}}
	ask.APIVersion, ask.Kind = clientauthentication.SchemeGroupVersion.String(), "ExecCredential"
	data, err := json.Marshal(ask)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// parseCredential checks that standard output is one ExecCredential with a timestamp in the future, and nothing else.
func parseCredential(t *testing.T, stdout string) (*clientauthentication.ExecCredential, *x509.Certificate) {
	t.Helper()
	decoder := json.NewDecoder(strings.NewReader(stdout))
	credential := &clientauthentication.ExecCredential{}
	if err := decoder.Decode(credential); err != nil || decoder.More() {
		t.Fatalf("standard output is not one JSON document: %v\n%s", err, stdout)
	}
	if credential.Status == nil || credential.Status.ExpirationTimestamp == nil || !credential.Status.ExpirationTimestamp.After(time.Now()) {
		t.Fatalf("no status, or no timestamp in the future: %s", stdout)
	}
	block, _ := pem.Decode([]byte(credential.Status.ClientCertificateData))
	leaf, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return credential, leaf
}

// enrol has the node get a certificate, however many runs it takes.
func (n *node) enrol(t *testing.T) result {
	t.Helper()
	for range 20 {
		if r := n.run(t); r.code == 0 {
			// It records its end after the certificate is there.
			eventually(t, 10*time.Second, "the worker ends", func() bool { return !n.dir.Worker().Alive() })
			return r
		} else if time.Sleep(300 * time.Millisecond); r.code < 0 {
			t.Fatalf("killed: %+v", r)
		}
	}
	t.Fatalf("no certificate after 20 runs: %+v", n.run(t))
	return result{}
}

// install gives the node a certificate of the real client CA with these bounds.
func (n *node) install(t *testing.T, notBefore, notAfter time.Time) *cache.Pair {
	t.Helper()
	issued, err := n.ClientCA().IssueClient("system:node:"+n.name, []string{"system:nodes"}, notBefore, notAfter)
	if err != nil {
		t.Fatal(err)
	}
	return n.installPair(t, issued)
}

func (n *node) installPair(t *testing.T, issued testbed.KeyPair) *cache.Pair {
	t.Helper()
	pair, err := cache.ParsePair(append(bytes.Clone(issued.CertPEM), issued.KeyPEM...))
	if err != nil {
		t.Fatal(err)
	}
	pair.Origin = &cache.Origin{Server: n.ServerURL(), CertificateAuthorityData: n.ServerCA()}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	lock, err := n.dir.WaitLock(ctx) // a worker that has installed its certificate still tidies up
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Unlock()
	if err := lock.Install(pair); err != nil {
		t.Fatal(err)
	}
	return pair
}

// installDue gives it one that is due: the last tenth of its lifetime has begun.
func (n *node) installDue(t *testing.T) *cache.Pair {
	t.Helper()
	return n.install(t, time.Now().Add(-95*time.Minute), time.Now().Add(10*time.Minute))
}

// request returns the first of its requests, which a worker may be about to file.
func (n *node) request(t *testing.T) (first certificatesv1.CertificateSigningRequest) {
	t.Helper()
	eventually(t, 20*time.Second, "a request is filed", func() bool {
		all := n.requests(t)
		if len(all) > 0 {
			first = all[0]
		}
		return len(all) > 0
	})
	return first
}

// requests returns the CertificateSigningRequests that ask for this node's name.
func (n *node) requests(t *testing.T) []certificatesv1.CertificateSigningRequest {
	t.Helper()
	list, err := n.Client().CertificatesV1().CertificateSigningRequests().List(context.WithoutCancel(t.Context()), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var ours []certificatesv1.CertificateSigningRequest
	for _, item := range list.Items {
		block, _ := pem.Decode(item.Spec.Request)
		if request, err := x509.ParseCertificateRequest(block.Bytes); err == nil && request.Subject.CommonName == "system:node:"+n.name {
			ours = append(ours, item)
		}
	}
	return ours
}

// live returns how many of the node's requests nobody has decided.
func (n *node) live(t *testing.T) int {
	t.Helper()
	count := 0
	for _, r := range n.requests(t) {
		if len(r.Status.Conditions) == 0 {
			count++
		}
	}
	return count
}

// whoami has the API server say whom it takes the credential for.
func (n *node) whoami(t *testing.T, r result) string {
	t.Helper()
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	user := testbed.CertificateUser(testbed.KeyPair{CertPEM: []byte(r.credential.Status.ClientCertificateData), KeyPEM: []byte(r.credential.Status.ClientKeyData)})
	if err := n.WriteKubeconfig(kubeconfig, user); err != nil {
		t.Fatal(err)
	}
	out, err := n.RunKubectl(t.Context(), kubeconfig, "auth", "whoami", "-o", "jsonpath={.status.userInfo.username}")
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return out
}

// slack is what a busy machine may add to a run that waits.
const slack = 4 * time.Second

// eventually waits for a condition, a bound with slack on how long.
func eventually(t *testing.T, limit time.Duration, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(limit); !condition(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %s: %s", limit, what)
		}
	}
}
