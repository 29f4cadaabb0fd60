// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// Each fault has its own exit code, one line that names the object, and a hint.
func TestBadInput(t *testing.T) {
	for name, c := range map[string]struct {
		code  int
		says  string
		spoil func(t *testing.T, n *node)
	}{
		"no bootstrap kubeconfig": {17, "bootstrap.kubeconfig", func(t *testing.T, n *node) {
			if err := os.Remove(n.bootstrap); err != nil {
				t.Fatal(err)
			}
		}},
		"unknown token": {18, "Unauthorized", func(t *testing.T, n *node) {
			harness.WriteFile(t, n.bootstrap, n.BootstrapKubeconfig("abcdef.0123456789abcdef"))
		}},
		"expired token": {18, "Unauthorized", func(t *testing.T, n *node) {
			harness.WriteFile(t, n.bootstrap, n.BootstrapKubeconfig(harness.ExpiredToken(t, n.ControlPlane)))
		}},
		"no RBAC": {20, "forbidden", func(t *testing.T, n *node) {
			nobody, err := n.ClientCA().IssueClient("nobody", nil, time.Now().Add(-time.Minute), time.Now().Add(time.Hour))
			if err != nil {
				t.Fatal(err)
			}
			if err := n.WriteKubeconfig(n.bootstrap, testbed.CertificateUser(nobody)); err != nil {
				t.Fatal(err)
			}
		}},
		"signer name without a dot": {10, "signerName", func(_ *testing.T, n *node) { n.signer = "cluster-x-k8s-io/nodot" }},
		"unreachable server": {19, "connection refused", func(t *testing.T, n *node) {
			if err := n.behindProxy(t).SetMode(testbed.Refuse); err != nil {
				t.Fatal(err)
			}
		}},
		"server that never answers": {19, "127.0.0.1", func(t *testing.T, n *node) {
			if err := n.behindProxy(t).SetMode(testbed.BlackHole); err != nil {
				t.Fatal(err)
			}
		}},
		"another CA": {26, "unknown authority", func(t *testing.T, n *node) {
			other, err := testbed.NewCA("other")
			if err != nil {
				t.Fatal(err)
			}
			token, err := n.CreateBootstrapToken(t.Context(), time.Hour)
			if err != nil {
				t.Fatal(err)
			}
			harness.WriteFile(t, n.bootstrap, n.BootstrapKubeconfig(token, testbed.WithServerCA(other.CertPEM())))
			n.env = append(n.env, "KUBERNETES_EXEC_INFO=") // as by hand: no cluster to compare with
		}},
		"bootstrap kubeconfig of another cluster": {17, "another CA", func(t *testing.T, n *node) {
			other, err := testbed.NewCA("other")
			if err != nil {
				t.Fatal(err)
			}
			harness.WriteFile(t, n.bootstrap, n.BootstrapKubeconfig("abcdef.0123456789abcdef", testbed.WithServerCA(other.CertPEM())))
		}},
		"bootstrap user is an exec plugin": {10, "exec plugin", func(t *testing.T, n *node) {
			harness.WriteFile(t, n.bootstrap, n.ExecKubeconfig("client.authentication.k8s.io/v1", n.plugin, nil, nil, true))
		}},
		"bootstrap kubeconfig of another user": {10, "bootstrap.kubeconfig: belongs to another user (UID 4711, mode 0666)", func(t *testing.T, n *node) {
			giveAway(t, n.bootstrap, 0o666)
		}},
		"bootstrap kubeconfig that others may write": {10, "others may write it", func(t *testing.T, n *node) {
			harness.Must(t, os.Chmod(n.bootstrap, 0o666))
		}},
		"bootstrap kubeconfig in a folder of another user": {10, "belongs to another user", func(t *testing.T, n *node) {
			giveAway(t, filepath.Dir(n.bootstrap), 0o755)
		}},
		"bootstrap kubeconfig is a fifo": {10, "not a regular file", func(t *testing.T, n *node) {
			harness.Must(t, errors.Join(os.Remove(n.bootstrap), syscall.Mkfifo(n.bootstrap, 0o600)))
		}},
		"token file of another user": {10, "token: belongs to another user", func(t *testing.T, n *node) {
			token := filepath.Join(filepath.Dir(n.bootstrap), "token")
			content, err := os.ReadFile(n.bootstrap)
			harness.Must(t, err)
			named := regexp.MustCompile(`token: .*`).ReplaceAll(content, []byte("tokenFile: token"))
			harness.WriteFile(t, n.bootstrap, named)
			harness.WriteFile(t, token, []byte("abcdef.0123456789abcdef"))
			giveAway(t, token, 0o666)
		}},
		"configuration of another user": {10, "belongs to another user (UID 4711, mode 0666)", func(t *testing.T, n *node) {
			giveAway(t, n.configure(t), 0o666)
		}},
		"configuration in a folder that others may write": {10, "others may write into it", func(t *testing.T, n *node) {
			harness.Must(t, os.Chmod(filepath.Dir(n.configure(t)), 0o777))
		}},
		"configuration is a fifo": {10, "not a regular file", func(t *testing.T, n *node) {
			path := n.configure(t)
			harness.Must(t, errors.Join(os.Remove(path), syscall.Mkfifo(path, 0o600)))
		}},
		"nonsense in KUBERNETES_EXEC_INFO": {11, "KUBERNETES_EXEC_INFO", func(_ *testing.T, n *node) {
			n.env = append(n.env, "KUBERNETES_EXEC_INFO={nonsense")
		}},
		"unsupported exec API": {11, "v1alpha1", func(_ *testing.T, n *node) {
			n.env = append(n.env, `KUBERNETES_EXEC_INFO={"kind":"ExecCredential","apiVersion":"client.authentication.k8s.io/v1alpha1","spec":{"interactive":false}}`)
		}},
		"unknown flag":     {3, "--nonesuch", func(_ *testing.T, n *node) { n.args = append(n.args, "--nonesuch") }},
		"unknown provider": {10, "nonesuch", func(_ *testing.T, n *node) { n.provider = "nonesuch" }},
		"bad node name":    {10, "node name", func(_ *testing.T, n *node) { n.args = append(n.args, "--node-name=Not_A_Name") }},
		"directory that others may write": {12, "others may write", func(t *testing.T, n *node) {
			if err := os.MkdirAll(n.dir.Path(), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(n.dir.Path(), 0o777); err != nil {
				t.Fatal(err)
			}
		}},
		"read-only disk": {27, "read-only", func(t *testing.T, n *node) {
			if err := os.MkdirAll(n.dir.Path(), 0o700); err != nil {
				t.Fatal(err)
			}
			n.readOnly(t)
		}},
		"full disk": {27, "no space", func(t *testing.T, n *node) {
			n.fullDisk(t)
		}},
	} {
		t.Run(strings.ReplaceAll(name, " ", "-"), func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			c.spoil(t, n)
			r := n.run(t)
			if r.Code != c.code || !strings.Contains(r.Stderr, c.says) {
				t.Fatalf("exit code %d, want %d saying %q: %s", r.Code, c.code, c.says, r.Stderr)
			}
			message := strings.TrimPrefix(r.Stderr, "kubelet-authenticator: provider insecure sends no evidence: whoever holds the bootstrap credential can become any node\n")
			lines := strings.Split(strings.TrimSpace(message), "\n")
			if len(lines) != 2 || !strings.HasPrefix(lines[0], "kubelet-authenticator: ") || !strings.HasPrefix(lines[1], "hint: ") {
				t.Errorf("not one line and a hint:\n%s", r.Stderr)
			}
			if strings.Contains(r.Stderr, "0123456789abcdef") {
				t.Errorf("the token is in the error: %s", r.Stderr)
			}
			if got := len(n.requests(t)); got != 0 {
				t.Errorf("%d requests were filed", got)
			}
			again := n.run(t)
			if again.Code != c.code {
				t.Errorf("exit code %d the second time: %s", again.Code, again.Stderr)
			}
			t.Logf("%s", lines[0])
		})
	}
}

