// SPDX-License-Identifier: Apache-2.0

package policies

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/oddrequest"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const module = "../.."

// liveAudit has all that the controller and an operator do, and all that anybody does with
// requests.
const liveAudit = `apiVersion: audit.k8s.io/v1
kind: Policy
rules:
- level: Metadata
  omitStages: [RequestReceived]
  users: [` + controllerUser + `, ` + operatorUser + `, ` + suspenderUser + `]
- level: Metadata
  omitStages: [RequestReceived]
  resources:
  - group: certificates.k8s.io
    resources: [certificatesigningrequests, "certificatesigningrequests/*"]
- level: None
`

// live is a cluster of its own. The controller runs in it as it is shipped, under its service
// account. Machines with TPMs run the plugin.
type live struct {
	*testbed.ControlPlane
	admin, bootstrapper kubernetes.Interface
	adminKubeconfig     string
	bootstrapKubeconfig string
	dir, plugin, binary string
	// controller is the last started controller, and started counts them.
	controller *controllerprocess.Controller
	started    int
	// env is added to the environment of controllers, args to their arguments.
	env, args []string
}

// newLive returns a cluster as kubeadm leaves it, without our manifests yet.
func newLive(t *testing.T) *live {
	t.Helper()
	ctx, dir := t.Context(), t.TempDir()
	l := &live{
		dir: dir, plugin: filepath.Join(dir, "kubelet-authenticator"), binary: filepath.Join(dir, "node-attestation-controller"),
		adminKubeconfig: filepath.Join(dir, "admin.kubeconfig"), bootstrapKubeconfig: filepath.Join(dir, "bootstrap.kubeconfig"),
	}
	harness.Must(t, compile.Program(ctx, module, l.plugin, "./cmd/kubelet-authenticator"))
	harness.Must(t, controllerprocess.Build(ctx, module, l.binary))
	var err error
	l.ControlPlane, err = testbed.Start(ctx, testbed.Options{Progress: os.Stderr, AuditPolicy: []byte(liveAudit)})
	harness.Must(t, err)
	t.Cleanup(func() {
		if l.controller != nil {
			ended(t, l.controller.Stop())
		}
		ended(t, l.Stop())
	})
	l.admin = l.Client()
	harness.Must(t, l.WriteKubeconfig(l.adminKubeconfig, l.AdminUser()))
	harness.Must(t, l.BindKubeadmBootstrap(ctx))
	token, err := l.CreateBootstrapToken(ctx, time.Hour)
	harness.Must(t, err)
	l.bootstrapper, err = clientOf(l.BootstrapKubeconfig(token))
	harness.Must(t, err)
	harness.Must(t, os.WriteFile(l.bootstrapKubeconfig, l.BootstrapKubeconfig(token), 0o600))
	return l
}

// ended reports how a process ended that should run until the end of the test.
func ended(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
}

func (l *live) install(t *testing.T) {
	t.Helper()
	harness.Must(t, controllerprocess.Install(t.Context(), l.ControlPlane, module))
}

// start starts a controller, in the place of the one that runs. With no CA it is not ready; see
// controllerprocess.Controller.Ready.
func (l *live) start(t *testing.T, configure func(*config.Config)) {
	t.Helper()
	l.stop(t)
	l.started++
	dir := filepath.Join(l.dir, fmt.Sprintf("controller-%d", l.started))
	harness.Must(t, os.Mkdir(dir, 0o700))
	var err error
	l.controller, err = controllerprocess.New(controllerprocess.Options{ControlPlane: l.ControlPlane, Dir: dir, Binary: l.binary, Env: l.env, Args: l.args, Configure: configure})
	harness.Must(t, err)
	harness.Must(t, l.controller.Start(t.Context()))
}

// setEnv adds to the environment of the controllers that are started until the test ends.
func (l *live) setEnv(t *testing.T, variable string) {
	t.Helper()
	before := l.env
	l.env = append(slices.Clone(before), variable)
	t.Cleanup(func() { l.env = before })
}

// stop ends the controller as a pod is ended: it releases its Lease.
func (l *live) stop(t *testing.T) {
	t.Helper()
	if l.controller != nil {
		harness.Must(t, l.controller.Stop())
	}
}

// startReady starts a controller and waits until it is ready.
func (l *live) startReady(t *testing.T, configure func(*config.Config)) {
	t.Helper()
	l.start(t, configure)
	harness.Must(t, l.controller.Ready(t.Context()))
}

// kubectl runs kubectl as an administrator.
func (l *live) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := l.RunKubectl(t.Context(), l.adminKubeconfig, args...)
	harness.Must(t, err)
	return out
}

func (l *live) get(t *testing.T, name string) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	csr, err := l.admin.CertificatesV1().CertificateSigningRequests().Get(t.Context(), name, metav1.GetOptions{})
	harness.Must(t, err)
	return csr
}

func (l *live) requests(t *testing.T) []certificatesv1.CertificateSigningRequest {
	t.Helper()
	list, err := l.admin.CertificatesV1().CertificateSigningRequests().List(t.Context(), metav1.ListOptions{})
	harness.Must(t, err)
	return list.Items
}

