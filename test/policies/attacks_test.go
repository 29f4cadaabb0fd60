// SPDX-License-Identifier: Apache-2.0

package policies

import (
	"crypto/x509"
	"encoding/pem"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	certManagerSigner = "clusterissuers.cert-manager.io/node-ca"
	certManagerPolicy = "node-attestation-cert-manager"
	kcmApprover       = "system:serviceaccount:kube-system:certificate-controller"
	approverRoles     = "system:certificates.k8s.io:certificatesigningrequests:"
)

// autoApproving are kubeadm's bindings, by which kube-controller-manager approves without evidence:
// name, role, group.
var autoApproving = [][3]string{
	{"kubeadm:node-autoapprove-bootstrap", approverRoles + "nodeclient", testbed.BootstrapGroup},
	{"kubeadm:node-autoapprove-certificate-rotation", approverRoles + "selfnodeclient", "system:nodes"},
}

// nodeClient is the credential of a node that joined in some earlier way.
func (l *live) nodeClient(t *testing.T, name string) kubernetes.Interface {
	t.Helper()
	pair, err := l.ClientCA().IssueClient("system:node:"+name, []string{"system:nodes"}, time.Now().Add(-time.Hour), time.Now().Add(time.Hour))
	harness.Must(t, err)
	client, err := clientOf(l.Kubeconfig(testbed.CertificateUser(pair)))
	harness.Must(t, err)
	return client
}

// copied files a copy of a request under a signer, as another bootstrap token.
func (l *live) copied(t *testing.T, original certificatesv1.CertificateSigningRequest, signer string) string {
	t.Helper()
	return l.file(t, signer, func(csr *certificatesv1.CertificateSigningRequest) {
		csr.Spec.Request, csr.Spec.Usages, csr.Spec.ExpirationSeconds = original.Spec.Request, original.Spec.Usages, original.Spec.ExpirationSeconds
	})
}

// A bootstrap token and a node's credential are in the wrong hands. Requests lie in wait from
// before the policies; then `kubeadm upgrade` brings both auto-approving bindings back, and starts
// kube-controller-manager again. It tries to approve each, as its audit log shows, and nothing
// comes of it, while an honest machine gets its certificate from the controller.
func TestBindingsComeBackInVain(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	l := newLive(t)
	for _, b := range autoApproving {
		harness.Must(t, l.admin.RbacV1().ClusterRoleBindings().Delete(ctx, b[0], metav1.DeleteOptions{}))
	}
	harness.Must(t, l.StartControllerManager(ctx))
	stolen := l.nodeClient(t, nodeName)
	attempts := map[string]string{"first, before the policies": l.file(t, builtinSigner)}
	fileAs := func(what string, client kubernetes.Interface) {
		name, err := file(ctx, client, builtinSigner)
		harness.Must(t, err)
		attempts[what] = name
	}
	fileAs("renewal, before the policies", stolen)
	approvedBefore := l.file(t, tpmSigner)
	harness.Must(t, decide(ctx, l.admin, approvedBefore, certificatesv1.CertificateApproved, nil))

	l.install(t)
	honest := l.newMachine(t, "honest")
	l.inventoried(t, honest)
	l.startReady(t, nil)
	if reason := l.reasonOf(t, approvedBefore, certificatesv1.CertificateFailed); reason != "ApprovedWithoutAttestation" {
		t.Errorf("a request that an administrator had approved failed: %s", reason)
	}

	mark, err := l.AuditMark()
	harness.Must(t, err)
	for _, b := range autoApproving {
		harness.Must(t, l.BindGroup(ctx, b[0], b[1], b[2]))
	}
	harness.Must(t, l.StopControllerManager())
	harness.Must(t, l.StartControllerManager(ctx))
	began := time.Now()
	attempts["first"] = l.file(t, builtinSigner)
	fileAs("renewal", stolen)
	leaf := honest.begin(t).succeeds(t)
	t.Logf("the honest machine has its certificate %s after the bindings were back", time.Since(began).Round(time.Millisecond))
	tried := maps.Clone(attempts)
	for _, signer := range []string{tpmSigner, builtinSigner} {
		for _, proof := range l.ofNode(t, tpmSigner, honest.Name) {
			attempts["copy of the proof under "+signer] = l.copied(t, proof, signer)
		}
		for _, hello := range l.ofNode(t, helloSigner, honest.Name) {
			attempts["copy of the hello under "+signer] = l.copied(t, hello, signer)
		}
	}
	for what, name := range attempts {
		if strings.Contains(what, "under "+builtinSigner) {
			tried[what] = name
		}
	}
	if len(attempts) != 8 || len(tried) != 6 {
		t.Fatalf("attempts %v, of which kube-controller-manager's %v", attempts, tried)
	}

	codes := map[string][]int{}
	harness.Eventually(t, patience, "kube-controller-manager tries to approve each", func() bool {
		clear(codes)
		events, err := l.AuditSince(mark)
		harness.Must(t, err)
		for _, e := range events {
			if e.User == kcmApprover && e.Subresource == "approval" {
				codes[e.Name] = append(codes[e.Name], e.Code)
			}
		}
		return !slices.ContainsFunc(slices.Collect(maps.Values(tried)), func(name string) bool { return !slices.Contains(codes[name], 403) })
	})
	// It tries again at growing intervals. That must not issue a certificate.
	time.Sleep(time.Until(began.Add(10 * time.Second)))
	for name, answers := range codes {
		// It tries each request until it is refused.
		if slices.ContainsFunc(answers, func(code int) bool { return !inVain(code) }) {
			t.Errorf("kube-controller-manager's approvals of %s were answered with %v", name, answers)
		}
	}
	for what, name := range attempts {
		csr := l.get(t, name)
		if hasCondition(csr, certificatesv1.CertificateApproved) || len(csr.Status.Certificate) > 0 {
			t.Errorf("%s: %+v", what, csr.Status)
		}
	}
	l.onlyFor(t, leaf)
	t.Run("kubectl attest", func(t *testing.T) { l.operates(t, honest) })
}

