// SPDX-License-Identifier: Apache-2.0

package prepare

import (
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// patience is how long a test waits for what has to happen.
const patience = harness.Soon

// machine is one that kubeadm is joining to the cluster: all of its files are below root.
type machine struct {
	t       *testing.T
	cluster *testbed.ControlPlane
	name    string
	root    string
	signer  string
	certs   cache.Dir

	config, kubeconfig, bootstrap, envFile, manifests string
}

// newMachine returns a machine with a configuration file, to which settings are added, and a
// bootstrap kubeconfig of kubeadm's.
func newMachine(t *testing.T, settings ...string) *machine {
	t.Helper()
	root := t.TempDir()
	name := harness.TestNode(t)
	m := &machine{
		t: t, cluster: shared.ControlPlane, name: name, root: root, signer: "example.com/" + name, certs: cache.At(filepath.Join(root, "certs")),
		config: filepath.Join(root, "config.yaml"), kubeconfig: filepath.Join(root, "etc/kubelet.conf"), bootstrap: filepath.Join(root, "etc/bootstrap-kubelet.conf"),
		envFile: filepath.Join(root, "run/kubelet.env"), manifests: filepath.Join(root, "etc/manifests"),
	}
	m.must(os.MkdirAll(m.manifests, 0o755))
	m.configure(settings...)
	m.join(m.cluster)
	t.Cleanup(func() { harness.KillWorker(t, m.certs) })
	return m
}

func (m *machine) must(err error) {
	m.t.Helper()
	if err != nil {
		m.t.Fatal(err)
	}
}

func (m *machine) write(path string, data []byte) {
	m.t.Helper()
	m.must(os.WriteFile(path, data, 0o600))
}

// configure writes the configuration file: what is the machine's, and settings.
func (m *machine) configure(settings ...string) {
	m.t.Helper()
	lines := append([]string{
		"apiVersion: authenticator.cluster.x-k8s.io/v1alpha1", "kind: KubeletAuthenticatorConfiguration",
		"provider: insecure", "signerName: " + m.signer, "nodeName: " + m.name, "certDir: " + m.certs.Path(), "runtimeDir: " + m.root + "/run",
		"kubeletKubeconfig: " + m.kubeconfig, "kubeletBootstrapKubeconfig: " + m.bootstrap,
	}, settings...)
	m.write(m.config, []byte(strings.Join(lines, "\n")+"\n"))
}

// join leaves what kubeadm join has written when it starts the kubelet.
func (m *machine) join(cluster *testbed.ControlPlane) {
	m.t.Helper()
	token, err := cluster.CreateBootstrapToken(m.t.Context(), time.Hour)
	m.must(err)
	m.cluster = cluster
	m.write(m.bootstrap, cluster.BootstrapKubeconfig(token))
}

// run runs the plugin with the machine's configuration.
func (m *machine) run(args ...string) harness.Result {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(m.t.Context()), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, shared.plugin, append(args, "--config="+m.config)...)
	return harness.Run(m.t, cmd)
}

func (m *machine) prepare() harness.Result {
	m.t.Helper()
	r := m.run("prepare", "--env-file="+m.envFile, "--manifests="+m.manifests)
	if r.Stdout != "" {
		m.t.Errorf("on standard output: %s", r.Stdout)
	}
	return r
}

// requests returns the machine's requests.
func (m *machine) requests() []certificatesv1.CertificateSigningRequest {
	m.t.Helper()
	list, err := m.cluster.Client().CertificatesV1().CertificateSigningRequests().List(context.WithoutCancel(m.t.Context()), metav1.ListOptions{})
	m.must(err)
	var ours []certificatesv1.CertificateSigningRequest
	for _, item := range list.Items {
		if item.Spec.SignerName == m.signer {
			ours = append(ours, item)
		}
	}
	return ours
}

// sign waits for the machine's first open request and issues it, for a lifetime that began before.
func (m *machine) sign(ca *testbed.CA, lifetime time.Duration) {
	m.t.Helper()
	var open *certificatesv1.CertificateSigningRequest
	harness.Eventually(m.t, patience, "a request is filed", func() bool {
		for _, r := range m.requests() {
			if len(r.Status.Conditions) == 0 {
				open = &r
				return true
			}
		}
		return false
	})
	block, _ := pem.Decode(open.Spec.Request)
	certificate, err := ca.SignCSR(block.Bytes, time.Now().Add(-5*time.Minute), time.Now().Add(lifetime))
	m.must(err)
	ctx := context.WithoutCancel(m.t.Context())
	m.must(errors.Join(m.cluster.Approve(ctx, open.Name), m.cluster.SetCertificate(ctx, open.Name, certificate)))
}

// meanwhile does something beside a call, and returns what waits for it.
func meanwhile(do func()) (wait func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		do()
	}()
	return func() { <-done }
}

// whoami has kubectl use a kubeconfig as the kubelet does.
func (m *machine) whoami() string {
	m.t.Helper()
	out, err := m.cluster.RunKubectl(m.t.Context(), m.kubeconfig, "auth", "whoami", "-o", "jsonpath={.status.userInfo.username}")
	m.must(err)
	return out
}

func (m *machine) copied() bool {
	data, err := os.ReadFile(m.certs.File(cache.BootstrapFile))
	return err == nil && kubelet.IsCopy(data)
}

// tree describes all that is below the root: names, modes, times, content.
func (m *machine) tree() string {
	m.t.Helper()
	var out strings.Builder
	m.must(filepath.WalkDir(m.root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		_, _ = fmt.Fprint(&out, path, " ", info.Mode(), " ", info.ModTime())
		if info.Mode().IsRegular() {
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			_, _ = fmt.Fprintf(&out, " %q", data)
		}
		_, _ = fmt.Fprintln(&out)
		return nil
	}))
	return out.String()
}