// configure writes a valid configuration file, and returns its path.
func (n *node) configure(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.yaml")
	harness.WriteFile(t, path, []byte("apiVersion: authenticator.cluster.x-k8s.io/v1alpha1\nkind: KubeletAuthenticatorConfiguration\n"))
	n.args = append(n.args, "--config="+path)
	return path
}

// giveAway gives a path to another user.
func giveAway(t *testing.T, path string, mode os.FileMode) {
	t.Helper()
	needRoot(t)
	harness.Must(t, errors.Join(os.Chmod(path, mode), os.Chown(path, 4711, 4711)))
}

// A file that another user may write does not affect a node with a valid certificate.
func TestUntrustedFilesTakeNoNodeDown(t *testing.T) {
	n := renewingNode(t)
	old := n.install(t, time.Now().Add(-time.Minute), time.Now().Add(time.Hour))
	giveAway(t, n.configure(t), 0o666)
	giveAway(t, n.bootstrap, 0o666)
	if r := n.run(t); r.Code != 0 || !r.Leaf.Equal(old.Leaf) || !strings.Contains(r.Stderr, "belongs to another user") {
		t.Errorf("exit code %d: %s", r.Code, r.Stderr)
	}
}

// fullDisk puts the certificate directory on a file system without a free byte.
func (n *node) fullDisk(t *testing.T) {
	t.Helper()
	needRoot(t)
	if err := os.MkdirAll(n.dir.Path(), 0o700); err != nil {
		t.Fatal(err)
	}
	n.mount(t, "-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs")
	// until it is full
	_ = os.WriteFile(filepath.Join(n.dir.Path(), "ballast"), make([]byte, 1<<20), 0o600)
}

