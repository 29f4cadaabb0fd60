// SPDX-License-Identifier: Apache-2.0

// Package policies tests the manifests in packaging/kubernetes on a real API server: hostile
// attempts beside their honest counterparts.
package policies

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/policyset"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	manifests      = "../../packaging/kubernetes"
	namespace      = "node-attestation-system"
	account        = "node-attestation-controller"
	controllerUser = "system:serviceaccount:" + namespace + ":" + account

	helloSigner    = "cluster.x-k8s.io/attestation-hello"
	tpmSigner      = "cluster.x-k8s.io/kube-apiserver-client-kubelet-tpm"
	insecureSigner = "cluster.x-k8s.io/kube-apiserver-client-kubelet-insecure"
	servingSigner  = "cluster.x-k8s.io/kubelet-serving-tpm"
	builtinSigner  = "kubernetes.io/kube-apiserver-client-kubelet"
	clientSigner   = certificatesv1.KubeAPIServerClientSignerName
	kubeletServing = certificatesv1.KubeletServingSignerName

	approvalPolicy     = "node-attestation-approval"
	annotationPolicy   = "node-attestation-annotations"
	certificatesPolicy = "node-attestation-certificates"
	sizePolicy         = "node-attestation-size"
	metadataPolicy     = "node-attestation-metadata"
	signersPolicy      = "node-attestation-signers"
	recordsPolicy      = "node-attestation-records"

	nodeName = "node-1"
)

// guarded are the signers whose requests only the controller approves, signed those for which only
// it writes the certificate. The manifests give it the rights for those granted: for the others the
// right is optional, or does not exist yet.
var (
	clouds = []string{
		"cluster.x-k8s.io/kube-apiserver-client-kubelet-ec2", "cluster.x-k8s.io/kube-apiserver-client-kubelet-ec2-role",
		"cluster.x-k8s.io/kube-apiserver-client-kubelet-gce", "cluster.x-k8s.io/kube-apiserver-client-kubelet-azure",
	}
	guarded = slices.Concat(clouds, []string{tpmSigner, insecureSigner, servingSigner, builtinSigner})
	signed  = slices.Concat(clouds, []string{tpmSigner, insecureSigner, servingSigner})
	granted = slices.Concat(clouds, []string{tpmSigner, builtinSigner})
)

// bed has what all tests of the package share. Tests that use it run one after the other. Tests
// with a cluster of their own (newLive) run after them, in parallel: they mostly wait.
type bed struct {
	*testbed.ControlPlane
	adminKubeconfig string
	// token is a kubeadm bootstrap token.
	token string
	// admin is a member of system:masters; controller has a token of its service account;
	// bootstrapper and node have the credentials of machines.
	admin, controller, bootstrapper, node kubernetes.Interface
	controllerConfig                      *rest.Config
	// early and earlyAnnotated were filed before the policies were there.
	early, earlyAnnotated, earlyFull string
	// earlyMetadata has 2000 labels, 100 finalizers and 100 owners. earlyNode and earlyController
	// ask another signer for a node's name and for the controller's.
	earlyMetadata, earlyNode, earlyController string
}

var shared *bed

func TestMain(m *testing.M) {
	testbed.Parallel(3)
	os.Exit(testbed.Main(m, func(ctx context.Context, cp *testbed.ControlPlane, dir string) error {
		shared = &bed{ControlPlane: cp, adminKubeconfig: filepath.Join(dir, "admin.kubeconfig")}
		return shared.prepare(ctx, func(ctx context.Context) error {
			if err := shared.apply(ctx, "-k", manifests); err != nil {
				return err
			}
			return controllerprocess.AwaitPolicies(ctx, cp)
		})
	}))
}