// onlyFor checks that there is one certificate, with this key.
func (l *live) onlyFor(t *testing.T, leaf *x509.Certificate) {
	t.Helper()
	issued := 0
	for _, csr := range l.requests(t) {
		if len(csr.Status.Certificate) == 0 {
			continue
		}
		issued++
		if block, _ := pem.Decode(csr.Status.Certificate); string(block.Bytes) != string(leaf.Raw) {
			t.Errorf("%s has another certificate", csr.Name)
		}
	}
	if issued != 1 {
		t.Errorf("%d certificates", issued)
	}
}

// certManager is an identity with the rights that cert-manager's chart gives to what issues for
// requests (v1.21, deploy/charts/cert-manager/templates/rbac.yaml).
func (l *live) certManager(t *testing.T) kubernetes.Interface {
	t.Helper()
	const name = "cert-manager"
	ctx, meta := t.Context(), metav1.ObjectMeta{Name: name}
	_, err := l.admin.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: meta}, metav1.CreateOptions{})
	harness.Must(t, err)
	_, err = l.admin.CoreV1().ServiceAccounts(name).Create(ctx, &corev1.ServiceAccount{ObjectMeta: meta}, metav1.CreateOptions{})
	harness.Must(t, err)
	_, err = l.admin.RbacV1().ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{certs}, Resources: []string{requests}, Verbs: []string{"get", "list", "watch", "update"}},
		{APIGroups: []string{certs}, Resources: []string{requests + "/status"}, Verbs: []string{"update", "patch"}},
		{APIGroups: []string{certs}, Resources: []string{"signers"}, ResourceNames: []string{"issuers.cert-manager.io/*", "clusterissuers.cert-manager.io/*"}, Verbs: []string{"sign"}},
	}}, metav1.CreateOptions{})
	harness.Must(t, err)
	_, err = l.admin.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: meta, RoleRef: rbacv1.RoleRef{APIGroup: rbac, Kind: "ClusterRole", Name: name},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: name, Namespace: name}},
	}, metav1.CreateOptions{})
	harness.Must(t, err)
	token, err := l.admin.CoreV1().ServiceAccounts(name).CreateToken(ctx, name, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	harness.Must(t, err)
	client, err := kubernetes.NewForConfig(&rest.Config{
		Host: l.ServerURL(), BearerToken: token.Status.Token, QPS: -1, TLSClientConfig: rest.TLSClientConfig{CAData: l.ServerCA()},
	})
	harness.Must(t, err)
	return client
}

