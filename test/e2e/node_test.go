// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// node is a machine: a certificate directory, a bootstrap kubeconfig, and the plugin's flags.
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
		name:      harness.TestNode(t),
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
	harness.WriteFile(t, n.bootstrap, n.BootstrapKubeconfig(token))
	t.Cleanup(func() { harness.KillWorker(t, n.dir) })
	return n
}

// renewingNode returns a node whose provider may renew.
func renewingNode(t *testing.T) *node {
	t.Helper()
	n := newNode(t)
	n.provider, n.plugin = "renewing", n.testPlugin
	return n
}

// flags returns the plugin's flags in the kubeconfig's exec stanza.
func (n *node) flags() []string {
	if n.bare {
		return n.args
	}
	return append([]string{
		"--provider=" + n.provider, "--node-name=" + n.name, "--cert-dir=" + n.dir.Path(), "--runtime-dir=" + n.runtime,
		"--bootstrap-kubeconfig=" + n.bootstrap, "--signer-name=" + n.signer, "--provider-id=test://" + n.name,
	}, n.args...)
}

// run runs the plugin as client-go does: /dev/null is its input, and the environment has ExecInfo.
func (n *node) run(t *testing.T, extra ...string) harness.Result {
	t.Helper()
	return n.runContext(t.Context(), t, append(n.flags(), extra...))
}

func (n *node) runContext(ctx context.Context, t *testing.T, args []string) harness.Result {
	t.Helper()
	cmd := exec.CommandContext(ctx, n.plugin, args...)
	cmd.Env = append(append(os.Environ(), n.ask()), n.env...)
	return harness.RunPlugin(t, cmd)
}

// ask returns the variable that client-go sets for the plugin.
func (n *node) ask() string { return harness.ExecInfo(n.server, n.ServerCA()) }

// enrol runs the plugin until the node has a certificate.
func (n *node) enrol(t *testing.T) harness.Result {
	t.Helper()
	var r harness.Result
	harness.Eventually(t, time.Minute, "the node enrols", func() bool {
		if r = n.run(t); r.Code < 0 {
			t.Fatalf("killed: %+v", r)
		}
		return r.Code == 0
	})
	harness.WorkerEnds(t, n.dir)
	return r
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

// installDue installs a certificate whose renewal is due: it is in the last tenth of its lifetime.
func (n *node) installDue(t *testing.T) *cache.Pair {
	t.Helper()
	return n.install(t, time.Now().Add(-95*time.Minute), time.Now().Add(10*time.Minute))
}

// request waits for the node's first request, and returns it.
func (n *node) request(t *testing.T) (first certificatesv1.CertificateSigningRequest) {
	t.Helper()
	harness.Eventually(t, harness.Soon, "a request is filed", func() bool {
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
	hellos, others := harness.Requests(t, n.ControlPlane, n.name)
	return append(hellos, others...)
}

// live returns the number of the node's undecided requests.
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

// whoami returns the user that the API server sees in the credential.
func (n *node) whoami(t *testing.T, r harness.Result) string {
	t.Helper()
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	user := testbed.CertificateUser(testbed.KeyPair{CertPEM: []byte(r.Credential.Status.ClientCertificateData), KeyPEM: []byte(r.Credential.Status.ClientKeyData)})
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