// prepare makes a cluster as kubeadm leaves it, with both auto-approving bindings, and then
// installs the manifests. install returns when the policies are in force.
func (b *bed) prepare(ctx context.Context, install func(context.Context) error) (err error) {
	b.admin = b.Client()
	if err := b.WriteKubeconfig(b.adminKubeconfig, b.AdminUser()); err != nil {
		return err
	}
	if err := b.BindKubeadmBootstrap(ctx); err != nil {
		return err
	}
	if b.token, err = b.CreateBootstrapToken(ctx, time.Hour); err != nil {
		return err
	}
	if b.bootstrapper, err = clientOf(b.BootstrapKubeconfig(b.token)); err != nil {
		return err
	}
	pair, err := b.ClientCA().IssueClient("system:node:"+nodeName, []string{"system:nodes"}, time.Now().Add(-time.Hour), time.Now().Add(time.Hour))
	if err != nil {
		return err
	}
	if b.node, err = clientOf(b.Kubeconfig(testbed.CertificateUser(pair))); err != nil {
		return err
	}

	if b.early, err = file(ctx, b.bootstrapper, builtinSigner); err != nil {
		return err
	}
	forged := func(csr *certificatesv1.CertificateSigningRequest) {
		csr.Annotations = map[string]string{attestation.AnnotationChallenge: "forged"}
	}
	if b.earlyAnnotated, err = file(ctx, b.bootstrapper, helloSigner, forged); err != nil {
		return err
	}

	full := func(csr *certificatesv1.CertificateSigningRequest) { csr.Annotations = annotations(5000) }
	if b.earlyFull, err = file(ctx, b.bootstrapper, "example.com/x", full); err != nil {
		return err
	}

	heavy := func(csr *certificatesv1.CertificateSigningRequest) {
		csr.Labels, csr.Finalizers, csr.OwnerReferences = annotations(2000), finalizers(100), owners(100, "pod")
	}
	if b.earlyMetadata, err = file(ctx, b.bootstrapper, helloSigner, heavy); err != nil {
		return err
	}
	if b.earlyNode, err = file(ctx, b.bootstrapper, clientSigner, named("system:node:victim", "system:nodes")); err != nil {
		return err
	}
	if b.earlyController, err = file(ctx, b.node, clientSigner, named(controllerUser, "system:serviceaccounts")); err != nil {
		return err
	}

	if err := install(ctx); err != nil {
		return err
	}
	if b.controllerConfig, err = b.accountConfig(ctx); err != nil {
		return err
	}
	if b.controller, err = kubernetes.NewForConfig(b.controllerConfig); err != nil {
		return err
	}
	// The status controller type-checks the policies; it is one of those that always run.
	return b.StartControllerManager(ctx, "--controllers=validatingadmissionpolicy-status-controller")
}

// apply has kubectl apply manifests as the documentation says: on the server's side, and strictly.
func (b *bed) apply(ctx context.Context, args ...string) error {
	_, err := b.RunKubectl(ctx, b.adminKubeconfig, append([]string{"apply", "--server-side", "--validate=strict", "--force-conflicts"}, args...)...)
	return err
}

// accountConfig returns a client configuration with a token of the controller's service account.
func (b *bed) accountConfig(ctx context.Context) (*rest.Config, error) {
	token, err := b.admin.CoreV1().ServiceAccounts(namespace).CreateToken(ctx, account, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		return nil, err
	}
	return &rest.Config{
		Host: b.ServerURL(), BearerToken: token.Status.Token, QPS: -1,
		TLSClientConfig: rest.TLSClientConfig{CAData: b.ServerCA()},
	}, nil
}

var dryRun = []string{metav1.DryRunAll}

const patience = harness.Soon

// refusedBy reports whether this policy, in the API or on disk, and not RBAC or validation, has
// refused.
func refusedBy(err error, policy string) bool {
	return (apierrors.IsForbidden(err) || apierrors.IsRequestEntityTooLargeError(err)) &&
		(strings.Contains(err.Error(), "ValidatingAdmissionPolicy '"+policy+"'") || strings.Contains(err.Error(), "ValidatingAdmissionPolicy '"+policy+policyset.Suffix+"'"))
}

func wantRefusedBy(t *testing.T, err error, policy string) {
	t.Helper()
	if !refusedBy(err, policy) {
		t.Errorf("policy %s has not refused: %v", policy, err)
	}
}

// wantNoRight wants a refusal that no policy has to do with.
func wantNoRight(t *testing.T, err error) {
	t.Helper()
	if !apierrors.IsForbidden(err) || strings.Contains(err.Error(), "ValidatingAdmissionPolicy") {
		t.Errorf("not refused for want of a right: %v", err)
	}
}

func want(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Errorf("refused: %v", err)
	}
}

func clientOf(kubeconfig []byte) (kubernetes.Interface, error) {
	config, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	if err != nil {
		return nil, err
	}
	config.QPS = -1
	return kubernetes.NewForConfig(config)
}

// as returns a client of another user, by impersonation.
func as(t *testing.T, user string, groups ...string) kubernetes.Interface {
	t.Helper()
	return impersonating(t, shared.AdminConfig(), user, groups...)
}

func impersonating(t *testing.T, config *rest.Config, user string, groups ...string) kubernetes.Interface {
	t.Helper()
	config.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: append(groups, "system:authenticated")}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// newRequest is a request as a kubelet would file it.
func newRequest(signer string) *certificatesv1.CertificateSigningRequest {
	return &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Name: "node-csr-" + strings.ToLower(rand.Text())},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:    requestFor("system:node:"+nodeName, "system:nodes"),
			SignerName: signer,
			Usages:     []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth},
		},
	}
}

// named sets the subject of a request.
func named(user string, groups ...string) func(*certificatesv1.CertificateSigningRequest) {
	return func(csr *certificatesv1.CertificateSigningRequest) { csr.Spec.Request = requestFor(user, groups...) }
}