// cert-manager issues certificates for approved requests. The test acts as cert-manager, with its
// rights and its steps.
func TestCertManagerIssues(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	l := newLive(t)
	issuer := l.certManager(t)
	tooEarly := l.file(t, certManagerSigner, annotated("experimental.cert-manager.io/request-is-ca", "true"))
	l.install(t)
	apply := []string{"apply", "--server-side", "--validate=strict", "--force-conflicts"}
	l.kubectl(t, append(apply, "-k", documentedOverlay(t, "cert-manager"))...)
	l.kubectl(t, append(apply, "-f", manifests+"/optional/cert-manager.yaml")...)

	// Before the controller runs, and decides. The API server has the overlay's lists a moment
	// later.
	harness.Eventually(t, patience, "machines may ask the issuer", func() bool {
		_, err := file(ctx, l.bootstrapper, certManagerSigner)
		return err == nil
	})
	bare := l.file(t, certManagerSigner)
	harness.Eventually(t, patience, "an administrator cannot approve", func() bool {
		return refusedBy(decide(ctx, l.admin, bare, certificatesv1.CertificateApproved, dryRun), approvalPolicy)
	})
	wantRefusedBy(t, decide(ctx, l.admin, bare, certificatesv1.CertificateApproved, nil), approvalPolicy)
	wantNoRight(t, decide(ctx, issuer, bare, certificatesv1.CertificateApproved, nil))
	for _, key := range []string{
		"experimental.cert-manager.io/request-is-ca", "experimental.cert-manager.io/request-duration",
		"experimental.cert-manager.io/private-key-secret-name", "venafi.experimental.cert-manager.io/custom-fields",
	} {
		harness.Eventually(t, patience, key+" is refused", func() bool {
			_, err := file(ctx, l.bootstrapper, certManagerSigner, annotated(key, "true"))
			return refusedBy(err, certManagerPolicy)
		})
		_, err := file(ctx, l.admin, "clusterissuers.cert-manager.io/another", annotated(key, "true"))
		want(t, err)
	}
	lifetime := func(seconds int32) func(*certificatesv1.CertificateSigningRequest) {
		return func(csr *certificatesv1.CertificateSigningRequest) { csr.Spec.ExpirationSeconds = &seconds }
	}
	_, err := file(ctx, l.bootstrapper, certManagerSigner, annotated("example.com/note", "x"), lifetime(90*24*3600))
	want(t, err)
	_, err = file(ctx, l.bootstrapper, certManagerSigner, lifetime(90*24*3600+1))
	wantRefusedBy(t, err, certManagerPolicy)
	controller := impersonating(t, l.AdminConfig(), controllerUser, "system:masters")
	wantRefusedBy(t, decide(ctx, controller, tooEarly, certificatesv1.CertificateApproved, nil), certManagerPolicy)

	m := l.newMachine(t, "issued-elsewhere")
	m.Signer = certManagerSigner
	l.inventoried(t, m)
	l.startReady(t, func(c *config.Config) {
		c.Signers = []config.Signer{{Name: certManagerSigner}}
		c.Signing = config.Signing{Mode: config.ApproveOnly}
	})
	for _, name := range []string{bare, tooEarly} {
		l.reasonOf(t, name, certificatesv1.CertificateDenied)
	}
	e := m.begin(t)
	var proof certificatesv1.CertificateSigningRequest
	harness.Eventually(t, patience, "the controller approves", func() bool {
		proofs := l.ofNode(t, certManagerSigner, m.Name)
		if len(proofs) != 1 || !hasCondition(&proofs[0], certificatesv1.CertificateApproved) {
			return false
		}
		proof = proofs[0]
		return true
	})
	block, _ := pem.Decode(proof.Spec.Request)
	chain, err := l.ClientCA().SignCSR(block.Bytes, time.Now().Add(-time.Minute), time.Now().Add(time.Hour))
	harness.Must(t, err)
	harness.Must(t, certify(ctx, issuer, proof.Name, chain, nil))
	leaf := e.succeeds(t)
	l.onlyFor(t, leaf)
	harness.Eventually(t, patience, "the certificate is noted", func() bool {
		noted := l.kubectl(t, "get", "nodeattestations", m.Name, "--namespace="+namespace, "--output=jsonpath={.status.certificates[*].requestUID}")
		return noted == string(proof.UID)
	})
	for _, hello := range l.ofNode(t, helloSigner, m.Name) {
		l.reasonOf(t, hello.Name, certificatesv1.CertificateDenied)
	}
}
