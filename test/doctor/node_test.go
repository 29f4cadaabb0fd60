// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/checkup"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/doctor"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/attestor"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// node is a machine with a software TPM, a bootstrap kubeconfig, a kubelet.conf and a kubelet, of
// which there is only what /proc shows.
type node struct {
	*bed
	t                                 *testing.T
	name, home, proc, conf, bootstrap string
	token                             string
	dir                               cache.Dir
	chip                              *swtpm.Proxy
	issuer                            *swtpm.TPM
	device                            string
	server                            *testbed.Proxy
	uid                               uint32 // who runs doctor
}

// newNode is a node whose requests are answered.
func newNode(t *testing.T) *node {
	t.Helper()
	n := newUnansweredNode(t)
	n.startAttestor()
	return n
}

// startAttestor answers the node's requests from now on.
func (n *node) startAttestor() { attestor.Start(n.t, n.ControlPlane, n.name, n.issuer) }

func newUnansweredNode(t *testing.T) *node {
	t.Helper()
	chip := swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256"}})
	home := t.TempDir()
	n := &node{
		bed: shared, t: t, home: home, name: harness.TestNode(t),
		proc: filepath.Join(home, "proc"), conf: filepath.Join(home, "kubelet.conf"), bootstrap: filepath.Join(home, "bootstrap-kubelet.conf"),
		dir: cache.At(filepath.Join(home, "certs")), chip: swtpm.NewProxy(t, chip),
	}
	n.device = n.chip.Socket()
	var err error
	if n.server, err = testbed.NewProxy(n.ServerURL()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = n.server.Close() })
	if n.token, err = n.CreateBootstrapToken(t.Context(), time.Hour); err != nil {
		t.Fatal(err)
	}
	n.write(n.bootstrap, n.BootstrapKubeconfig(n.token, testbed.WithServer(n.server.URL())))
	n.write(filepath.Join(n.proc, "4242", "comm"), []byte("kubelet\n"))
	n.write(filepath.Join(n.proc, "4242", "cmdline"),
		[]byte(strings.Join([]string{"/usr/bin/kubelet", "--kubeconfig=" + n.conf, "--rotate-certificates=false", "--hostname-override=" + n.name, ""}, "\x00")))
	n.write(filepath.Join(home, "config.yaml"), []byte("apiVersion: authenticator.cluster.x-k8s.io/v1alpha1\nkind: KubeletAuthenticatorConfiguration\n"))
	n.plugins(append([]string{"kubeconfig", "--write=" + n.conf}, n.flags()...)...)
	n.issuer = chip
	return n
}

func (n *node) write(path string, data []byte) {
	n.t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		n.t.Fatal(err)
	}
	if err := os.WriteFile(path, data, 0o600); err != nil {
		n.t.Fatal(err)
	}
}

// flags are what the kubelet's kubeconfig gives the plugin.
func (n *node) flags() []string {
	return []string{
		"--config=" + filepath.Join(n.home, "config.yaml"), "--node-name=" + n.name, "--cert-dir=" + n.dir.Path(), "--runtime-dir=" + filepath.Join(n.home, "run"),
		"--bootstrap-kubeconfig=" + n.bootstrap, "--tpm-device=" + n.device, "--provider-id=test://" + n.name, "--kubelet-kubeconfig=" + n.conf,
	}
}

// plugins runs the plugin, which has to succeed.
func (n *node) plugins(args ...string) {
	n.t.Helper()
	if out, err := exec.CommandContext(n.t.Context(), n.plugin, args...).CombinedOutput(); err != nil {
		n.t.Fatalf("%v: %s", err, out)
	}
}

// enrol gets the node its first certificate, and waits for the worker's end.
func (n *node) enrol() {
	n.t.Helper()
	n.plugins(n.flags()...)
	harness.WorkerEnds(n.t, n.dir)
}

// examination is what one run of doctor came to.
type examination struct {
	report doctor.Report
	code   int
	took   time.Duration
	output string
}

// examine runs doctor. Whatever is wrong, all checks are reported, nothing is changed or filed, and
// no secret is shown.
func (n *node) examine(args ...string) examination {
	n.t.Helper()
	before, filed := n.tree(), n.requests()
	var out, errs strings.Builder
	cmd := exec.CommandContext(n.t.Context(), n.plugin, append(append([]string{"doctor", "--output=json", "--proc=" + n.proc}, n.flags()...), args...)...)
	cmd.Stdout, cmd.Stderr, cmd.Dir = &out, &errs, "/"
	if n.uid != 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: n.uid, Gid: n.uid}}
	}
	began := time.Now()
	err := cmd.Run()
	if cmd.ProcessState == nil {
		n.t.Fatal(err)
	}
	e := examination{code: cmd.ProcessState.ExitCode(), took: time.Since(began), output: out.String() + errs.String()}
	if err := json.Unmarshal([]byte(out.String()), &e.report); err != nil {
		n.t.Fatalf("exit code %d: %v: %s", e.code, err, e.output)
	}
	if len(e.report.Checks) != len(doctor.Checks()) {
		n.t.Errorf("%d checks are reported, not %d", len(e.report.Checks), len(doctor.Checks()))
	}
	if after := n.tree(); after != before {
		n.t.Errorf("it changed\n%s\nto\n%s", before, after)
	}
	if after := n.requests(); !slices.Equal(after, filed) {
		n.t.Errorf("requests: %v, before: %v", after, filed)
	}
	_, secret, _ := strings.Cut(n.token, ".")
	if strings.Contains(e.output, secret) || strings.Contains(e.output, "PRIVATE KEY") {
		n.t.Errorf("it shows a secret: %s", e.output)
	}
	if want := map[bool]int{true: 31}[len(e.report.Checks.Named(checkup.Failure)) > 0]; e.code != want {
		n.t.Errorf("exit code %d, want %d", e.code, want)
	}
	return e
}

// wantFailed checks which checks fail, and that no other does.
func (n *node) wantFailed(e examination, names ...string) {
	n.t.Helper()
	if got := e.report.Checks.Named(checkup.Failure); !slices.Equal(got, names) {
		n.t.Errorf("failed: %q, want %q:\n%s", got, names, e.output)
	}
}

func (n *node) want(e examination, status checkup.Status, says string, names ...string) {
	n.t.Helper()
	for _, name := range names {
		i := slices.IndexFunc(e.report.Checks, func(r checkup.Result) bool { return r.Name == name })
		if r := e.report.Checks[i]; r.Status != status || !strings.Contains(r.Message+" "+r.Remedy, says) {
			n.t.Errorf("%+v, want %s, and to say %q", r, status, says)
		}
	}
}

// requests are the names of all CertificateSigningRequests.
func (n *node) requests() []string {
	n.t.Helper()
	list, err := n.Client().CertificatesV1().CertificateSigningRequests().List(n.t.Context(), metav1.ListOptions{})
	if err != nil {
		n.t.Fatal(err)
	}
	names := []string{}
	for _, item := range list.Items {
		names = append(names, item.Name)
	}
	slices.Sort(names)
	return names
}

// tree describes all the node's files but the TPM's lock. The directory that this is in may appear,
// and nothing else in it.
func (n *node) tree() string {
	n.t.Helper()
	var out strings.Builder
	run := filepath.Join(n.home, "run")
	err := filepath.WalkDir(n.home, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if path == n.home || path == run || path == filepath.Join(run, tpm.LockFile) {
			return nil
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		_, _ = fmt.Fprintln(&out, path, info.Mode(), info.ModTime(), info.Size())
		return nil
	})
	if err != nil {
		n.t.Fatal(err)
	}
	return out.String()
}