// file files a request as a bootstrap token.
func (l *live) file(t *testing.T, signer string, options ...func(*certificatesv1.CertificateSigningRequest)) string {
	t.Helper()
	name, err := file(t.Context(), l.bootstrapper, signer, options...)
	harness.Must(t, err)
	return name
}

// hopeless makes a request that is denied at once: it has no evidence, and requests too much.
func hopeless(csr *certificatesv1.CertificateSigningRequest) { ask(csr, []byte("{}")) }

// filesHopeless files such a request with the machine's own certificate.
func (m *machine) filesHopeless(t *testing.T) string {
	t.Helper()
	name, err := file(t.Context(), m.nodeClient(t, m.Name), tpmSigner, named("system:node:"+m.Name, "system:nodes"), hopeless)
	harness.Must(t, err)
	return name
}

// hopelessProof makes such a request whose evidence is a proof without a hello.
func hopelessProof(csr *certificatesv1.CertificateSigningRequest) {
	proof, err := oddrequest.Proof("node-csr-that-is-not-there")
	if err != nil {
		panic(err)
	}
	ask(csr, proof)
}

// ask puts evidence into a request that requests too much.
func ask(csr *certificatesv1.CertificateSigningRequest, evidence []byte) {
	block, _ := pem.Decode(csr.Spec.Request)
	content, err := attestation.Request{PKCS10: block.Bytes, Provider: "tpm", Data: evidence}.Marshal()
	if err != nil {
		panic(err)
	}
	csr.Spec.Request, csr.Spec.Usages = content, append(csr.Spec.Usages, certificatesv1.UsageServerAuth)
}

// reasonOf waits until a request has a condition, and returns its reason.
func (l *live) reasonOf(t *testing.T, name string, kind certificatesv1.RequestConditionType) (reason string) {
	t.Helper()
	harness.Eventually(t, patience, string(kind)+": "+name, func() bool {
		for _, c := range l.get(t, name).Status.Conditions {
			if c.Type == kind {
				reason = c.Reason
				return true
			}
		}
		return false
	})
	return reason
}

// machine is a computer with a TPM, on which the plugin runs.
type machine struct {
	*live
	*harness.Machine
}

// newMachine returns a machine that the inventory does not have yet.
func (l *live) newMachine(t *testing.T, name string) *machine {
	t.Helper()
	m := harness.NewMachine(t, l.plugin, name, swtpm.Options{Certified: []string{"ecc-p256"}})
	m.Bootstrap = l.bootstrapKubeconfig
	return &machine{l, m}
}

// inventoried makes an inventory of the machines, by what identify prints on them.
func (l *live) inventoried(t *testing.T, machines ...*machine) {
	t.Helper()
	all := []byte("apiVersion: authenticator.cluster.x-k8s.io/v1alpha1\nkind: MachineInventory\nmachines: []\n")
	for _, m := range machines {
		all = append(all, harness.Inventory(t, m.Machine)...)
	}
	harness.Must(t, controllerprocess.SetInventory(t.Context(), l.ControlPlane, all))
}

// enrolment is a running plugin.
type enrolment struct {
	*machine
	process        *exec.Cmd
	stdout, stderr bytes.Buffer
	ended          chan error
}

// begin removes a machine's state and starts the plugin, without waiting for it.
func (m *machine) begin(t *testing.T) *enrolment {
	t.Helper()
	m.RemoveState(t)
	e := &enrolment{machine: m, process: exec.CommandContext(context.WithoutCancel(t.Context()), m.Plugin, m.Flags()...), ended: make(chan error, 1)}
	e.process.Env = harness.ExecEnv(m.ControlPlane)
	e.process.Stdout, e.process.Stderr = &e.stdout, &e.stderr
	harness.Must(t, e.process.Start())
	go func() { e.ended <- e.process.Wait() }()
	t.Cleanup(func() { _ = e.process.Process.Kill() })
	return e
}

// succeeds waits for the certificate, which the API server's CA must have issued for this node.
func (e *enrolment) succeeds(t *testing.T) *x509.Certificate {
	t.Helper()
	select {
	case err := <-e.ended:
		if err != nil {
			t.Fatalf("the plugin: %v\n%s\n%s", err, e.stderr.String(), e.controller.LogTail())
		}
	case <-time.After(2 * patience):
		t.Fatalf("no certificate within %s\n%s", 2*patience, e.controller.LogTail())
	}
	_, leaf := harness.ParseCredential(t, e.stdout.String())
	roots := x509.NewCertPool()
	roots.AddCert(e.ClientCA().Certificate())
	if _, err := leaf.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
		t.Fatal(err)
	}
	if leaf.Subject.CommonName != "system:node:"+e.Name {
		t.Fatalf("a certificate for %s", leaf.Subject)
	}
	return leaf
}

// ofNode returns the requests of a signer for a node's name.
func (l *live) ofNode(t *testing.T, signer, node string) (found []certificatesv1.CertificateSigningRequest) {
	t.Helper()
	for _, csr := range l.requests(t) {
		block, _ := pem.Decode(csr.Spec.Request)
		request, err := x509.ParseCertificateRequest(block.Bytes)
		harness.Must(t, err)
		if csr.Spec.SignerName == signer && strings.TrimPrefix(request.Subject.CommonName, "system:node:") == node {
			found = append(found, csr)
		}
	}
	return found
}