// requestFor returns a PKCS#10 request in PEM, of a new key.
func requestFor(user string, groups ...string) []byte {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err)
	}
	subject := pkix.Name{CommonName: user, Organization: groups}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: subject}, key)
	if err != nil {
		panic(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
}

// padTo appends what the API server does not read.
func padTo(request []byte, size int) []byte {
	return append(slices.Clone(request), []byte(strings.Repeat("\n", size-len(request)))...)
}

const maxAnnotations = 256

func annotations(count int) map[string]string {
	all := map[string]string{}
	for i := range count {
		all[fmt.Sprintf("%05x", i)] = ""
	}
	return all
}

// file files a request and returns its name.
func file(ctx context.Context, client kubernetes.Interface, signer string, options ...func(*certificatesv1.CertificateSigningRequest)) (string, error) {
	csr := newRequest(signer)
	for _, option := range options {
		option(csr)
	}
	_, err := client.CertificatesV1().CertificateSigningRequests().Create(ctx, csr, metav1.CreateOptions{})
	return csr.Name, err
}

// filed is a request of a machine, pending.
func filed(t *testing.T, signer string) string {
	t.Helper()
	// Not a name that kube-controller-manager would approve by itself, were it let to.
	name, err := file(t.Context(), asking(signer), signer)
	if err != nil {
		t.Fatal(err)
	}
	return name
}

func get(t *testing.T, name string) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	csr, err := shared.admin.CertificatesV1().CertificateSigningRequests().Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return csr
}

func hasCondition(csr *certificatesv1.CertificateSigningRequest, kind certificatesv1.RequestConditionType) bool {
	return slices.ContainsFunc(csr.Status.Conditions, func(c certificatesv1.CertificateSigningRequestCondition) bool { return c.Type == kind })
}

// change reads a request and has update write it. It tries again after a conflict.
func change(ctx context.Context, client kubernetes.Interface, name string, update func(*certificatesv1.CertificateSigningRequest) error) error {
	for {
		csr, err := client.CertificatesV1().CertificateSigningRequests().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if err = update(csr); !apierrors.IsConflict(err) {
			return err
		}
	}
}

func condition(kind certificatesv1.RequestConditionType) certificatesv1.CertificateSigningRequestCondition {
	return certificatesv1.CertificateSigningRequestCondition{Type: kind, Status: corev1.ConditionTrue, Reason: "Test", Message: "by a test"}
}

// write patches the status of the version that was read, as the controller does: it may not update.
func write(ctx context.Context, client kubernetes.Interface, csr *certificatesv1.CertificateSigningRequest, subresource string, fields map[string]any, dryRun []string) error {
	content, err := json.Marshal(map[string]any{"metadata": map[string]any{"resourceVersion": csr.ResourceVersion}, "status": fields})
	if err != nil {
		return err
	}
	_, err = client.CertificatesV1().CertificateSigningRequests().Patch(ctx, csr.Name, types.MergePatchType, content, metav1.PatchOptions{DryRun: dryRun}, subresource)
	return err
}

// decide adds a condition through /approval.
func decide(ctx context.Context, client kubernetes.Interface, name string, kind certificatesv1.RequestConditionType, dryRun []string) error {
	return change(ctx, client, name, func(csr *certificatesv1.CertificateSigningRequest) error {
		csr.Status.Conditions = append(csr.Status.Conditions, condition(kind))
		return write(ctx, client, csr, "approval", map[string]any{"conditions": csr.Status.Conditions}, dryRun)
	})
}

func approve(t *testing.T, client kubernetes.Interface, name string) error {
	t.Helper()
	return decide(t.Context(), client, name, certificatesv1.CertificateApproved, nil)
}

// fail adds the condition Failed through /status.
func fail(t *testing.T, client kubernetes.Interface, name string) error {
	t.Helper()
	return change(t.Context(), client, name, func(csr *certificatesv1.CertificateSigningRequest) error {
		csr.Status.Conditions = append(csr.Status.Conditions, condition(certificatesv1.CertificateFailed))
		return write(t.Context(), client, csr, "status", map[string]any{"conditions": csr.Status.Conditions}, nil)
	})
}

// certify writes a certificate through /status.
func certify(ctx context.Context, client kubernetes.Interface, name string, certificate []byte, dryRun []string) error {
	return change(ctx, client, name, func(csr *certificatesv1.CertificateSigningRequest) error {
		return write(ctx, client, csr, "status", map[string]any{"certificate": certificate}, dryRun)
	})
}

func issue(t *testing.T, client kubernetes.Interface, name string) error {
	t.Helper()
	certificate, err := anyCertificate()
	if err != nil {
		t.Fatal(err)
	}
	return certify(t.Context(), client, name, certificate, nil)
}

// anyCertificate is not trusted: the API server only requires that it is well formed.
func anyCertificate() ([]byte, error) {
	ca, err := testbed.NewCA("nobody")
	if err != nil {
		return nil, err
	}
	return ca.CertPEM(), nil
}
