// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-tpm/tpm2"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/checkup"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// A node that is as it should be: exit code 0, and no check but those that mean nothing here is
// left out.
func TestAllGood(t *testing.T) {
	n := newNode(t)
	n.enrol()
	e := n.examine()
	n.wantFailed(e)
	n.want(e, checkup.OK, "", "configuration", "tpm", "ek-certificate", "ek-template", "certificate-directory", "certificate", "bootstrap-kubeconfig", "clock", "api-server",
		"csr-create", "csr-watch", "signer", "kubelet", "kubelet-bootstrap", "kubelet-rotation", "kubelet-kubeconfig", "kubelet-exec")
	n.want(e, checkup.OK, "system:node:"+n.name, "certificate-accepted")
	n.want(e, checkup.OK, "its challenge answered within", "last-result")
	n.want(e, checkup.Skipped, "not needed", "bootstrap-credential")
	n.want(e, checkup.Skipped, "kubectl get clusterrolebindings", "auto-approve-bindings")
	t.Logf("it took %s", e.took)
	if e.report.Status != checkup.OK {
		t.Errorf("%s: %s", e.report.Status, e.output)
	}
}

// Before the first certificate the bootstrap credential is tried, and all that fails is that there
// is no certificate.
func TestBeforeTheFirstCertificate(t *testing.T) {
	n := newNode(t)
	e := n.examine()
	n.wantFailed(e, "certificate")
	n.want(e, checkup.OK, "system:bootstrap:", "bootstrap-credential")
	n.want(e, checkup.OK, "the bootstrap credential", "csr-create", "csr-watch")
}

func TestNoTPM(t *testing.T) {
	n := newNode(t)
	n.enrol()
	n.device = filepath.Join(n.home, "none")
	e := n.examine()
	n.wantFailed(e, "tpm")
	n.want(e, checkup.OK, "", "api-server", "csr-create", "certificate-accepted")
}

// A TPM that does not answer costs no more than the time that there is, and hides nothing.
func TestTPMThatHangs(t *testing.T) {
	n := newNode(t)
	n.enrol()
	release := n.chip.Hang(tpm2.TPMCCCreatePrimary)
	defer release()
	e := n.examine("--timeout=3s")
	n.wantFailed(e, "tpm")
	n.want(e, checkup.Failure, "TPM2_CreatePrimary", "tpm")
	n.want(e, checkup.OK, "", "api-server", "csr-create", "certificate-accepted")
	if e.took > 10*time.Second {
		t.Errorf("it took %s", e.took)
	}
}

func TestTPMThatRefuses(t *testing.T) {
	n := newNode(t)
	n.enrol()
	n.chip.Answer(tpm2.TPMCCCreatePrimary, tpm2.TPMRCFailure, 99)
	e := n.examine()
	n.wantFailed(e, "tpm")
	n.want(e, checkup.Failure, "TPM2_CreatePrimary", "tpm")
}

func TestExpiredToken(t *testing.T) {
	n := newNode(t)
	n.token = harness.ExpiredToken(t, n.ControlPlane)
	n.write(n.bootstrap, n.BootstrapKubeconfig(n.token))
	e := n.examine()
	n.wantFailed(e, "certificate", "bootstrap-credential")
	n.want(e, checkup.Failure, "(401)", "bootstrap-credential")
	n.want(e, checkup.OK, "", "tpm", "api-server", "bootstrap-kubeconfig", "clock")
	n.want(e, checkup.Skipped, "see bootstrap-credential", "csr-create", "csr-watch")
}

