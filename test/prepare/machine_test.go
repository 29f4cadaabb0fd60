// SPDX-License-Identifier: Apache-2.0

package prepare

import (
	"bytes"
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
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

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

// newMachine returns a machine with a configuration file, to which settings are added, and a bootstrap kubeconfig of kubeadm's.
func newMachine(t *testing.T, settings ...string) *machine {
	t.Helper()
	root := t.TempDir()
	name := strings.ToLower(strings.NewReplacer("/", ".", "_", "-").Replace(t.Name()))
	m := &machine{
		t: t, cluster: shared.ControlPlane, name: name, root: root, signer: "example.com/" + name, certs: cache.At(filepath.Join(root, "certs")),
		config: filepath.Join(root, "config.yaml"), kubeconfig: filepath.Join(root, "etc/kubelet.conf"), bootstrap: filepath.Join(root, "etc/bootstrap-kubelet.conf"),
		envFile: filepath.Join(root, "run/kubelet.env"), manifests: filepath.Join(root, "etc/manifests"),
	}
	m.must(os.MkdirAll(m.manifests, 0o755))
	m.configure(settings...)
	m.join(m.cluster)
	t.Cleanup(m.endWorker)
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

// endWorker ends a worker that the test left behind.
func (m *machine) endWorker() {
	id := m.certs.Worker()
	if !id.Alive() {
		return
	}
	if p, err := os.FindProcess(id.PID); err == nil {
		_ = p.Kill()
	}
	m.eventually("the worker ends", func() bool { return !id.Alive() })
}

func (m *machine) eventually(what string, condition func() bool) {
	m.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !condition(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			m.t.Fatalf("not in time: %s", what)
		}
	}
}

// result is what came of a call of the plugin.
type result struct {
	code           int
	stdout, stderr string
	took           time.Duration
}

// run runs the plugin with the machine's configuration.
func (m *machine) run(args ...string) result {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(m.t.Context()), time.Minute)
	defer cancel()
	return execute(m.t, exec.CommandContext(ctx, shared.plugin, append(args, "--config="+m.config)...))
}

func execute(t *testing.T, cmd *exec.Cmd) result {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &stdout, &stderr, 5*time.Second
	began := time.Now()
	err := cmd.Run()
	r := result{stdout: stdout.String(), stderr: stderr.String(), took: time.Since(began)}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		r.code = exit.ExitCode()
	} else if err != nil {
		t.Fatal(err)
	}
	return r
}

func (m *machine) prepare() result {
	m.t.Helper()
	r := m.run("prepare", "--env-file="+m.envFile, "--manifests="+m.manifests)
	if r.stdout != "" {
		m.t.Errorf("on standard output: %s", r.stdout)
	}
	return r
}

// want checks the exit code and what was said.
func (r result) want(t *testing.T, code int, says ...string) {
	t.Helper()
	if r.code != code {
		t.Errorf("exit code %d, not %d: %s", r.code, code, r.stderr)
	}
	for _, text := range says {
		if !strings.Contains(r.stderr, text) {
			t.Errorf("it does not say %q: %s", text, r.stderr)
		}
	}
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
	m.eventually("a request is filed", func() bool {
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