// On a full disk, the valid certificate stays. The node renews when there is room.
func TestFullDiskLosesNothing(t *testing.T) {
	n := renewingNode(t)
	n.fullDisk(t)
	ballast := filepath.Join(n.dir.Path(), "ballast")
	if err := os.Truncate(ballast, 0); err != nil {
		t.Fatal(err)
	}
	n.installDue(t)
	_ = os.WriteFile(ballast, make([]byte, 1<<20), 0o600)
	for range 3 {
		if r := n.run(t); r.Code != 0 || !strings.Contains(r.Stderr, "no space") {
			t.Fatalf("exit code %d: %s", r.Code, r.Stderr)
		}
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, harness.Soon, "the new certificate is printed", func() bool {
		r := n.run(t)
		return r.Code == 0 && time.Until(r.Leaf.NotAfter) > 30*time.Minute
	})
}

// An issued certificate is installed only if it is for this node and this key.
func TestUnusableCertificates(t *testing.T) {
	foreign, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		code    int
		options []testbed.SignOption
		life    time.Duration
	}{
		"another key":   {code: 24, options: []testbed.SignOption{testbed.WithPublicKey(foreign.Public())}},
		"another node":  {code: 24, options: []testbed.SignOption{testbed.WithSubject(pkix.Name{Organization: []string{"system:nodes"}, CommonName: "system:node:victim"})}},
		"masters":       {code: 24, options: []testbed.SignOption{testbed.WithSubject(pkix.Name{Organization: []string{"system:masters"}, CommonName: "system:node:unusablecertificates"})}},
		"server usage":  {code: 24, options: []testbed.SignOption{testbed.WithExtKeyUsage(x509.ExtKeyUsageServerAuth)}},
		"marked as CA":  {code: 24, options: []testbed.SignOption{func(c *x509.Certificate) { c.IsCA, c.BasicConstraintsValid = true, true }}},
		"expired":       {code: 25, life: -time.Minute},
		"not yet valid": {code: 25, options: []testbed.SignOption{func(c *x509.Certificate) { c.NotBefore = time.Now().Add(20 * time.Minute) }}},
	} {
		t.Run(strings.ReplaceAll(name, " ", "-"), func(t *testing.T) {
			n := renewingNode(t)
			n.signer = "example.com/by-hand"
			old := n.installDue(t)
			n.run(t)
			harness.Eventually(t, harness.Soon, "a request is filed", func() bool { return n.live(t) == 1 })
			request := n.request(t)
			life := c.life
			if life == 0 {
				life = time.Hour
			}
			n.issue(t, request.Name, n.sign(t, request, life, c.options...))
			harness.WorkerEnds(t, n.dir)
			state, err := n.dir.State()
			if err != nil || state.Last == nil || state.Last.Reason == "" {
				t.Fatalf("the worker did not fail: %+v, %v", state, err)
			}
			r := n.run(t)
			if r.Code != 0 || !r.Leaf.Equal(old.Leaf) {
				t.Errorf("the old certificate is not printed: exit code %d: %s", r.Code, r.Stderr)
			}
			// After the old certificate has expired, the kubelet's metrics have the exit code.
			n.install(t, time.Now().Add(-time.Hour), time.Now().Add(-time.Second))
			if r := n.run(t); r.Code != c.code {
				t.Errorf("exit code %d, want %d: %s", r.Code, c.code, r.Stderr)
			}
		})
	}
}

func TestAnswerThatIsNotACertificateIsRefusedByTheNode(t *testing.T) {
	// The API server itself checks that status.certificate is PEM, so the rest is shown in pkg/csr.
	n := newNode(t)
	n.signer = "example.com/by-hand"
	n.run(t, "--wait-timeout=500ms")
	request := n.request(t)
	if err := n.Approve(t.Context(), request.Name); err != nil {
		t.Fatal(err)
	}
	if err := n.SetCertificate(context.WithoutCancel(t.Context()), request.Name, []byte("nonsense")); err == nil {
		t.Error("the API server takes anything now: show what the node makes of it here")
	}
}

// The worker sets unusable files aside, with the reason in its log, and requests a new certificate.
func TestUnusableFilesAreSetAside(t *testing.T) {
	n := newNode(t)
	for _, file := range []string{cache.CurrentFile, cache.PendingFile, cache.StateFile} {
		if err := os.MkdirAll(n.dir.Path(), 0o700); err != nil {
			t.Fatal(err)
		}
		harness.WriteFile(t, n.dir.File(file), []byte("nonsense"))
	}
	r := n.enrol(t)
	if got := n.whoami(t, r); got != "system:node:"+n.name {
		t.Errorf("the API server takes it for %q", got)
	}
	for _, file := range []string{cache.CurrentFile, cache.PendingFile, cache.StateFile} {
		aside, err := filepath.Glob(n.dir.File(file) + ".set-aside-*")
		if err != nil || len(aside) != 1 {
			t.Errorf("%s: %v, %v", file, aside, err)
		}
		if !strings.Contains(string(n.read(t, cache.LogFile)), filepath.Base(aside[0])) {
			t.Errorf("%s: not in the log", file)
		}
	}
}