// A token that the API server knows, of somebody who may do nothing.
func TestTokenWithoutRights(t *testing.T) {
	n := newNode(t)
	accounts := n.Client().CoreV1().ServiceAccounts("default")
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "nobody"}}
	if _, err := accounts.Create(t.Context(), account, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	issued, err := accounts.CreateToken(t.Context(), "nobody", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	n.token = issued.Status.Token
	n.write(n.bootstrap, n.BootstrapKubeconfig(n.token))
	e := n.examine()
	n.wantFailed(e, "certificate", "csr-create", "csr-watch")
	n.want(e, checkup.OK, "system:serviceaccount:default:nobody", "bootstrap-credential")
	n.want(e, checkup.Failure, "(403)", "csr-create")
	n.want(e, checkup.Failure, "node-attestation-requester", "csr-create", "csr-watch")
	n.want(e, checkup.Skipped, "403", "signer")
}

func TestAPIServerDown(t *testing.T) {
	for name, mode := range map[string]testbed.Mode{"refuses": testbed.Refuse, "resets": testbed.Reset, "black hole": testbed.BlackHole} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.enrol()
			if err := n.server.SetMode(mode); err != nil {
				t.Fatal(err)
			}
			e := n.examine("--timeout=5s")
			n.wantFailed(e, "api-server")
			n.want(e, checkup.Failure, n.server.URL(), "api-server")
			n.want(e, checkup.OK, "", "tpm", "certificate", "certificate-directory", "kubelet-exec", "last-result")
			if e.took > 10*time.Second {
				t.Errorf("it took %s", e.took)
			}
		})
	}
}

func TestWrongCA(t *testing.T) {
	n := newNode(t)
	n.enrol()
	other, err := testbed.NewCA("other")
	if err != nil {
		t.Fatal(err)
	}
	n.write(n.bootstrap, n.BootstrapKubeconfig(n.token, testbed.WithServerCA(other.CertPEM())))
	if err := os.Remove(n.conf); err != nil {
		t.Fatal(err)
	}
	n.plugins(append([]string{"kubeconfig", "--write=" + n.conf}, n.flags()...)...)
	e := n.examine()
	n.wantFailed(e, "api-server")
	n.want(e, checkup.Failure, n.conf, "api-server")
	n.want(e, checkup.OK, "", "tpm", "certificate", "kubelet-exec")
}

func TestDirectoryTooOpen(t *testing.T) {
	n := newNode(t)
	n.enrol()
	for mode, status := range map[os.FileMode]checkup.Status{0o755: checkup.Warning, 0o777: checkup.Failure} {
		if err := os.Chmod(n.dir.Path(), mode); err != nil {
			t.Fatal(err)
		}
		e := n.examine()
		n.want(e, status, "chmod 0700", "certificate-directory")
		n.want(e, checkup.OK, "", "tpm", "api-server", "certificate", "csr-create", "csr-watch", "last-result", "kubelet-exec")
	}
}

// Without root: what cannot be seen is skipped, and is no failure.
func TestWithoutRoot(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("only root can become somebody else")
	}
	n := newNode(t)
	n.enrol()
	for _, dir := range []string{n.home, filepath.Dir(n.home)} {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	n.uid = 65534
	e := n.examine()
	n.want(e, checkup.Skipped, "root", "configuration", "certificate-directory", "certificate", "ek-template", "last-result", "bootstrap-kubeconfig", "bootstrap-credential", "kubelet-kubeconfig")
	n.want(e, checkup.Skipped, "", "tpm", "ek-certificate", "certificate-accepted", "csr-create", "csr-watch", "auto-approve-bindings")
	n.wantFailed(e)
}

// Where the node may look, the bindings that approve without attestation are named; else the
// command to look with.
func TestAutoApproveBindings(t *testing.T) {
	n := newNode(t)
	n.enrol()
	roles, bindings := n.Client().RbacV1().ClusterRoles(), n.Client().RbacV1().ClusterRoleBindings()
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "doctor"}, Rules: []rbacv1.PolicyRule{{
		APIGroups: []string{"rbac.authorization.k8s.io"}, Resources: []string{"clusterrolebindings"}, Verbs: []string{"list"},
	}}}
	if _, err := roles.Create(t.Context(), role, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := n.BindGroup(t.Context(), "doctor", "doctor", "system:nodes"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := bindings.Delete(context.WithoutCancel(t.Context()), "doctor", metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	e := n.examine()
	n.wantFailed(e)
	n.want(e, checkup.Warning, "kubeadm:node-autoapprove-bootstrap", "auto-approve-bindings")
	n.want(e, checkup.Warning, "kubeadm:node-autoapprove-certificate-rotation", "auto-approve-bindings")
	all, err := bindings.List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range all.Items {
		if strings.HasPrefix(b.Name, "kubeadm:node-autoapprove-") {
			if err := bindings.Delete(t.Context(), b.Name, metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
		}
	}
	n.want(n.examine(), checkup.OK, "", "auto-approve-bindings")
}
