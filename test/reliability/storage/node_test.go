// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"bytes"
	"crypto/tls"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// diskNode is a node whose certificate directory is on a disk that can lose its power.
type diskNode struct {
	*boot
	t         *testing.T
	name      string
	home      string
	bootstrap string
}

// newDiskNode returns a node without a certificate, with a bootstrap token of its own.
func newDiskNode(t *testing.T, suffix string) *diskNode {
	t.Helper()
	home := t.TempDir()
	n := &diskNode{t: t, name: harness.TestNode(t) + "-" + suffix, home: home, bootstrap: filepath.Join(home, "bootstrap.kubeconfig")}
	token, err := shared.CreateBootstrapToken(t.Context(), time.Hour)
	harness.Must(t, err)
	harness.WriteFile(t, n.bootstrap, shared.BootstrapKubeconfig(token))
	return n
}

func (n *diskNode) powerOn(holds image) { n.boot = powerOn(n.t, n.home, holds) }

// certs is its certificate directory. Its parent is there from the start.
func (n *diskNode) certs() cache.Dir { return cache.At(filepath.Join(n.disk.path, "certs")) }

// run runs the plugin as client-go does.
func (n *diskNode) run() harness.Result {
	n.t.Helper()
	return harness.RunPlugin(n.t, n.plugin())
}

func (n *diskNode) plugin() *exec.Cmd {
	return n.command(harness.ExecEnv(shared.ControlPlane), shared.testPlugin,
		"--provider=renewing", "--node-name="+n.name, "--cert-dir="+n.certs().Path(), "--runtime-dir="+n.runtime,
		"--bootstrap-kubeconfig="+n.bootstrap, "--signer-name="+storageSigner, "--provider-id=test://"+n.name)
}

// prepare is what the kubelet's unit runs before the kubelet, on a control plane: it waits for no
// certificate.
func (n *diskNode) prepare() *exec.Cmd {
	n.t.Helper()
	etc := filepath.Join(n.disk.path, "etc")
	config := filepath.Join(n.home, "config.yaml")
	harness.WriteFile(n.t, config, []byte(strings.Join([]string{
		"apiVersion: authenticator.cluster.x-k8s.io/v1alpha1", "kind: KubeletAuthenticatorConfiguration",
		"provider: renewing", "signerName: example.com/nobody", "nodeName: " + n.name, "certDir: " + n.certs().Path(), "runtimeDir: " + n.runtime,
		"kubeletKubeconfig: " + etc + "/kubelet.conf", "kubeletBootstrapKubeconfig: " + etc + "/bootstrap-kubelet.conf",
	}, "\n")+"\n"))
	return n.command(os.Environ(), shared.testPlugin, "prepare", "--config="+config, "--env-file="+n.runtime+"/kubelet.env", "--manifests="+etc+"/manifests")
}

// reset removes what the plugin keeps.
func (n *diskNode) reset() *exec.Cmd {
	return n.command(os.Environ(), shared.testPlugin, "reset", "--yes", "--provider=renewing", "--node-name="+n.name, "--cert-dir="+n.certs().Path(), "--runtime-dir="+n.runtime,
		"--env-file="+n.runtime+"/kubelet.env")
}

// runUntilCut runs a command of the plugin, and waits until its worker has ended or the power is
// cut.
func (n *diskNode) runUntilCut(run *exec.Cmd) {
	n.t.Helper()
	harness.Must(n.t, run.Start())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = run.Wait() // what the next boot finds is what counts
	}()
	select {
	case <-ended:
	case <-n.disk.cut:
		return
	}
	harness.Eventually(n.t, 20*time.Second, "the worker ends", func() bool {
		select {
		case <-n.disk.cut:
			return true
		default:
			return !n.busy(n.t)
		}
	})
}

func (n *diskNode) duePair() *cache.Pair {
	n.t.Helper()
	return duePair(n.t, n.name)
}

// duePair returns a certificate that is due: the last tenth of its lifetime has begun.
func duePair(t testing.TB, node string) *cache.Pair {
	t.Helper()
	issued, err := shared.ClientCA().IssueClient("system:node:"+node, []string{"system:nodes"}, time.Now().Add(-95*time.Minute), time.Now().Add(10*time.Minute))
	harness.Must(t, err)
	pair, err := cache.ParsePair(append(bytes.Clone(issued.CertPEM), issued.KeyPEM...))
	harness.Must(t, err)
	pair.Origin = &cache.Origin{Server: shared.ServerURL(), CertificateAuthorityData: shared.ServerCA()}
	return pair
}

// checkCredential checks that a credential is the node's, and valid at that time. Its CA must be
// one that the API server trusts, and its key must belong to it.
func checkCredential(t testing.TB, node string, r harness.Result, now time.Time) {
	t.Helper()
	if _, err := tls.X509KeyPair([]byte(r.Credential.Status.ClientCertificateData), []byte(r.Credential.Status.ClientKeyData)); err != nil {
		t.Errorf("%s: %v", node, err)
	}
	if err := r.Leaf.CheckSignatureFrom(shared.ClientCA().Certificate()); err != nil {
		t.Errorf("%s: %v", node, err)
	}
	if r.Leaf.Subject.CommonName != "system:node:"+node || now.After(r.Leaf.NotAfter) || now.Before(r.Leaf.NotBefore) {
		t.Errorf("%s: it printed a certificate of %q, valid from %s until %s", node, r.Leaf.Subject.CommonName, r.Leaf.NotBefore, r.Leaf.NotAfter)
	}
}
