// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// cluster is a control plane with the packaged manifests and a controller.
type cluster struct {
	*testbed.ControlPlane
	controller *controllerprocess.Controller

	mu        sync.Mutex
	inventory [][]byte // what identify printed
}

// starting lets one cluster start after the other: on few processors all at once would take longer
// than each may.
var starting sync.Mutex

// newCluster starts one with the controller, whose configuration configure may change.
func newCluster(t *testing.T, configure func(*config.Config)) *cluster {
	t.Helper()
	return newClusterWith(t, testbed.Options{}, built.controller, configure)
}

// newClusterWith starts one with this program as the controller.
func newClusterWith(t *testing.T, options testbed.Options, controller string, configure func(*config.Config)) *cluster {
	t.Helper()
	starting.Lock()
	defer starting.Unlock()
	options.Progress = os.Stderr
	cp, err := testbed.Start(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(cp.Logs())
		}
		if err := cp.Stop(); err != nil {
			t.Error(err)
		}
	})
	// The nodes' right to file requests, without the bindings that approve them.
	if err := cp.BindGroup(t.Context(), "bootstrap", "system:node-bootstrapper", testbed.BootstrapGroup); err != nil {
		t.Fatal(err)
	}
	if err := controllerprocess.Install(t.Context(), cp, module); err != nil {
		t.Fatal(err)
	}
	c := &cluster{ControlPlane: cp}
	c.controller, err = controllerprocess.New(controllerprocess.Options{
		ControlPlane: cp, Dir: t.TempDir(), Binary: controller, Configure: configure,
	})
	if err != nil {
		t.Fatal(err)
	}
	c.startController(t)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(c.controller.LogTail())
		}
		if err := c.controller.Stop(); err != nil {
			t.Error(err)
		}
	})
	return c
}

func (c *cluster) startController(t *testing.T) {
	t.Helper()
	if err := c.controller.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := c.controller.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// machine is a computer with a software TPM, behind a proxy that counts, and a kubelet.
type machine struct {
	*cluster
	name    string
	dir     string   // for its files
	program string   // the plugin
	args    []string // of the plugin
	certs   cache.Dir
	tpm     *swtpm.Proxy
	kubelet *testbed.Kubelet
	version compile.KubeletComponents // of the kubelet
}

// newMachine returns one without a certificate, and without a credential to get one with.
func (c *cluster) newMachine(t *testing.T, name string) *machine {
	t.Helper()
	dir := t.TempDir()
	m := &machine{cluster: c, name: name, dir: dir, program: built.plugin, certs: cache.At(filepath.Join(dir, "certs")), version: built.kubelet}
	m.tpm = swtpm.NewProxy(t, swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256"}}))
	m.args = []string{
		"--provider=tpm", "--tpm-device=" + m.tpm.Socket(), "--node-name=" + name, "--provider-id=test://" + name,
		"--cert-dir=" + m.certs.Path(), "--runtime-dir=" + filepath.Join(dir, "run"),
	}
	return m
}

// newTokenMachine returns one with a bootstrap token of its own. args are added to the plugin's.
func (c *cluster) newTokenMachine(t *testing.T, name string, args ...string) *machine {
	t.Helper()
	m := c.newMachine(t, name)
	token, err := c.CreateBootstrapToken(t.Context(), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	bootstrap := filepath.Join(m.dir, "bootstrap.kubeconfig")
	if err := c.WriteKubeconfig(bootstrap, testbed.TokenUser(token)); err != nil {
		t.Fatal(err)
	}
	m.args = append(append(m.args, "--bootstrap-kubeconfig="+bootstrap), args...)
	return m
}

// identity is what identify prints on the machine, with flags added.
func (m *machine) identity(t *testing.T, args ...string) []byte {
	t.Helper()
	var stderr bytes.Buffer
	cmd := exec.CommandContext(t.Context(), m.program, append(append([]string{"identify"}, m.args...), args...)...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("identify: %v: %s", err, &stderr)
	}
	m.tpm.Reset() // what is counted is the node's doing
	return append([]byte("---\n"), out...)
}

// admit adds a machine to the inventory.
func (c *cluster) admit(t *testing.T, identity []byte) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.inventory = append(c.inventory, identity)
	c.writeInventory(t)
}

// dismiss takes a machine out of the inventory.
func (c *cluster) dismiss(t *testing.T, identity []byte) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.inventory = slices.DeleteFunc(c.inventory, func(other []byte) bool { return bytes.Equal(other, identity) })
	c.writeInventory(t)
}

func (c *cluster) writeInventory(t *testing.T) {
	t.Helper()
	if err := controllerprocess.SetInventory(t.Context(), c.ControlPlane, bytes.Join(c.inventory, nil)); err != nil {
		t.Fatal(err)
	}
}

// startKubelet starts the machine's kubelet, whose configuration may get more fields.
func (m *machine) startKubelet(t *testing.T, config string) {
	t.Helper()
	m.startKubeletWith(t, m.execKubeconfig(), config)
}

// execKubeconfig is the kubelet's, which names the plugin.
func (m *machine) execKubeconfig() []byte {
	return m.ExecKubeconfig("client.authentication.k8s.io/v1", m.program, m.args, nil, true)
}

func (m *machine) startKubeletWith(t *testing.T, kubeconfig []byte, config string) {
	t.Helper()
	m.startKubeletOf(t, testbed.KubeletOptions{Kubeconfig: kubeconfig, Config: config})
}

// startKubeletOf starts a kubelet of the machine's version and name.
func (m *machine) startKubeletOf(t *testing.T, options testbed.KubeletOptions) {
	t.Helper()
	options.Components, options.NodeName = m.version, m.name
	var err error
	m.kubelet, err = testbed.StartKubelet(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(m.kubelet.LogTail())
			m.showWorkerLog(t)
		}
		if err := m.kubelet.Remove(); err != nil {
			t.Error(err)
		}
		harness.KillWorker(t, m.certs)
	})
}

func (m *machine) showWorkerLog(t *testing.T) {
	if log, err := os.ReadFile(m.certs.File(cache.LogFile)); err == nil {
		t.Logf("--- worker ---\n%s", log)
	}
}

// leaf is the certificate that the plugin hands out, nil while there is none.
func (m *machine) leaf(t *testing.T) *x509.Certificate {
	t.Helper()
	pair, err := m.certs.Current()
	if err != nil {
		return nil
	}
	block, _ := pem.Decode(pair.Chain)
	leaf, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return leaf
}

// requests returns the requests for client certificates that claim the machine's name: hellos, and
// others.
func (m *machine) requests(t *testing.T) (hellos, proofs []certificatesv1.CertificateSigningRequest) {
	t.Helper()
	hellos, proofs = harness.Requests(t, m.ControlPlane, m.name)
	proofs = slices.DeleteFunc(proofs, func(r certificatesv1.CertificateSigningRequest) bool {
		return r.Spec.SignerName == certificatesv1.KubeletServingSignerName
	})
	return hellos, proofs
}
