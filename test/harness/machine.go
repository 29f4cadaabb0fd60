// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// Machine is a computer with a software TPM, on which the plugin runs.
type Machine struct {
	// Name is the name of its Node.
	Name string
	// ProviderID is given to the plugin. If it is empty, the plugin looks for it.
	ProviderID string
	// Dir has all of its files, including the TPM's lock.
	Dir  string
	Chip *swtpm.TPM
	// Device is the TPM's path for the plugin: the chip, unless a test puts a proxy before it. It
	// is empty if the machine has no TPM.
	Device string
	// Plugin is the program that it runs.
	Plugin string
	// Bootstrap is the path of its bootstrap kubeconfig.
	Bootstrap string
	// Signer is the name of the signer. Default: the plugin's.
	Signer string
	// Args are added to the plugin's flags.
	Args []string
}

// NewMachine returns a machine with a TPM of its own, which ends with the test, and without a
// credential.
func NewMachine(t testing.TB, plugin, name string, chip swtpm.Options) *Machine {
	t.Helper()
	return MachineOf(t.TempDir(), swtpm.Start(t, chip), plugin, name)
}

// MachineOf returns a machine with existing hardware.
func MachineOf(dir string, chip *swtpm.TPM, plugin, name string) *Machine {
	return &Machine{
		Name: name, ProviderID: "test://" + name, Dir: dir, Chip: chip, Device: chip.Socket(), Plugin: plugin,
		Bootstrap: filepath.Join(dir, "bootstrap.kubeconfig"),
	}
}

// Certs is the certificate directory.
func (m *Machine) Certs() cache.Dir { return cache.At(filepath.Join(m.Dir, "certs")) }

// Flags returns the flags that the kubelet's kubeconfig passes to the plugin.
func (m *Machine) Flags() []string {
	flags := []string{"--node-name=" + m.Name, "--cert-dir=" + m.Certs().Path(), "--runtime-dir=" + m.Dir, "--bootstrap-kubeconfig=" + m.Bootstrap}
	if m.ProviderID != "" {
		flags = append(flags, "--provider-id="+m.ProviderID)
	}
	if m.Device != "" {
		flags = append(flags, "--tpm-device="+m.Device)
	}
	if m.Signer != "" {
		flags = append(flags, "--signer-name="+m.Signer)
	}
	return append(flags, m.Args...)
}

// Run runs the plugin once, as a kubelet of the cluster does.
func (m *Machine) Run(t testing.TB, cluster *testbed.ControlPlane, extra ...string) Result {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), m.Plugin, append(m.Flags(), extra...)...) //nolint:gosec // G204: the test built it
	cmd.Env = ExecEnv(cluster)
	return RunPlugin(t, cmd)
}

// Enrols runs the plugin until it prints a certificate: a new one, or the one that the machine has.
func (m *Machine) Enrols(t testing.TB, cluster *testbed.ControlPlane) Result {
	t.Helper()
	r := m.Run(t, cluster)
	if r.Code != 0 || r.Leaf.Subject.CommonName != "system:node:"+m.Name {
		t.Fatalf("%s: exit code %d: %s", m.Name, r.Code, r.Stderr)
	}
	return r
}

// RemoveState removes everything that the plugin remembers.
func (m *Machine) RemoveState(t testing.TB) {
	t.Helper()
	WorkerEnds(t, m.Certs())
	Must(t, os.RemoveAll(m.Certs().Path()))
}

// Install puts a certificate of the cluster for a node into a certificate directory, in place of
// any other. The state says that it was issued an hour ago, so that the next one does not count as
// hasty.
func Install(t testing.TB, cluster *testbed.ControlPlane, certs cache.Dir, node string, notBefore, notAfter time.Time) *cache.Pair {
	t.Helper()
	issued, err := cluster.ClientCA().IssueClient("system:node:"+node, []string{"system:nodes"}, notBefore, notAfter)
	Must(t, err)
	pair, err := cache.ParsePair(append(bytes.Clone(issued.CertPEM), issued.KeyPEM...))
	Must(t, err)
	pair.Origin = &cache.Origin{Server: cluster.ServerURL(), CertificateAuthorityData: cluster.ServerCA()}
	lock, err := certs.WaitLock(t.Context())
	Must(t, err)
	defer lock.Unlock()
	Must(t, lock.Install(pair))
	state, err := certs.State()
	Must(t, err)
	if !state.Issued.IsZero() {
		state.Issued = state.Issued.Add(-time.Hour)
		Must(t, lock.SetState(state))
	}
	return pair
}

// Inventory returns the output of identify on machines: a document for each.
func Inventory(t testing.TB, machines ...*Machine) []byte {
	t.Helper()
	var all bytes.Buffer
	for _, m := range machines {
		cmd := exec.CommandContext(t.Context(), m.Plugin, append([]string{"identify"}, m.Flags()...)...) //nolint:gosec // G204: the test built it
		r := Run(t, cmd)
		if r.Code != 0 {
			t.Fatalf("identify on %s: exit code %d: %s", m.Name, r.Code, r.Stderr)
		}
		all.WriteString("---\n" + r.Stdout)
	}
	return all.Bytes()
}

// TestNode returns the name of a Node that no other test has.
func TestNode(t testing.TB) string {
	return strings.ToLower(strings.NewReplacer("/", ".", "_", "-").Replace(t.Name()))
}

// ExpiredToken returns a bootstrap token that the API server no longer accepts.
func ExpiredToken(t testing.TB, cluster *testbed.ControlPlane) string {
	t.Helper()
	token, err := cluster.CreateBootstrapToken(t.Context(), 2*time.Second)
	Must(t, err)
	config := cluster.AdminConfig()
	config.BearerToken, config.CertData, config.KeyData = token, nil, nil
	client, err := kubernetes.NewForConfig(config)
	Must(t, err)
	// For 10 s the API server remembers that the token was good.
	Eventually(t, 30*time.Second, "the token has expired", func() bool {
		_, err := client.AuthenticationV1().SelfSubjectReviews().Create(t.Context(), &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
		return apierrors.IsUnauthorized(err)
	})
	return token
}

// Requests returns the requests of a cluster that claim a node name: hellos, and others.
func Requests(t testing.TB, cluster *testbed.ControlPlane, node string) (hellos, others []certificatesv1.CertificateSigningRequest) {
	t.Helper()
	list, err := cluster.Client().CertificatesV1().CertificateSigningRequests().List(context.WithoutCancel(t.Context()), metav1.ListOptions{})
	Must(t, err)
	for _, item := range list.Items {
		block, _ := pem.Decode(item.Spec.Request)
		request, err := x509.ParseCertificateRequest(block.Bytes)
		switch {
		case err != nil || request.Subject.CommonName != "system:node:"+node:
		case item.Spec.SignerName == attestation.HelloSignerName:
			hellos = append(hellos, item)
		default:
			others = append(others, item)
		}
	}
	return hellos, others
}
